// Scheme "w4afp8" (contract 5.13): int4 groups with static e4m3 activations.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return !format.has_zero && IsGroupwise(format, DType::kI4);
}

}  // namespace

extern constinit const SchemeEntry w4afp8{
    "w4afp8",
    "int4 groups, activations e4m3 with the checkpoint's scale",
    &Accepts,
    "int4, scale per group",
    ActQuantKind::kFp8TensorStatic,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
