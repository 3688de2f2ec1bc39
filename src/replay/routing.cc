// Kind "routing": router logits to expert ids and weights.
#include "replay/routing.h"

#include <fmt/format.h>

#include <utility>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::replay {
namespace {

using moe::DispatchAlgorithm;
using moe::RoutingPolicy;
using moe::ScoringFunc;

// The value that a config field names. The error lists nothing: cases are written by a program.
template <typename T>
T Named(const CaseFile& file, std::string_view key,
        std::initializer_list<std::pair<std::string_view, T>> names) {
  const std::string found = file.Text(key);
  for (const auto& [name, value] : names) {
    if (name == found) return value;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("case {}: unknown {} {}", file.name(), key, QuoteForMessage(found)));
}

// A number among custom_args, which only some policies have.
double CustomArgument(const CaseFile& file, const char* key) {
  const auto args = file.config().find("custom_args");
  if (args == file.config().end() || !args->is_object() || !args->contains(key) ||
      !(*args)[key].is_number()) {
    file.Corrupt(fmt::format("\"custom_args\" of the config has no number \"{}\"", key));
  }
  return (*args)[key].get<double>();
}

}  // namespace

RoutingCase::RoutingCase(const CaseFile& file) : num_tokens_(file.Size("num_tokens")) {
  config_.num_experts = file.Size("num_experts");
  config_.num_fused_shared_experts = file.SizeOr("num_fused_shared_experts", 0);
  config_.top_k = file.Size("top_k") + config_.num_fused_shared_experts;
  file.View("in.router_logits", {num_tokens_, config_.num_experts});
  logits_ = file.F32("in.router_logits");
  ReadScoring(file);
  ReadPolicy(file);
  ReadShared(file);
  ReadBias(file);
  ReadPlacement(file);
  inputs_.num_token_non_padded = file.SizeOr("num_token_non_padded", SIZE_MAX);
  ValidateTopK(config_);
}

void RoutingCase::ReadScoring(const CaseFile& file) {
  config_.scoring_func = Named<ScoringFunc>(file, "scoring_func",
                                            {{"softmax", ScoringFunc::kSoftmax},
                                             {"sigmoid", ScoringFunc::kSigmoid},
                                             {"sqrtsoftplus", ScoringFunc::kSqrtSoftplus}});
  config_.renormalize = file.Flag("renormalize");
  config_.use_grouped_topk = file.Flag("use_grouped_topk");
  if (config_.use_grouped_topk) {
    config_.num_expert_group = file.Size("num_expert_group");
    config_.topk_group = file.Size("topk_group");
  }
  config_.routed_scaling_factor = file.NumberOr("routed_scaling_factor", 1.0);
  config_.apply_routed_scaling_factor_on_output =
      file.Flag("apply_routed_scaling_factor_on_output");
}

void RoutingCase::ReadPolicy(const CaseFile& file) {
  config_.policy = Named<RoutingPolicy>(file, "custom",
                                        {{"none", RoutingPolicy::kScores},
                                         {"llama4", RoutingPolicy::kLlama4},
                                         {"topk_then_softmax", RoutingPolicy::kTopKThenSoftmax},
                                         {"phimoe_sparsemixer", RoutingPolicy::kPhimoeSparsemixer},
                                         {"cohere2_sigmoid", RoutingPolicy::kCohere2Sigmoid},
                                         {"afmoe", RoutingPolicy::kAfmoe},
                                         {"group_router", RoutingPolicy::kGroupRouter},
                                         {"gemma4", RoutingPolicy::kGemma4},
                                         {"hash", RoutingPolicy::kHash}});
  if (config_.policy == RoutingPolicy::kPhimoeSparsemixer)
    config_.jitter_eps = CustomArgument(file, "jitter_eps");
  if (config_.policy == RoutingPolicy::kGroupRouter) {
    const double groups = CustomArgument(file, "router_n_groups");
    if (!(groups >= 1 && groups <= static_cast<double>(config_.num_experts)))
      file.Corrupt(fmt::format("\"router_n_groups\" of the config is {}", groups));
    config_.router_n_groups = static_cast<size_t>(groups);
  }
  if (config_.policy == RoutingPolicy::kGemma4) {
    file.View("in.per_expert_scale", {config_.num_experts});
    per_expert_scale_ = file.F32("in.per_expert_scale");
    config_.per_expert_scale = per_expert_scale_;
  }
  if (config_.policy == RoutingPolicy::kHash) {
    file.View("in.input_ids", {num_tokens_});
    input_ids_ = file.Ints("in.input_ids");
    inputs_.input_ids = input_ids_;
    tid2eid_ = file.I32("in.tid2eid");
    config_.tid2eid = tid2eid_;
  }
}

