// Runner "aiter" (contract 4.2): one fused operation behind every dispatch format. What its
// pre-permutes fill and its post-permutes read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe {

// Contract 4.2. Built by a pre-permute, in the arena of the call.
struct AiterRunnerInput : RunnerInput {
  static constexpr std::string_view kRunner = "aiter";

  // Plain rows are quantised by the core as MoeQuantInfo::a13 says; rows that are codes already
  // (the dispatcher's, with their scales: the reference's a1_scale) are multiplied as they are.
  QuantRows hidden_states;              // [T, H]
  std::span<const int32_t> topk_ids;    // [T, K]; -1 = skip the slot
  std::span<const float> topk_weights;  // [T, K]
  size_t top_k = 0;
  QuantType quant_type = QuantType::kNo;
  // Over the ids of topk_ids, 1 = compute, 0 = skip the slot; empty = the ids count the experts of
  // the weights. The n-th 1 is the expert n.
  std::span<const int32_t> expert_mask;
  // Rows at or past it are ignored; their results are 0.
  size_t num_local_tokens = std::numeric_limits<size_t>::max();
  std::optional<DType> output_dtype;  // results are rounded to it (kBF16, kF16); unset = kept f32
  Rows output;                        // written here if not empty, else into the arena
  // Results stay one row per slot, as IsRoutewise asks for.
  bool leaves_rows = false;

  AiterRunnerInput() : RunnerInput{kRunner, kTokenRows} {}
};

// What the core returns.
struct AiterRunnerOutput : RunnerOutput {
  static constexpr std::string_view kRunner = "aiter";

  // [T, H] weighted and summed over K; [T * K, H] with no_combine; [M, H'], neither weighted nor
  // summed, if the dispatch asked for one row per route (IsRoutewise, leaves_rows).
  Rows hidden_states;
  std::span<const int32_t> row_of_slot;  // of such rows: [T * K] row of each slot, -1 = none

  explicit AiterRunnerOutput(const DispatchPromises& promises) : RunnerOutput{kRunner, promises} {}
};

// The arguments of the fused operation that come from the layer (contract 4.2).
struct AiterMoeQuantInfo : MoeQuantInfo {
  QuantType quant_type = QuantType::kNo;  // of the weights
  bool doweight_stage1 = false;           // x is multiplied by its weight before gemm1
  float swiglu_limit = 0;                 // 0 = none
  bool fp8_activations = false;           // the second product quantises to e4m3
};

// Shapes: as MoeQuantInfo.
AiterMoeQuantInfo MakeAiterMoeQuantInfo(const MoeQuantInfo& quant_info,
                                        const MoeRunnerConfig& config);

// How rows that a dispatcher sent meet weights of another type: the table of contract 4.2.
struct Reconciled {
  bool dequantize = false;  // to bf16, before anything else
  QuantType quant_type = QuantType::kNo;
};
// `clamped_interleaved`: a clamped SwiGLU over alternating gate and up rows.
// Errors: kUnsupported naming both kinds for a wire that the table does not have.
Reconciled ReconcileWire(QuantType weights, ActQuantKind wire, bool clamped_interleaved);

}  // namespace switchyard::moe
