// Format deepep_ll in and out of the ascend runner (contract 3.5, 4.1). The rows of a slab that are
// defined are packed one expert after the other, and put back in their places afterwards; the rest
// of the slab is never read.
#include <fmt/format.h>

#include <algorithm>

#include "moe/runners/ascend/deepep.h"
#include "moe/runners/builtin.h"
#include "quant/copy_rows.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe::runners {
namespace {

struct SlabState {
  AscendCombineState combine;
  std::span<const size_t> place;  // place of each packed row in the slab
  size_t num_places = 0;
  bool rows_may_move = false;
};

std::span<const size_t> Places(ExecContext& context, const DeepepLlDispatchOutput& slab) {
  size_t count = 0;
  for (int32_t rows : slab.masked_m) count += static_cast<size_t>(rows);
  const std::span<size_t> place = context.arena.AllocateSpan<size_t>(count);
  size_t packed = 0;
  for (size_t e = 0; e < slab.masked_m.size(); ++e) {
    for (size_t i = 0; i < static_cast<size_t>(slab.masked_m[e]); ++i)
      place[packed++] = e * slab.capacity + i;
  }
  return place;
}

const AscendRunnerInput& PrePermute(ExecContext& context, const DeepepLlDispatchOutput& slab,
                                    const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                    RunningState& state) {
  RequireSlab(slab, quant_info.w1.num_experts(), config.layer_id);
  const std::span<const size_t> place = Places(context, slab);
  RequirePromises(slab, kExpandedRows, AscendRunnerInput::kRunner, config.layer_id);
  auto* input = context.arena.New<AscendRunnerInput>();
  input->promises = slab.promises;
  input->hidden_states = quant::PickRows(context, slab.hidden_states, place.size(),
                                         [&](size_t row) { return place[row]; });
  input->expert_tokens = WidenCounts(context, slab.masked_m);
  state.Emplace<SlabState>(context.arena, AscendCombineState{slab.topk_ids, slab.topk_weights},
                           place, slab.hidden_states.rows, slab.rows_may_move);
  return *input;
}

const DeepepLlCombineInput& PostPermute(ExecContext& context, const AscendRunnerOutput& output,
                                        const MoeQuantInfo&, const MoeRunnerConfig&,
                                        RunningState& state) {
  const auto& slab = state.Get<SlabState>();
  const Rows& packed = output.hidden_states;
  auto* combine = context.arena.New<DeepepLlCombineInput>(packed, output.promises);
  if (slab.rows_may_move) {
    const std::span<int32_t> row_of = context.arena.AllocateSpan<int32_t>(slab.num_places);
    std::fill(row_of.begin(), row_of.end(), -1);
    for (size_t i = 0; i < slab.place.size(); ++i) row_of[slab.place[i]] = static_cast<int32_t>(i);
    combine->row_of_place = row_of;
  } else {
    combine->hidden_states = context.arena.AllocateRows(slab.num_places, packed.cols);
    quant::ForEachRow(context, slab.place.size(), [&](size_t i) {
      std::copy_n(packed.Row(i), packed.cols, combine->hidden_states.Row(slab.place[i]));
    });
  }
  combine->topk_ids = slab.combine.topk_ids;
  combine->topk_weights = slab.combine.topk_weights;
  return *combine;
}

}  // namespace

extern constinit const PermuteEntry ascend_deepep_ll = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
