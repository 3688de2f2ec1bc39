// Format deepep_ll in and out of the aiter runner (contract 4.2, trap "LL layout"): a slab has no
// ids per row, so each defined row becomes a token of one expert with weight 1; combine weights and
// sums. Its slots are the places of the slab.
#include <fmt/format.h>

#include "moe/runners/aiter/deepep.h"
#include "moe/runners/builtin.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

const AiterRunnerInput& PrePermute(ExecContext& context, const DeepepLlDispatchOutput& slab,
                                   const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                   RunningState& state) {
  CheckDeepepConfig(config, slab);
  RequirePromises(slab, kExpandedRows, AiterRunnerInput::kRunner, config.layer_id);
  RequireSlab(slab, quant_info.w1.num_experts(), config.layer_id);
  auto* input = context.arena.New<AiterRunnerInput>();
  input->promises = slab.promises;
  input->hidden_states = slab.hidden_states;
  input->leaves_rows = slab.rows_may_move;
  input->quant_type = MakeAiterMoeQuantInfo(quant_info, config).quant_type;
  input->expert_mask = SinkMask(context, slab.masked_m.size());
  FillExpandedRoutes(
      context, slab.masked_m, slab.hidden_states.rows, [&](size_t e) { return e * slab.capacity; },
      *input);
  state.Emplace<AiterCombineState>(context.arena, slab.topk_ids, slab.topk_weights);
  return *input;
}

const DeepepLlCombineInput& PostPermute(ExecContext& context, const AiterRunnerOutput& output,
                                        const MoeQuantInfo&, const MoeRunnerConfig&,
                                        RunningState& state) {
  auto* combine = context.arena.New<DeepepLlCombineInput>(output.hidden_states, output.promises);
  combine->row_of_place = output.row_of_slot;
  combine->topk_ids = state.Get<AiterCombineState>().topk_ids;
  combine->topk_weights = state.Get<AiterCombineState>().topk_weights;
  return *combine;
}

}  // namespace

extern constinit const PermuteEntry aiter_deepep_ll = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