void RoutingCase::ReadShared(const CaseFile& file) {
  config_.shared_layout = Named<moe::SharedLayout>(file, "shared_layout",
                                                   {{"none", moe::SharedLayout::kGlobal},
                                                    {"global", moe::SharedLayout::kGlobal},
                                                    {"per_rank", moe::SharedLayout::kPerRank}});
  config_.fused_shared_experts_scaling_factor =
      file.NumberOr("fused_shared_experts_scaling_factor", 1.0);
  config_.moe_ep_size = file.SizeOr("moe_ep_size", 1);
  config_.moe_ep_rank = file.SizeOr("moe_ep_rank", 0);
}

void RoutingCase::ReadBias(const CaseFile& file) {
  const std::string kind = file.Text("correction_bias");
  if (kind == "none") return;
  const bool per_token = kind == "per_token";
  if (per_token) {
    file.View("in.correction_bias", {num_tokens_, config_.num_experts});
  } else {
    file.View("in.correction_bias", {config_.num_experts});
  }
  bias_ = file.F32("in.correction_bias");
  if (per_token) {
    inputs_.dynamic_expert_bias = ConstRows(bias_.data(), num_tokens_, config_.num_experts);
  } else {
    config_.correction_bias = bias_;
  }
}

void RoutingCase::ReadPlacement(const CaseFile& file) {
  placement_.algorithm =
      Named<DispatchAlgorithm>(file, "dispatch_algorithm",
                               {{"none", DispatchAlgorithm::kNone},
                                {"static", DispatchAlgorithm::kStatic},
                                {"dynamic_by_row", DispatchAlgorithm::kDynamicByRow}});
  if (placement_.algorithm == DispatchAlgorithm::kNone) return;
  placement_.num_physical = file.Size("num_physical_experts");
  if (placement_.algorithm == DispatchAlgorithm::kStatic) {
    rank_map_ = file.I32("in.log2phy_rank");
    placement_.rank_map = rank_map_;
  } else {
    const TensorView all = file.View("in.log2phy_all");
    if (all.shape.rank() != 2) file.Corrupt("tensor in.log2phy_all must have two axes");
    placement_.max_replicas = all.shape[1];
    all_physical_ = file.I32("in.log2phy_all");
    num_valid_ = file.I32("in.log2phy_num");
    placement_.all_physical = all_physical_;
    placement_.num_valid = num_valid_;
  }
  ValidatePlacement(placement_, config_.num_experts);
  inputs_.placement = &placement_;
}

KindOutput ReplayRouting(const KindInput& input) {
  const RoutingCase routing(input.file);
  const moe::TopKOutput topk =
      SelectExperts(input.context, routing.config(), routing.logits(), routing.inputs());
  const Shape shape{topk.num_tokens, topk.top_k};
  KindOutput output;
  output.outputs["out.topk_ids"] = {shape, {topk.ids.begin(), topk.ids.end()}};
  output.outputs["out.topk_weights"] = {shape, {topk.weights.begin(), topk.weights.end()}};
  return output;
}

}  // namespace switchyard::replay
