#include "switchyard/core/profile.h"

namespace switchyard {

std::string_view StageName(Stage stage) {
  switch (stage) {
    case Stage::kEmbedding: return "embedding";
    case Stage::kNorm: return "norms";
    case Stage::kQkv: return "q, k, v";
    case Stage::kRope: return "rope and cache";
    case Stage::kAttention: return "attention";
    case Stage::kOutput: return "output projection";
    case Stage::kRouter: return "router";
    case Stage::kMoePrepare: return "MoE prepare";
    case Stage::kGateUp: return "gate and up";
    case Stage::kDown: return "down";
    case Stage::kCombine: return "combine";
    case Stage::kDense: return "shared and dense MLP";
    case Stage::kHead: return "head";
    case Stage::kOther: return "sampling, other";
  }
  return "";
}

std::string_view ArithmeticName(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kF32: return "f32";
    case Arithmetic::kBF16: return "bf16";
    case Arithmetic::kInt8: return "int8";
  }
  return "";
}

Arithmetic ArithmeticOf(DType weights, DType activations) {
  switch (weights) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2: return activations == DType::kBF16 ? Arithmetic::kBF16 : Arithmetic::kF32;
    default: return Arithmetic::kInt8;
  }
}

double Profile::seconds() const {
  double seconds = 0;
  for (const Row& row : rows_) seconds += row.seconds;
  return seconds;
}

}  // namespace switchyard
