#include "moe/routing/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "moe/routing/columns.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "routing: " + message);
}

void Require(bool holds, std::string_view field, size_t found, const std::string& expected) {
  if (!holds) Invalid(fmt::format("{} must be {}, found {}", field, expected, found));
}

// Fields that only one policy reads: set without it, they would be ignored in silence.
void RequireUnused(const TopKConfig& config, bool is_set, std::string_view field) {
  if (is_set) {
    Invalid(fmt::format("{} is set, but the policy {} does not use it", field,
                        RoutingPolicyName(config.policy)));
  }
}

void ValidateCounts(const TopKConfig& config) {
  const size_t shared = config.num_fused_shared_experts;
  // Ids are i32 and shared slots come on top of the experts.
  constexpr size_t kMaxExperts = size_t{1} << 24;
  Require(config.num_experts >= 1 && config.num_experts <= kMaxExperts, "num_experts",
          config.num_experts, fmt::format("at least 1 and at most {}", kMaxExperts));
  Require(shared <= kMaxExperts, "num_fused_shared_experts", shared,
          fmt::format("at most {}", kMaxExperts));
  const std::string range =
      shared == 0 ? fmt::format("1 to {} (the number of experts)", config.num_experts)
                  : fmt::format("{} to {} (the number of experts and {} shared columns)",
                                shared + 1, config.num_experts + shared, shared);
  Require(config.top_k > shared && config.top_k - shared <= config.num_experts, "top_k",
          config.top_k, range);
}

void ValidateGroups(const TopKConfig& config) {
  if (!config.use_grouped_topk) {
    Require(config.num_expert_group == 0 && config.topk_group == 0, "num_expert_group",
            config.num_expert_group, "unset (as topk_group) without use_grouped_topk");
    return;
  }
  RequireUnused(config, config.policy != RoutingPolicy::kScores, "use_grouped_topk");
  const size_t groups = config.num_expert_group;
  Require(groups >= 1 && config.num_experts % groups == 0, "num_expert_group", groups,
          fmt::format("a divisor of {} (the number of experts)", config.num_experts));
  Require(config.topk_group >= 1 && config.topk_group <= groups, "topk_group", config.topk_group,
          fmt::format("1 to {} (num_expert_group)", groups));
}

// Under rule 3 what is outside the kept groups cannot be chosen; under rule 2 it fills up.
void RequireSurvivors(const TopKConfig& config) {
  if (!config.use_grouped_topk) return;
  const size_t survivors = config.topk_group * (config.num_experts / config.num_expert_group);
  if (config.NumRouted() > survivors) {
    Invalid(
        fmt::format("{} routed columns are asked for, but only {} experts survive: {} of {} "
                    "groups of {}, with a bias; lower top_k or raise topk_group",
                    config.NumRouted(), survivors, config.topk_group, config.num_expert_group,
                    config.num_experts / config.num_expert_group));
  }
}

void ValidateBias(const TopKConfig& config) {
  if (config.correction_bias.empty()) return;
  Require(config.correction_bias.size() == config.num_experts, "the size of the correction bias",
          config.correction_bias.size(), fmt::format("{}", config.num_experts));
  RequireUnused(config,
                config.policy != RoutingPolicy::kScores && config.policy != RoutingPolicy::kAfmoe,
                "the correction bias");
  RequireSurvivors(config);
}

void ValidateNumbers(const TopKConfig& config) {
  const double factor = config.routed_scaling_factor;
  if (!std::isfinite(factor) || factor <= 0)
    Invalid(fmt::format("routed_scaling_factor must be finite and above 0, found {}", factor));
  const double shared = config.fused_shared_experts_scaling_factor;
  if (!std::isfinite(shared))
    Invalid(fmt::format("fused_shared_experts_scaling_factor must be finite, found {}", shared));
  const double cap = config.router_logit_softcap;
  if (!std::isfinite(cap) || cap < 0)
    Invalid(fmt::format("router_logit_softcap must be finite and not negative, found {}", cap));
  const bool has_softmax =
      config.policy == RoutingPolicy::kGroupRouter ||
      (config.scoring_func == ScoringFunc::kSoftmax &&
       (config.policy == RoutingPolicy::kScores || config.policy == RoutingPolicy::kAfmoe ||
        config.policy == RoutingPolicy::kHash));
  if (cap != 0 && !has_softmax) {
    Invalid(fmt::format("router_logit_softcap is for softmax scores, found {} with policy {}",
                        ScoringFuncName(config.scoring_func), RoutingPolicyName(config.policy)));
  }
  if (config.sqrtsoftplus_log1p && config.scoring_func != ScoringFunc::kSqrtSoftplus) {
    Invalid(fmt::format("sqrtsoftplus_log1p needs scoring_func sqrtsoftplus, found {}",
                        ScoringFuncName(config.scoring_func)));
  }
}

