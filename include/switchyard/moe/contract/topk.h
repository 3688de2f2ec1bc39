// Router policy and its result. Contract 1.3, 2.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/placement.h"

namespace switchyard::moe {

// How router logits become scores. Contract 2.2.
enum class ScoringFunc { kSoftmax, kSigmoid, kSqrtSoftplus };
std::string_view ScoringFuncName(ScoringFunc scoring);

// What a group of experts is worth. Contract 2.3.
enum class GroupScoreRule {
  kAuto,       // kMax without a bias, kTopTwoSum with one
  kMax,        // its largest choice value
  kTopTwoSum,  // the sum of its two largest
};

// Which rule chooses and weighs. Contract 2.3, 2.8, and the routing functions that models bring.
// "renormalize: yes" obeys TopKConfig::renormalize, "never" ignores it.
enum class RoutingPolicy {
  kScores,             // rules 1 to 4: scores, bias, groups, top-k; renormalize: yes
  kLlama4,             // top-1 of the logits, weight sigmoid(logit); never
  kTopKThenSoftmax,    // largest logits; softmax over them if renormalize, else the raw logits
  kPhimoeSparsemixer,  // two rounds of a masked softmax, threshold 2 * jitter_eps; never
  kCohere2Sigmoid,     // sigmoid scores; yes
  kAfmoe,        // sigmoid: the bias chooses only; softmax: it is added to the logit and stays
                 // in the weight; yes
  kGroupRouter,  // the K/G best softmax scores of each of router_n_groups groups; yes
  kGemma4,       // largest logits, softmax over them, times per_expert_scale; never
  kHash,         // ids from tid2eid; weights are scores, renormalized unless softmax
  kFunction,     // custom_routing_function
};
std::string_view RoutingPolicyName(RoutingPolicy policy);

// What rows at and after num_token_non_padded hold. Contract 2.10.
enum class PaddingFamily {
  kDefault,   // ids -1, weights 0
  kHipAiter,  // ids 0, weights 0: kernels that crash on negative ids
  kAscend,    // ids as routed, weights 0: one expert for all could overflow its capacity
};

// Where fused shared experts have their ids. Contract 2.7.
enum class SharedLayout {
  kGlobal,   // after all physical experts
  kPerRank,  // each rank's slots follow its routed block; a token takes those of its own rank
};

// Benchmark switches that replace the router. Contract 2.12.
enum class SimulatedRouting { kNone, kRoundRobin, kUniform };

// A routing function from outside: a plain function and its state.
//
// Shapes: hidden is the token's row, or null if the call had none; logits f32 [num_experts]; ids
//   and weights have k places. Ids must be distinct and in [0, num_experts); the range is checked.
// Called from several threads at once, once per token that is not padding.
struct CustomRoutingFunction {
  void (*route)(const void* state, const float* hidden, const float* logits, size_t num_experts,
                size_t k, bool renormalize, int32_t* ids, float* weights) = nullptr;
  const void* state = nullptr;
};

// Contract 2.1. Fixed when the layer is built; spans are the owner's and outlive it.
struct TopKConfig {
  size_t num_experts = 0;  // E, logical routed experts, columns of the router logits
  size_t top_k = 0;        // output columns: routed and shared
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  bool renormalize = true;  // divide the routed weights by their sum (+ 1e-20)
  std::span<const float> correction_bias =
      {};  // [E] or empty; for the choice only, never in a weight (contract 2.3)

  // Group-limited routing. With a bias the scores are always sigmoid (rule 3).
  bool use_grouped_topk = false;
  size_t num_expert_group = 0;
  size_t topk_group = 0;
  GroupScoreRule group_score_rule = GroupScoreRule::kAuto;

  // Contract 2.6. The factor is in the weights only if the flag is set; else the runner or the
  // model applies it.
  double routed_scaling_factor = 1.0;
  bool apply_routed_scaling_factor_on_output = false;

  double router_logit_softcap = 0;  // c: logits become c * tanh(logit / c); softmax only, 0 = off
  bool sqrtsoftplus_log1p = false;  // the log1p form; NaN then ranks first instead of last

