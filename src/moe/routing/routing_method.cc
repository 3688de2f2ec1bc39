#include "switchyard/moe/routing/routing_method.h"

#include "moe/routing/columns.h"

namespace switchyard::moe {
namespace {

RoutingMethodType MethodOfSoftmax(const TopKConfig& config) {
  if (!config.correction_bias.empty() || config.router_logit_softcap != 0)
    return RoutingMethodType::kUnspecified;
  return config.renormalize ? RoutingMethodType::kRenormalizeNaive : RoutingMethodType::kDefault;
}

RoutingMethodType MethodOfSigmoid(const TopKConfig& config) {
  if (!config.correction_bias.empty())
    return config.renormalize ? RoutingMethodType::kMiniMax2 : RoutingMethodType::kUnspecified;
  return config.renormalize ? RoutingMethodType::kSigmoidRenorm : RoutingMethodType::kSigmoid;
}

RoutingMethodType MethodOfScores(const TopKConfig& config) {
  if (config.use_grouped_topk) {
    const bool is_v3 = !config.correction_bias.empty() && config.renormalize &&
                       config.group_score_rule != GroupScoreRule::kMax;
    return is_v3 ? RoutingMethodType::kDeepSeekV3 : RoutingMethodType::kUnspecified;
  }
  switch (config.scoring_func) {
    case ScoringFunc::kSoftmax: return MethodOfSoftmax(config);
    case ScoringFunc::kSigmoid: return MethodOfSigmoid(config);
    case ScoringFunc::kSqrtSoftplus: return RoutingMethodType::kUnspecified;
  }
  return RoutingMethodType::kUnspecified;
}

}  // namespace

std::string_view RoutingMethodName(RoutingMethodType method) {
  switch (method) {
    case RoutingMethodType::kDefault: return "default";
    case RoutingMethodType::kRenormalize: return "renormalize";
    case RoutingMethodType::kDeepSeekV3: return "deepseek_v3";
    case RoutingMethodType::kLlama4: return "llama4";
    case RoutingMethodType::kRenormalizeNaive: return "renormalize_naive";
    case RoutingMethodType::kTopK: return "topk";
    case RoutingMethodType::kSigmoidRenorm: return "sigmoid_renorm";
    case RoutingMethodType::kMiniMax2: return "minimax2";
    case RoutingMethodType::kSigmoid: return "sigmoid";
    case RoutingMethodType::kUnspecified: return "unspecified";
  }
  return "?";
}

RoutingMethodType RoutingMethodOf(const TopKConfig& config) {
  if (config.simulated_routing != SimulatedRouting::kNone) return RoutingMethodType::kUnspecified;
  switch (config.policy) {
    case RoutingPolicy::kScores: return MethodOfScores(config);
    case RoutingPolicy::kLlama4: return RoutingMethodType::kLlama4;
    case RoutingPolicy::kTopKThenSoftmax:
      return config.renormalize ? RoutingMethodType::kRenormalize : RoutingMethodType::kTopK;
    case RoutingPolicy::kCohere2Sigmoid: return MethodOfSigmoid(config);
    case RoutingPolicy::kAfmoe:
      return config.scoring_func == ScoringFunc::kSigmoid ? MethodOfSigmoid(config)
                                                          : MethodOfSoftmax(config);
    case RoutingPolicy::kPhimoeSparsemixer:
    case RoutingPolicy::kGroupRouter:
    case RoutingPolicy::kGemma4:
    case RoutingPolicy::kHash:
    case RoutingPolicy::kFunction: return RoutingMethodType::kUnspecified;
  }
  return RoutingMethodType::kUnspecified;
}

bool RoutingMethodReproduces(RoutingMethodType method, const TopKConfig& config,
                             const TopKInputs& inputs) {
  const bool is_placed =
      inputs.placement != nullptr && inputs.placement->algorithm != DispatchAlgorithm::kNone;
  if (is_placed || config.num_fused_shared_experts != 0 || config.sqrtsoftplus_log1p ||
      inputs.dynamic_expert_bias.rows != 0)
    return false;
  return method != RoutingMethodType::kUnspecified && method == RoutingMethodOf(config);
}

}  // namespace switchyard::moe
