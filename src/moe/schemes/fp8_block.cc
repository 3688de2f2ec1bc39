// Scheme "fp8_block" (contract 5.2): DeepSeek's layout (weight_scale_inv); last blocks may be
// ragged.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.dtype == DType::kF8E4M3 && HasGrid(format) && !format.has_zero;
}

}  // namespace

extern constinit const SchemeEntry fp8_block{
    "fp8_block",
    "e4m3, a scale per block (128x128), activations e4m3 per group of as many columns",
    &Accepts,
    "e4m3, a float or e8m0 scale per block",
    ActQuantKind::kFp8Group,
    QuantType::kPer128x128,
    kRunners,
    ActQuantKind::kFp8Group};

}  // namespace switchyard::moe::schemes
