// Scheme "mxfp4_fp8_static" (contract 5.11): Quark's W4A8 with static per-tensor activations.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsMx(format, DType::kF4E2M1); }

}  // namespace

extern constinit const SchemeEntry mxfp4_fp8_static{
    "mxfp4_fp8_static",
    "e2m1 with e8m0 scales per 32, activations e4m3 with the checkpoint's scale",
    &Accepts,
    "e2m1, e8m0 scale per 32 columns",
    ActQuantKind::kFp8TensorStatic,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
