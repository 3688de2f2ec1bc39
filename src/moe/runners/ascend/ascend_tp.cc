// Format ascend_tp in and out of the ascend runner (contract 4.1): rows pass through.
#include <fmt/format.h>

#include "moe/runners/builtin.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe::runners {
namespace {

const AscendRunnerInput& PrePermute(ExecContext& context, const AscendTpDispatchOutput& dispatched,
                                    const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                    RunningState&) {
  if (!quant_info.expert_mask.empty()) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("layer {}: dispatch format ascend_tp keeps all experts on every rank; "
                    "this rank has {} of {}",
                    config.layer_id, quant_info.w1.num_experts(), quant_info.expert_mask.size()));
  }
  RequirePromises(dispatched, kExpandedRows, AscendRunnerInput::kRunner, config.layer_id);
  auto* input = context.arena.New<AscendRunnerInput>();
  input->promises = dispatched.promises;
  input->hidden_states = dispatched.hidden_states;
  input->expert_tokens = dispatched.expert_tokens;
  input->group_list_type = dispatched.group_list_type;
  return *input;
}

const AscendTpCombineInput& PostPermute(ExecContext& context, const AscendRunnerOutput& output,
                                        const MoeQuantInfo&, const MoeRunnerConfig&,
                                        RunningState&) {
  return *context.arena.New<AscendTpCombineInput>(output.hidden_states, output.promises);
}

}  // namespace

extern constinit const PermuteEntry ascend_ascend_tp = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