void ValidateShared(const TopKConfig& config) {
  Require(config.moe_ep_size >= 1, "moe_ep_size", config.moe_ep_size, "at least 1");
  Require(config.moe_ep_rank < config.moe_ep_size, "moe_ep_rank", config.moe_ep_rank,
          fmt::format("0 to {}", config.moe_ep_size - 1));
  if (config.shared_layout == SharedLayout::kPerRank &&
      config.fused_shared_experts_scaling_factor != 1.0) {
    Invalid(
        fmt::format("fused_shared_experts_scaling_factor is of global shared slots; per-rank slots "
                    "take none, found {}",
                    config.fused_shared_experts_scaling_factor));
  }
}

// Entries of the hash table: in range, and distinct within a row.
void ValidateTable(const TopKConfig& config) {
  const size_t k = config.NumRouted();
  const std::span<const int32_t> table = config.tid2eid;
  Require(!table.empty() && table.size() % k == 0, "the size of tid2eid", table.size(),
          fmt::format("a positive multiple of {} (the routed columns)", k));
  for (size_t i = 0; i < table.size(); ++i) {
    const size_t token = i / k;
    if (table[i] < 0 || static_cast<size_t>(table[i]) >= config.num_experts) {
      Invalid(fmt::format("tid2eid of token id {} must be 0 to {}, found {}", token,
                          config.num_experts - 1, table[i]));
    }
    const auto row = table.begin() + static_cast<std::ptrdiff_t>(token * k);
    const auto here = table.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(row, here, table[i]) != here)
      Invalid(fmt::format("tid2eid of token id {} names expert {} twice", token, table[i]));
  }
}

void ValidateGroupRouter(const TopKConfig& config) {
  const size_t groups = config.router_n_groups;
  Require(groups >= 1 && config.num_experts % groups == 0 && config.NumRouted() % groups == 0,
          "router_n_groups", groups,
          fmt::format("a divisor of {} experts and of {} routed columns", config.num_experts,
                      config.NumRouted()));
}

// What each policy needs, and what only it may have.
void ValidatePolicy(const TopKConfig& config) {
  const RoutingPolicy policy = config.policy;
  RequireUnused(config, policy != RoutingPolicy::kHash && !config.tid2eid.empty(), "tid2eid");
  RequireUnused(config, policy != RoutingPolicy::kGemma4 && !config.per_expert_scale.empty(),
                "per_expert_scale");
  RequireUnused(config, policy != RoutingPolicy::kGroupRouter && config.router_n_groups != 0,
                "router_n_groups");
  RequireUnused(
      config, policy != RoutingPolicy::kFunction && config.custom_routing_function.route != nullptr,
      "custom_routing_function");
  switch (policy) {
    case RoutingPolicy::kScores:
    case RoutingPolicy::kTopKThenSoftmax:
    case RoutingPolicy::kCohere2Sigmoid: return;
    case RoutingPolicy::kLlama4:
      return Require(config.NumRouted() == 1, "the number of routed columns of policy llama4",
                     config.NumRouted(), "1");
    case RoutingPolicy::kPhimoeSparsemixer:
      if (!std::isfinite(config.jitter_eps) || config.jitter_eps < 0)
        Invalid(
            fmt::format("jitter_eps must be finite and not negative, found {}", config.jitter_eps));
      return Require(config.NumRouted() == 2,
                     "the number of routed columns of policy phimoe_sparsemixer",
                     config.NumRouted(), "2");
    case RoutingPolicy::kAfmoe:
      if (config.scoring_func == ScoringFunc::kSqrtSoftplus)
        Invalid("scoring_func of policy afmoe must be softmax or sigmoid, found sqrtsoftplus");
      return;
    case RoutingPolicy::kGroupRouter: return ValidateGroupRouter(config);
    case RoutingPolicy::kGemma4:
      return Require(config.per_expert_scale.size() == config.num_experts,
                     "the size of per_expert_scale", config.per_expert_scale.size(),
                     fmt::format("{}", config.num_experts));
    case RoutingPolicy::kHash: return ValidateTable(config);
    case RoutingPolicy::kFunction:
      if (config.custom_routing_function.route == nullptr)
        Invalid("custom_routing_function is missing, the policy function needs it");
      return;
  }
}

