// Format standard in and out of the aiter runner (contract 4.2): weights stay f32, ids stay global,
// nothing moves.
#include "moe/runners/aiter/core.h"
#include "moe/runners/builtin.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe::runners {
namespace {

const RunnerInput& PrePermute(ExecContext& context, const DispatchOutput& output,
                              const MoeQuantInfo&, const MoeRunnerConfig&, RunningState&) {
  const StandardDispatchOutput& standard = AsStandard(output);
  auto* input = context.arena.New<AiterRunnerInput>();
  input->runner = "aiter";
  input->hidden_states = standard.hidden_states;
  input->topk_ids = standard.topk_output.ids;
  input->topk_weights = standard.topk_output.weights;
  input->top_k = standard.topk_output.top_k;
  return *input;
}

const CombineInput& PostPermute(ExecContext& context, const RunnerOutput& output,
                                const MoeQuantInfo&, const MoeRunnerConfig&, RunningState&) {
  return *context.arena.New<StandardCombineInput>(
      static_cast<const AiterRunnerOutput&>(output).hidden_states);
}

}  // namespace

extern constinit const PermuteEntry aiter_standard{
    {DispatchFormat::kStandard, "aiter", &PrePermute},
    {"aiter", DispatchFormat::kStandard, &PostPermute}};

}  // namespace switchyard::moe::runners
