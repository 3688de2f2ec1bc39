// The core of runner "ascend".
#pragma once

#include "switchyard/moe/registry/registry.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe::runners {

// ExpertsForward with the activation that the layer's kernels select. No step depends on the number
// of threads or on the other rows. The only allocation is from the arena.
class AscendRunnerCore : public MoeRunnerCore {
 public:
  // With config.w13_kernel and w2_kernel attached, what they select is checked here; a core without
  // them checks at each call. `gather`: see ExpertsForwardArgs.
  // Errors: kUnsupported naming the layer and the setting that the pipeline does not have (router
  //   weight on the input, no_combine, a routed scaling factor); those of SelectAscendActivation.
  explicit AscendRunnerCore(const MoeRunnerConfig& config, ascend::GatherColumns gather = {});

  // Errors: kUnsupported for padded weights; those of SelectAscendActivation and ExpertsForward.
  const RunnerOutput& Run(ExecContext& context, const RunnerInput& input,
                          const MoeQuantInfo& quant_info, RunningState& state) const override;

 private:
  MoeRunnerConfig config_;
  ascend::GatherColumns gather_;
};

}  // namespace switchyard::moe::runners
