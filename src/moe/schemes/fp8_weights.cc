// Scheme "fp8_weights" : e4m3 weights under any grid of scales, activations as they are.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.dtype == DType::kF8E4M3 && HasGrid(format) && !format.has_zero;
}

}  // namespace

extern constinit const SchemeEntry fp8_weights{"fp8_weights",
                                               "e4m3 weights, activations as they are",
                                               &Accepts,
                                               "e4m3 with scales",
                                               ActQuantKind::kNone,
                                               QuantType::kNo,
                                               kRunners,
                                               ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
