// Scheme "unquant" (contract 5.1): f32, f16 or bf16 matrices used as they lie in the checkpoint.
#include "moe/schemes/builtin.h"
#include "quant/linear.h"

namespace switchyard::moe::schemes {
namespace {

MoeQuantInfo QuantInfo(const ExpertWeights& weights) {
  const size_t hidden = weights.hidden_size;
  const size_t intermediate = weights.intermediate_size;
  return {.w1 = {weights.w1, weights.w13_dtype, intermediate, hidden, hidden},
          .w3 = {weights.w3, weights.w13_dtype, intermediate, hidden, hidden},
          .w2 = {weights.w2, weights.w2_dtype, hidden, intermediate, intermediate}};
}

DType ActivationDType(std::string_view setting, const ExpertWeights& weights) {
  const DType w13 = quant::ResolveActDType(setting, weights.w13_dtype);
  const DType w2 = quant::ResolveActDType(setting, weights.w2_dtype);
  return w13 == w2 ? w13 : DType::kF32;
}

double BitsPerWeight(const ExpertWeights& weights) {
  const auto bits = [](DType dtype) { return 8.0 * static_cast<double>(DTypeBytes(dtype)); };
  return (2.0 * bits(weights.w13_dtype) + bits(weights.w2_dtype)) / 3.0;
}

}  // namespace

extern constinit const SchemeEntry unquant{
    "unquant",
    "f32, f16 or bf16, as stored",
    [] {
      return std::vector<std::string_view>{"aiter", "reference"};
    },
    &QuantInfo,
    &ActivationDType,
    &BitsPerWeight};

}  // namespace switchyard::moe::schemes
