// Scheme "fp8_tensor_static" (contract 5.2): activation_scheme static: ExpertBank::act holds the
// largest input_scale of the experts.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "reference"};

bool Accepts(const MatrixFormat& format, size_t rows, size_t cols) {
  return IsPerTensor(format, DType::kF8E4M3, rows, cols);
}

}  // namespace

extern constinit const SchemeEntry fp8_tensor_static{
    "fp8_tensor_static",
    "e4m3, one scale per matrix, activations e4m3 with the checkpoint's scale",
    &Accepts,
    "e4m3, f32 scale per tensor",
    ActQuantKind::kFp8TensorStatic,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
