// The fused core of runner "aiter".
#pragma once

#include "switchyard/moe/runners/aiter.h"

namespace switchyard::moe::runners {

// Sorts the (token, expert) slots by expert, then for each expert that any token wants: gate and up
// products, bias, activation, down product, bias; last, each token's weighted sum in the order of
// its columns. Expert weights are read once a call. No step depends on the number of threads or on
// the other tokens, so a token's bits are the same in every batch (but for the scheme that scales
// activations over the whole batch, kFp8Tensor).
//
// The only allocation is from the arena. Cost: 6 T K H I operations; with few tokens, reading
// min(E, T K) experts' weights.
class AiterRunnerCore : public MoeRunnerCore {
 public:
  // Errors: kUnsupported naming the layer and the setting for combinations that have no meaning
  //   (router weight on the input with top_k other than 1, no_combine with a routed scaling
  //   factor).
  explicit AiterRunnerCore(const MoeRunnerConfig& config);

  // Errors: kInvalidArgument naming layer, token and id for an id that the weights or the mask do
  //   not have; and naming the sizes that contradict each other, of rows, routing, mask, weights or
  //   output.
  const RunnerOutput& Run(ExecContext& context, const RunnerInput& input,
                          const MoeQuantInfo& quant_info, RunningState& state) const override;

 private:
  MoeRunnerConfig config_;
};

}  // namespace switchyard::moe::runners
