// Format deepep_normal in and out of the ascend runner (contract 3.4, 4.1): the expanded
// realisation, whose rows are sorted by expert already.
#include <fmt/format.h>

#include "moe/runners/ascend/deepep.h"
#include "moe/runners/builtin.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe::runners {
namespace {

const AscendRunnerInput& PrePermute(ExecContext& context, const DeepepNormalDispatchOutput& normal,
                                    const MoeQuantInfo&, const MoeRunnerConfig& config,
                                    RunningState& state) {
  if (normal.promises.row_kind != RowKind::kExpanded || normal.mori != nullptr) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner ascend takes deepep_normal rows of the expanded "
                            "realisation (one row for each token and local expert, sorted by "
                            "expert); the dispatch sent {}{}",
                            config.layer_id, DescribePromises(normal.promises),
                            normal.mori != nullptr ? " (mori)" : ""));
  }
  RequirePromises(normal, kExpandedRows, AscendRunnerInput::kRunner, config.layer_id);
  auto* input = context.arena.New<AscendRunnerInput>();
  input->promises = normal.promises;
  input->hidden_states = normal.hidden_states;
  input->expert_tokens = WidenCounts(context, normal.num_recv_tokens_per_expert);
  state.Emplace<AscendCombineState>(context.arena, normal.topk_ids, normal.topk_weights);
  return *input;
}

const DeepepNormalCombineInput& PostPermute(ExecContext& context, const AscendRunnerOutput& output,
                                            const MoeQuantInfo&, const MoeRunnerConfig&,
                                            RunningState& state) {
  auto* combine =
      context.arena.New<DeepepNormalCombineInput>(output.hidden_states, output.promises);
  combine->topk_ids = state.Get<AscendCombineState>().topk_ids;
  combine->topk_weights = state.Get<AscendCombineState>().topk_weights;
  return *combine;
}

}  // namespace

extern constinit const PermuteEntry ascend_deepep_normal =
    MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
