// Runner "aiter": the fused runner of contract 4.2 for f32, f16 and bf16 weights.
#pragma once

#include <cstdint>
#include <span>

#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe::runners {

// Contract 4.2. Ids count the experts of quant_info; -1 skips the slot.
struct AiterRunnerInput : RunnerInput {
  ConstRows hidden_states;              // [T, H]
  std::span<const int32_t> topk_ids;    // [T, K]
  std::span<const float> topk_weights;  // [T, K]
  size_t top_k = 0;
};

struct AiterRunnerOutput : RunnerOutput {
  Rows hidden_states;  // [T, H], weighted and summed over K
};

// Sorts the (token, expert) slots by expert, then for each expert that any token wants: gate and up
// products, activation, down product; last, each token's weighted sum in the order of its columns.
// Expert weights are read once a call. No step depends on the number of threads or on the other
// tokens, so a token's bits are the same in every batch.
//
// The only allocation is from the arena. Cost: 6 T K H I operations; with few tokens, reading
// min(E, T K) experts' weights.
class AiterRunnerCore : public MoeRunnerCore {
 public:
  // Errors: kUnsupported naming the layer if the experts are not gated.
  explicit AiterRunnerCore(const MoeRunnerConfig& config);
  const RunnerOutput& Run(ExecContext& context, const RunnerInput& input,
                          const MoeQuantInfo& quant_info, RunningState& state) const override;

 private:
  MoeRunnerConfig config_;
};

}  // namespace switchyard::moe::runners
