// Scheme "fp8_block" (contract 5.2): DeepSeek's layout (weight_scale_inv); last blocks may be
// ragged.
#include "moe/schemes/builtin.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.dtype == DType::kF8E4M3 && format.scale_dtype == DType::kF32 &&
         format.scale_rows == 128 && format.scale_cols == 128 && !format.has_zero;
}

}  // namespace

extern constinit const SchemeEntry fp8_block{
    "fp8_block",
    "e4m3, a scale per 128x128 block, activations e4m3 per 1x128",
    &Accepts,
    "e4m3, f32 scale per 128x128 block",
    ActQuantKind::kFp8Group,
    QuantType::kPer128x128,
    kRunners,
    ActQuantKind::kFp8Group};

}  // namespace switchyard::moe::schemes
