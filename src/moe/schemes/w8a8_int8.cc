// Scheme "w8a8_int8" (contract 5.3, 5.9): ModelSlim W8A8_DYNAMIC, w8a8_int8 and compressed-tensors
// int-quantized.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t rows, size_t cols) {
  return IsPerChannel(format, DType::kI8, cols) || IsPerTensor(format, DType::kI8, rows, cols);
}

}  // namespace

extern constinit const SchemeEntry w8a8_int8{
    "w8a8_int8",
    "int8, a scale per output channel, activations int8 per token",
    &Accepts,
    "int8, scale per output channel",
    ActQuantKind::kInt8Token,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kInt8Token};

}  // namespace switchyard::moe::schemes
