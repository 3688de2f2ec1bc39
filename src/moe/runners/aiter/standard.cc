// Format standard in and out of the aiter runner (contract 4.2): weights stay f32, ids stay global
// (the layer's mask says which are of this rank), nothing moves.
#include "moe/runners/builtin.h"
#include "switchyard/moe/runners/aiter.h"

namespace switchyard::moe::runners {
namespace {

const AiterRunnerInput& PrePermute(ExecContext& context, const StandardDispatchOutput& standard,
                                   const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                   RunningState&) {
  RequirePromises(standard, IsRoutewise(standard.promises) ? Routewise(kTokenRows) : kTokenRows,
                  AiterRunnerInput::kRunner, config.layer_id);
  RequireRouting(standard.topk_output, standard.hidden_states.rows, config.layer_id);
  auto* input = context.arena.New<AiterRunnerInput>();
  input->promises = standard.promises;
  input->hidden_states = standard.hidden_states;
  input->topk_ids = standard.topk_output.ids;
  input->topk_weights = standard.topk_output.weights;
  input->top_k = standard.topk_output.top_k;
  input->quant_type = MakeAiterMoeQuantInfo(quant_info, config).quant_type;
  input->expert_mask = quant_info.expert_mask;
  return *input;
}

const StandardCombineInput& PostPermute(ExecContext& context, const AiterRunnerOutput& output,
                                        const MoeQuantInfo&, const MoeRunnerConfig& config,
                                        RunningState&) {
  auto* combine = context.arena.New<StandardCombineInput>(output.hidden_states, output.promises);
  if (config.no_combine) combine->routewise = RoutewiseLayout::kTokenTopk;
  if (IsRoutewise(output.promises)) {
    combine->routewise = RoutewiseLayout::kExpanded;
    combine->row_of_slot = output.row_of_slot;
  }
  return *combine;
}

}  // namespace

extern constinit const PermuteEntry aiter_standard = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
