// What the DeepEP formats share on their way through the ascend runner.
#pragma once

#include <span>

#include "switchyard/core/exec_context.h"

namespace switchyard::moe::runners {

// The ids and weights that combine needs again; left in the running state.
struct AscendCombineState {
  std::span<const int32_t> topk_ids;
  std::span<const float> topk_weights;
};

// Counts as a group list of type 1.
inline std::span<const int64_t> WidenCounts(ExecContext& context, std::span<const int32_t> counts) {
  const std::span<int64_t> wide = context.arena.AllocateSpan<int64_t>(counts.size());
  for (size_t e = 0; e < counts.size(); ++e) wide[e] = counts[e];
  return wide;
}

}  // namespace switchyard::moe::runners
