// Scheme "fp8_channel" (contract 5.2, 5.12): quant type per_Token of the fused runner.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t rows, size_t cols) {
  return IsPerChannel(format, DType::kF8E4M3, cols) ||
         IsPerTensor(format, DType::kF8E4M3, rows, cols);
}

}  // namespace

extern constinit const SchemeEntry fp8_channel{
    "fp8_channel",
    "e4m3, a scale per output channel or one for all, activations e4m3 per token",
    &Accepts,
    "e4m3, scale per output channel or one for all",
    ActQuantKind::kFp8Token,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
