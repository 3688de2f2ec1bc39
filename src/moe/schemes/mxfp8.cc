// Scheme "mxfp8" (contract 5.2, 5.3): ModelSlim W8A8_MXFP8 and quant_method mxfp8.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsMx(format, DType::kF8E4M3); }

}  // namespace

extern constinit const SchemeEntry mxfp8{"mxfp8",
                                         "e4m3 with e8m0 scales per 32, activations the same",
                                         &Accepts,
                                         "e4m3, e8m0 scale per 32 columns",
                                         ActQuantKind::kMxFp8,
                                         QuantType::kPer1x32,
                                         kRunners,
                                         ActQuantKind::kMxFp8};

}  // namespace switchyard::moe::schemes
