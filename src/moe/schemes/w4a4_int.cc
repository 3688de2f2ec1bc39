// Scheme "w4a4_int" (contract 5.4): ModelSlim W4A4_DYNAMIC; both packings of the checkpoint become
// this one form.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t cols) {
  return IsPerChannel(format, DType::kI4, cols);
}

}  // namespace

extern constinit const SchemeEntry w4a4_int{
    "w4a4_int",
    "int4, a scale per output channel, activations int4 per token",
    &Accepts,
    "int4, scale per output channel",
    ActQuantKind::kInt4Token,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
