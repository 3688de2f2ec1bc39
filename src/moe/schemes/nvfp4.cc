// Scheme "nvfp4" (contract 5.14): e2m1 with e4m3 scales per 16 and one f32 for all; weights alone.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.dtype == DType::kF4E2M1 && format.scale_dtype == DType::kF8E4M3 &&
         format.scale_rows == 1 && format.scale_cols == 16 && format.has_tensor_scale &&
         !format.has_zero;
}

}  // namespace

extern constinit const SchemeEntry nvfp4{
    "nvfp4",
    "e2m1 with e4m3 scales per 16 and one for all, activations as they are",
    &Accepts,
    "e2m1, e4m3 scale per 16 columns, f32 tensor scale",
    ActQuantKind::kNone,
    QuantType::kNo,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
