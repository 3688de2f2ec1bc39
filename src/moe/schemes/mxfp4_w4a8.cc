// Scheme "mxfp4_w4a8" (contract 5.3, 5.10): ModelSlim W4A8_MXFP.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsMx(format, DType::kF4E2M1); }

}  // namespace

extern constinit const SchemeEntry mxfp4_w4a8{"mxfp4_w4a8",
                                              "e2m1 with e8m0 scales per 32, activations mxfp8",
                                              &Accepts,
                                              "e2m1, e8m0 scale per 32 columns",
                                              ActQuantKind::kMxFp8,
                                              QuantType::kPer1x32,
                                              kRunners,
                                              ActQuantKind::kMxFp8};

}  // namespace switchyard::moe::schemes
