// Format standard in and out of the reference runner: nothing moves.
#include "moe/runners/builtin.h"
#include "quant/act_quant.h"
#include "switchyard/moe/runners/reference.h"

namespace switchyard::moe::runners {
namespace {

const ReferenceRunnerInput& PrePermute(ExecContext& context, const StandardDispatchOutput& standard,
                                       const MoeQuantInfo&, const MoeRunnerConfig& config,
                                       RunningState&) {
  RequirePromises(standard, IsRoutewise(standard.promises) ? Routewise(kTokenRows) : kTokenRows,
                  ReferenceRunnerInput::kRunner, config.layer_id);
  RequireRouting(standard.topk_output, standard.hidden_states.rows, config.layer_id);
  auto* input = context.arena.New<ReferenceRunnerInput>();
  input->promises = standard.promises;
  const Rows rows =
      context.arena.AllocateRows(standard.hidden_states.rows, standard.hidden_states.cols);
  quant::DequantizeRows(context, standard.hidden_states, rows);
  input->hidden_states = rows;
  input->were_codes = standard.hidden_states.kind != ActQuantKind::kNone;
  input->topk_output = standard.topk_output;
  return *input;
}

const StandardCombineInput& PostPermute(ExecContext& context, const ReferenceRunnerOutput& output,
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

extern constinit const PermuteEntry reference_standard = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