  // Shared experts as extra columns, after the routed ones. Contract 2.7.
  size_t num_fused_shared_experts = 0;  // S
  SharedLayout shared_layout = SharedLayout::kGlobal;
  double fused_shared_experts_scaling_factor = 1.0;  // of the shared columns; layout kGlobal only
  size_t moe_ep_size = 1;  // R: of per-rank slots and of simulated routing
  size_t moe_ep_rank = 0;

  RoutingPolicy policy = RoutingPolicy::kScores;
  CustomRoutingFunction custom_routing_function = {};  // of kFunction
  std::span<const float> per_expert_scale = {};        // [E], of kGemma4
  std::span<const int32_t> tid2eid = {};               // [vocabulary, routed columns], of kHash
  size_t router_n_groups = 0;                          // of kGroupRouter
  double jitter_eps = 0.01;                            // of kPhimoeSparsemixer

  PaddingFamily padding = PaddingFamily::kDefault;
  bool fused_gate_packed_ids = false;        // fill TopKOutput::packed_topk_ids too
  bool allow_routed_experts_capture = true;  // false in draft models: observers see no logical ids

  SimulatedRouting simulated_routing = SimulatedRouting::kNone;
  size_t simulated_offset = 0;  // of kRoundRobin

  // Columns that the router chooses: K.
  size_t NumRouted() const { return top_k - num_fused_shared_experts; }
};

// What a router decided, for those who look on. Padded rows are -1 whatever the padding family.
//
// Shapes: ids i32 [T, K], row-major, routed columns only, without the shift of per-rank shared
//   slots. Valid during the call.
struct RoutedExperts {
  size_t layer_id = 0;
  size_t num_tokens = 0;
  size_t num_columns = 0;
  std::span<const int32_t> ids;
};

// Sees the routing of every call (contract 2.1, 7.5). Called by the thread that called
// SelectExperts, after all tokens are routed.
class RoutingObserver {
 public:
  virtual ~RoutingObserver() = default;
  // Logical ids, for capture and replay; not called where allow_routed_experts_capture is false.
  virtual void OnLogicalExperts(const RoutedExperts& /*routed*/) {}
  // Physical ids, for load statistics.
  virtual void OnPhysicalExperts(const RoutedExperts& /*routed*/) {}
};

// What varies per call beside the logits.
//
// Shapes: input_ids i64 [T] (policy kHash); dynamic_expert_bias f32 [T, E] or no rows, for the
//   choice only, sigmoid scores only; hidden [T, H] or no rows, handed to a custom function.
struct TopKInputs {
  size_t num_token_non_padded = SIZE_MAX;  // rows at and after it are padding; SIZE_MAX: none
  std::span<const int64_t> input_ids = {};
  ConstRows dynamic_expert_bias = {};
  ConstRows hidden = {};
  const ExpertPlacement* placement = nullptr;  // null: logical ids are physical
  uint64_t seed = 0;  // of random replicas, fake logits and simulated routing
  RoutingObserver* observer = nullptr;
  size_t layer_id = 0;  // for the observer
};

// The chosen experts of every token, format STANDARD of contract 1.3.
//
// Shapes: ids i32 [T, K'], weights f32 [T, K'], both row-major, K' = top_k. Ids are physical expert
//   ids in [0, P) or shared ids (contract 2.7), or -1 = drop this slot (its weight is 0). Within a
//   token non-negative ids are distinct; routed columns are ordered by descending choice value,
//   ties by id (contract 2.5), shared columns come last. Memory belongs to the arena of the call
//   that made it.
struct TopKOutput {
  size_t num_tokens = 0;
  size_t top_k = 0;
  std::span<const float> weights;
  std::span<const int32_t> ids;
  ConstRows router_logits;                        // [T, E]
  std::span<const int32_t> packed_topk_ids = {};  // [T, K'] where the config asks for them

  std::span<const int32_t> Ids(size_t token) const { return ids.subspan(token * top_k, top_k); }
  std::span<const float> Weights(size_t token) const {
    return weights.subspan(token * top_k, top_k);
  }
};

}  // namespace switchyard::moe
