// Runner "reference": the oracle. Plain loops in f64 over one token at a time, obviously right and
// slow.
#pragma once

#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe::runners {

struct ReferenceRunnerInput : RunnerInput {
  ConstRows hidden_states;  // [T, H]
  TopKOutput topk_output;   // ids global = local on one rank
};

struct ReferenceRunnerOutput : RunnerOutput {
  Rows hidden_states;  // [T, H], weighted and summed over K
};

// out = sum over k of weight[k] * W2[id[k]] (act(W1[id[k]] x) * W3[id[k]] x), weights widened
// exactly, every sum in f64, one rounding at the end (contract 8.2, the dense oracle). Slots with
// id -1 add nothing. Ignores MoeRunnerConfig::activation_dtype.
class ReferenceRunnerCore : public MoeRunnerCore {
 public:
  explicit ReferenceRunnerCore(const MoeRunnerConfig& config);
  const RunnerOutput& Run(ExecContext& context, const RunnerInput& input,
                          const MoeQuantInfo& quant_info, RunningState& state) const override;

 private:
  MoeRunnerConfig config_;
};

}  // namespace switchyard::moe::runners
