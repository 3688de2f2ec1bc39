// Scheme "quark_int4fp8" (contract 5.11): made from bf16 at load; the fp8 step lives in the scale.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t cols) {
  return IsPerChannel(format, DType::kI4, cols);
}

}  // namespace

extern constinit const SchemeEntry quark_int4fp8{
    "quark_int4fp8",
    "int4, a scale per output channel, activations e4m3 per token",
    &Accepts,
    "int4, scale per output channel",
    ActQuantKind::kFp8Token,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
