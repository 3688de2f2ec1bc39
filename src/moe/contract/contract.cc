// Names and casts of the contract's types.
#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"
#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {
namespace {

std::string_view SumsOwedName(SumsOwed sums) {
  switch (sums) {
    case SumsOwed::kNone: return "no sums owed";
    case SumsOwed::kExpertParallel: return "a sum over the EP ranks owed";
    case SumsOwed::kMoeTensorParallel: return "a sum over the MoE-TP ranks owed";
    case SumsOwed::kBoth: return "sums over the EP and MoE-TP ranks owed";
  }
  return "?";
}

}  // namespace

std::string_view ScoringFuncName(ScoringFunc scoring) {
  switch (scoring) {
    case ScoringFunc::kSoftmax: return "softmax";
    case ScoringFunc::kSigmoid: return "sigmoid";
    case ScoringFunc::kSqrtSoftplus: return "sqrtsoftplus";
  }
  return "?";
}

std::string_view RoutingPolicyName(RoutingPolicy policy) {
  switch (policy) {
    case RoutingPolicy::kScores: return "scores";
    case RoutingPolicy::kLlama4: return "llama4";
    case RoutingPolicy::kTopKThenSoftmax: return "topk_then_softmax";
    case RoutingPolicy::kPhimoeSparsemixer: return "phimoe_sparsemixer";
    case RoutingPolicy::kCohere2Sigmoid: return "cohere2_sigmoid";
    case RoutingPolicy::kAfmoe: return "afmoe";
    case RoutingPolicy::kGroupRouter: return "group_router";
    case RoutingPolicy::kGemma4: return "gemma4";
    case RoutingPolicy::kHash: return "hash";
    case RoutingPolicy::kFunction: return "function";
  }
  return "?";
}

std::string_view DispatchFormatName(DispatchFormat format) {
  switch (format) {
    case DispatchFormat::kStandard: return "standard";
    case DispatchFormat::kAscendTp: return "ascend_tp";
    case DispatchFormat::kDeepepNormal: return "deepep_normal";
    case DispatchFormat::kDeepepLl: return "deepep_ll";
    case DispatchFormat::kDeepepV2: return "deepep_v2";
    case DispatchFormat::kFlashinfer: return "flashinfer";
  }
  return "?";
}

std::string DescribePromises(const DispatchPromises& promises) {
  return fmt::format(
      "{} rows, weights applied by the {}, {} ids, {}",
      promises.row_kind == RowKind::kToken ? "token" : "expanded",
      promises.weights_applied_by == WeightsAppliedBy::kRunner ? "runner" : "combine",
      promises.id_space == IdSpace::kGlobal ? "global" : "local", SumsOwedName(promises.sums_owed));
}

void RequireFormat(DispatchFormat found, DispatchFormat expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kInternal,
              fmt::format("format {} was taken for format {}", DispatchFormatName(found),
                          DispatchFormatName(expected)));
}

void RequirePromises(const DispatchOutput& output, DispatchPromises expected,
                     std::string_view runner, size_t layer_id) {
  expected.sums_owed = output.promises.sums_owed;
  if (output.promises == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("layer {}: runner {} takes rows of format {} with the promises: {}; the "
                          "dispatch has: {}",
                          layer_id, runner, DispatchFormatName(output.format),
                          DescribePromises(expected), DescribePromises(output.promises)));
}

void RequireExperts(const MoeQuantInfo& info, std::span<const int32_t> mask, bool is_gated,
                    size_t layer_id) {
  const ExpertMatrices& w1 = info.w1;
  const ExpertMatrices& w3 = is_gated ? info.w3 : w1;
  const ExpertMatrices& w2 = info.w2;
  const size_t experts = w1.num_experts();
  if (w3.num_experts() != experts || w3.rows != w1.rows || w3.cols != w1.cols ||
      w2.num_experts() != experts || w2.rows != w1.cols || w2.cols != w1.rows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: w1 [{}, {}, {}], w3 [{}, {}, {}] and w2 [{}, {}, {}] "
                            "contradict each other",
                            layer_id, experts, w1.rows, w1.cols, w3.num_experts(), w3.rows, w3.cols,
                            w2.num_experts(), w2.rows, w2.cols));
  }
  const auto is_local = [](int32_t one) { return one != 0; };
  const auto local = static_cast<size_t>(std::count_if(mask.begin(), mask.end(), is_local));
  if (!mask.empty() && local != experts) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: expert_mask has {} local experts, the weights {}", layer_id,
                            local, experts));
  }
}

void RequireRouting(const TopKOutput& topk, size_t num_rows, size_t layer_id) {
  // By division: a product of sizes from outside could wrap.
  const size_t slots = topk.ids.size();
  const bool fits = topk.top_k == 0 || num_rows == 0
                        ? slots == 0
                        : slots % topk.top_k == 0 && slots / topk.top_k == num_rows;
  if (topk.num_tokens == num_rows && fits && topk.weights.size() == slots) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("layer {}: {} rows of hidden states, routing of {} tokens with top_k {}, "
                          "{} ids and {} weights",
                          layer_id, num_rows, topk.num_tokens, topk.top_k, topk.ids.size(),
                          topk.weights.size()));
}

void RequireSlab(const DeepepLlDispatchOutput& slab, size_t num_experts, size_t layer_id) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: dispatch format deepep_ll: {}", layer_id, what));
  };
  if (slab.masked_m.size() != num_experts)
    refuse(fmt::format("masked_m has {} entries, the rank has {} experts", slab.masked_m.size(),
                       num_experts));
  if (slab.hidden_states.rows != num_experts * slab.capacity)
    refuse(fmt::format("the slab has {} rows, {} experts of capacity {} need {}",
                       slab.hidden_states.rows, num_experts, slab.capacity,
                       num_experts * slab.capacity));
  for (size_t e = 0; e < num_experts; ++e) {
    if (slab.masked_m[e] < 0 || static_cast<size_t>(slab.masked_m[e]) > slab.capacity)
      refuse(fmt::format("masked_m of expert {} is {}, its capacity {}", e, slab.masked_m[e],
                         slab.capacity));
  }
}

void CheckAnswer(const CombineInput& input, DispatchFormat format, const DispatchPromises& promises,
                 std::string_view dispatcher, size_t layer_id) {
  if (input.format != format || !(input.promises == promises)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("layer {}: the {} dispatcher sent format {} ({}), and was given a "
                    "combine input of format {} ({})",
                    layer_id, dispatcher, DispatchFormatName(format), DescribePromises(promises),
                    DispatchFormatName(input.format), DescribePromises(input.promises)));
  }
  const RoutewiseLayout expected =
      IsRoutewise(promises) ? RoutewiseLayout::kExpanded : RoutewiseLayout::kNone;
  if (input.routewise == expected) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("layer {}: the {} dispatcher was given rows that are {}", layer_id, dispatcher,
                  expected == RoutewiseLayout::kNone
                      ? "not summed over the top-k yet (routewise); the model's finalizer "
                        "takes those"
                      : "not one row per route, which it asked for (routewise)"));
}

}  // namespace switchyard::moe
