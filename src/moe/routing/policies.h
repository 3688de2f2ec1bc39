// Choice and weights of one token's routed columns, in logical ids. Contract 2.2 to 2.5, 2.8, 2.12.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Scratch of one worker.
//
// Shapes: logits, scores, choice [E]; group_scores, group_ids [G].
struct RoutingScratch {
  float* logits;
  float* scores;
  float* choice;
  float* group_scores;
  int32_t* group_ids;
};

// Writes NumRouted() ids and weights, columns in descending choice value; the weights are
// renormalised and scaled as the config says.
void RouteToken(const TopKConfig& config, const TopKInputs& inputs, const float* logits,
                size_t token, const RoutingScratch& scratch, int32_t* ids, float* weights);

// Whether the routed weights are divided by their sum after the policy.
inline bool PolicyRenormalizes(const TopKConfig& config) {
  switch (config.policy) {
    case RoutingPolicy::kScores:
    case RoutingPolicy::kCohere2Sigmoid:
    case RoutingPolicy::kAfmoe:
    case RoutingPolicy::kGroupRouter: return config.renormalize;
    case RoutingPolicy::kHash: return config.scoring_func != ScoringFunc::kSoftmax;
    case RoutingPolicy::kLlama4:
    case RoutingPolicy::kTopKThenSoftmax:
    case RoutingPolicy::kPhimoeSparsemixer:
    case RoutingPolicy::kGemma4:
    case RoutingPolicy::kFunction: return false;
  }
  return false;
}

// A NaN choice value ranks last: below every number, above what a group limit excludes.
inline constexpr float kNanRank = -1e30f;
// Added to the sum of the weights before they are divided by it.
inline constexpr float kRenormalizeEpsilon = 1e-20f;
// Above it softplus(x) is x in the log1p form.
inline constexpr float kSoftplusLinear = 20.0f;

}  // namespace switchyard::moe
