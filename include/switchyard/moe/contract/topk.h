// Router policy and its result. Contract 1.3, 2.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/rows.h"

namespace switchyard::moe {

// How router logits become scores. Contract 2.2.
enum class ScoringFunc { kSoftmax, kSigmoid };
std::string_view ScoringFuncName(ScoringFunc scoring);

// Contract 2.1. Fixed when the layer is built.
struct TopKConfig {
  size_t num_experts = 0;  // E, columns of the router logits
  size_t top_k = 0;        // K, 1 .. E
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  bool renormalize = true;  // divide the chosen weights by their sum
  std::span<const float> correction_bias =
      {};  // [E] or empty; for the choice only, never in a weight (contract 2.3)
};

// The chosen experts of every token, format STANDARD of contract 1.3.
//
// Shapes: ids i32 [T, K], weights f32 [T, K], both row-major. Ids are global expert ids in [0, E),
//   or -1 = drop this slot (its weight is 0). Within a token non-negative ids are distinct; columns
//   are ordered by descending choice value, ties by id (contract 2.5). Memory belongs to the arena
//   of the call that made it.
struct TopKOutput {
  size_t num_tokens = 0;
  size_t top_k = 0;
  std::span<const float> weights;
  std::span<const int32_t> ids;
  ConstRows router_logits;  // [T, E]

  std::span<const int32_t> Ids(size_t token) const { return ids.subspan(token * top_k, top_k); }
  std::span<const float> Weights(size_t token) const {
    return weights.subspan(token * top_k, top_k);
  }
};

}  // namespace switchyard::moe
