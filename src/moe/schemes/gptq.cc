// Scheme "gptq" (contract 5.8): zero points as they count in the product: v1 checkpoints add their
// 1 on import.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.has_zero && (IsGroupwise(format, DType::kU4) || IsGroupwise(format, DType::kU8));
}

}  // namespace

extern constinit const SchemeEntry gptq{
    "gptq",
    "4- or 8-bit groups with zero points, activations as they are",
    &Accepts,
    "u4 or u8, scale and zero point per group",
    ActQuantKind::kNone,
    QuantType::kNo,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
