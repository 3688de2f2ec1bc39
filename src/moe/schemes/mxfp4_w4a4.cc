// Scheme "mxfp4_w4a4" (contract 5.3, 5.11): Quark W4A4 and ModelSlim W4A4_MXFP4.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsMx(format, DType::kF4E2M1); }

}  // namespace

extern constinit const SchemeEntry mxfp4_w4a4{"mxfp4_w4a4",
                                              "e2m1 with e8m0 scales per 32, activations mxfp4",
                                              &Accepts,
                                              "e2m1, e8m0 scale per 32 columns",
                                              ActQuantKind::kMxFp4,
                                              QuantType::kPer1x32,
                                              kRunners,
                                              ActQuantKind::kMxFp4};

}  // namespace switchyard::moe::schemes