void CheckDynamicBias(const TopKConfig& config, ConstRows logits, ConstRows bias) {
  if (bias.rows == 0) return;
  if (bias.rows != logits.rows || bias.cols != config.num_experts) {
    Invalid(fmt::format("the bias per token must be [{}, {}], found [{}, {}]", logits.rows,
                        config.num_experts, bias.rows, bias.cols));
  }
  if (!config.correction_bias.empty())
    Invalid("a bias per token was given to a router that has a correction bias of its own");
  if (config.policy != RoutingPolicy::kScores || config.scoring_func != ScoringFunc::kSigmoid) {
    Invalid(fmt::format("a bias per token is for sigmoid scores, found {} with policy {}",
                        ScoringFuncName(config.scoring_func), RoutingPolicyName(config.policy)));
  }
  RequireSurvivors(config);
}

void CheckInputIds(const TopKConfig& config, size_t num_tokens, const TopKInputs& inputs) {
  if (config.policy != RoutingPolicy::kHash) return;
  if (inputs.input_ids.size() != num_tokens) {
    Require(false, "the number of input ids", inputs.input_ids.size(),
            fmt::format("{} (the tokens)", num_tokens));
  }
  const size_t vocabulary = config.tid2eid.size() / config.NumRouted();
  for (size_t t = 0; t < std::min(num_tokens, inputs.num_token_non_padded); ++t) {
    const int64_t id = inputs.input_ids[t];
    if (id < 0 || static_cast<size_t>(id) >= vocabulary) {
      Invalid(fmt::format("input id of token {} must be 0 to {} (the rows of tid2eid), found {}", t,
                          vocabulary - 1, id));
    }
  }
}

// Sizes only: entries are proved once, by ValidatePlacement.
void CheckPlacement(const TopKConfig& config, const ExpertPlacement* placement) {
  if (placement == nullptr || placement->algorithm == DispatchAlgorithm::kNone) return;
  if (placement->algorithm == DispatchAlgorithm::kLp) ValidatePlacement(*placement, 0);
  const bool by_rank = placement->algorithm == DispatchAlgorithm::kStatic;
  const size_t found = by_rank ? placement->rank_map.size() : placement->num_valid.size();
  if (found != config.num_experts || placement->num_physical < config.num_experts ||
      (!by_rank &&
       placement->all_physical.size() != config.num_experts * placement->max_replicas)) {
    Invalid(
        fmt::format("the placement map is of {} logical and {} physical experts, the router has "
                    "{} experts",
                    found, placement->num_physical, config.num_experts));
  }
}

}  // namespace

void ValidateTopK(const TopKConfig& config) {
  ValidateCounts(config);
  ValidateGroups(config);
  ValidateBias(config);
  ValidateNumbers(config);
  ValidateShared(config);
  ValidatePolicy(config);
  if (config.simulated_routing == SimulatedRouting::kRoundRobin) {
    Require(config.num_experts % config.moe_ep_size == 0, "moe_ep_size", config.moe_ep_size,
            fmt::format("a divisor of {} experts for simulated routing", config.num_experts));
  }
}

void CheckInputs(const TopKConfig& config, ConstRows logits, const TopKInputs& inputs) {
  const size_t num_tokens = logits.rows;
  if (num_tokens == 0) return;
  // Every call comes through here: a message is only made for a mistake.
  if (logits.cols != config.num_experts) {
    Require(false, "the number of columns of the router logits", logits.cols,
            fmt::format("{} (the number of experts)", config.num_experts));
  }
  if (inputs.hidden.rows != 0 && inputs.hidden.rows != num_tokens) {
    Require(false, "the number of rows of hidden", inputs.hidden.rows,
            fmt::format("{} (the tokens)", num_tokens));
  }
  CheckDynamicBias(config, logits, inputs.dynamic_expert_bias);
  CheckInputIds(config, num_tokens, inputs);
  CheckPlacement(config, inputs.placement);
  const size_t num_physical = NumPhysical(config, inputs);
  if (config.num_fused_shared_experts != 0 && config.shared_layout == SharedLayout::kPerRank &&
      num_physical % config.moe_ep_size != 0) {
    Require(false, "the number of physical experts", num_physical,
            fmt::format("a multiple of {} (moe_ep_size) for per-rank shared slots",
                        config.moe_ep_size));
  }
}

std::vector<int32_t> DefaultHashTable(size_t vocabulary, size_t columns, size_t num_experts) {
  if (num_experts == 0 || columns > num_experts) {
    Invalid(fmt::format("a hash table of {} columns needs as many experts, found {}", columns,
                        num_experts));
  }
  std::vector<int32_t> table(vocabulary * columns);
  for (size_t i = 0; i < table.size(); ++i)
    table[i] = static_cast<int32_t>((i / columns + i % columns) % num_experts);
  return table;
}

}  // namespace switchyard::moe
