// Format standard in and out of the reference runner: nothing moves.
#include "moe/runners/builtin.h"
#include "moe/runners/reference/core.h"

namespace switchyard::moe::runners {
namespace {

const RunnerInput& PrePermute(ExecContext& context, const DispatchOutput& output,
                              const MoeQuantInfo&, const MoeRunnerConfig&, RunningState&) {
  const StandardDispatchOutput& standard = AsStandard(output);
  auto* input = context.arena.New<ReferenceRunnerInput>();
  input->runner = "reference";
  input->hidden_states = standard.hidden_states;
  input->topk_output = standard.topk_output;
  return *input;
}

const CombineInput& PostPermute(ExecContext& context, const RunnerOutput& output,
                                const MoeQuantInfo&, const MoeRunnerConfig&, RunningState&) {
  return *context.arena.New<StandardCombineInput>(
      static_cast<const ReferenceRunnerOutput&>(output).hidden_states);
}

}  // namespace

extern constinit const PermuteEntry reference_standard{
    {DispatchFormat::kStandard, "reference", &PrePermute},
    {"reference", DispatchFormat::kStandard, &PostPermute}};

}  // namespace switchyard::moe::runners
