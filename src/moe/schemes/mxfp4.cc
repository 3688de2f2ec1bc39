// Scheme "mxfp4" (contract 5.10): gpt-oss: W4A16.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsMx(format, DType::kF4E2M1); }

}  // namespace

extern constinit const SchemeEntry mxfp4{"mxfp4",
                                         "e2m1 with e8m0 scales per 32, activations as they are",
                                         &Accepts,
                                         "e2m1, e8m0 scale per 32 columns",
                                         ActQuantKind::kNone,
                                         QuantType::kPer1x32,
                                         kRunners,
                                         ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
