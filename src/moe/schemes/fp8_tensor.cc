// Scheme "fp8_tensor" (contract 5.2): the dynamic form; the scale of the activations depends on the
// whole batch, so a token's bits do too.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t rows, size_t cols) {
  return IsPerTensor(format, DType::kF8E4M3, rows, cols);
}

}  // namespace

extern constinit const SchemeEntry fp8_tensor{
    "fp8_tensor",
    "e4m3, one scale per matrix, activations e4m3 with one scale per batch",
    &Accepts,
    "e4m3, f32 scale per tensor",
    ActQuantKind::kFp8Tensor,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
