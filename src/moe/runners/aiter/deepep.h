// What the DeepEP-like formats share on their way into the aiter runner.
#pragma once

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/runners/aiter.h"

namespace switchyard::moe::runners {

// The ids and weights that combine needs again: what the post-permute must hand back. Left in the
// running state.
struct AiterCombineState {
  std::span<const int32_t> topk_ids;
  std::span<const float> topk_weights;
};

// Rows that are one route each: row i of expert e's block gets id e, K = 1, weight 1; every other
// row of the slab gets the sink slot, whose mask is 0. Weighting is left to combine.
//
// Shapes: counts [L]; `first_row(e)` is where expert e's rows start; num_rows covers all of them.
template <typename FirstRow>
void FillExpandedRoutes(ExecContext& context, std::span<const int32_t> counts, size_t num_rows,
                        FirstRow first_row, AiterRunnerInput& input) {
  const auto sink = static_cast<int32_t>(counts.size());
  const std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(num_rows);
  const std::span<float> weights = context.arena.AllocateSpan<float>(num_rows);
  std::fill(ids.begin(), ids.end(), sink);
  std::fill(weights.begin(), weights.end(), 1.0f);
  for (size_t e = 0; e < counts.size(); ++e) {
    const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(first_row(e));
    std::fill_n(begin, counts[e], static_cast<int32_t>(e));
  }
  input.topk_ids = ids;
  input.topk_weights = weights;
  input.top_k = 1;
}

// L ones for the experts of this rank and a 0 for the sink slot behind them.
std::span<const int32_t> SinkMask(ExecContext& context, size_t num_local_experts);

// Refuses what the fused runner cannot do behind a dispatcher that sums by itself.
// Errors: kUnsupported naming the layer and the setting.
void CheckDeepepConfig(const MoeRunnerConfig& config, const DispatchOutput& output);

}  // namespace switchyard::moe::runners
