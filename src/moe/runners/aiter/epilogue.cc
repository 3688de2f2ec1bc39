#include "moe/runners/aiter/epilogue.h"

#include <algorithm>

#include "kernels/elementwise/elementwise.h"

namespace switchyard::moe::runners {

void Epilogue::Run(ExecContext& context, const SortedSlots& sorted, const AiterRunnerInput& input,
                   ConstRows rows, Rows out) const {
  constexpr size_t kRowsPerTask = 4;
  const size_t slots_per_row = no_combine ? 1 : input.top_k;
  const size_t num_slots = out.rows * slots_per_row;
  const std::span<const float*> summands = context.arena.AllocateSpan<const float*>(num_slots);
  const std::span<float> weights = context.arena.AllocateSpan<float>(num_slots);
  context.pool.Run((out.rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(out.rows, (task + 1) * kRowsPerTask);
    for (size_t i = task * kRowsPerTask; i < end; ++i) {
      const size_t first = i * slots_per_row;
      size_t count = 0;
      for (size_t slot = first; slot < first + slots_per_row; ++slot) {
        if (slot >= sorted.row_of_slot.size() || sorted.row_of_slot[slot] < 0) continue;
        summands[first + count] = rows.Row(static_cast<size_t>(sorted.row_of_slot[slot]));
        weights[first + count++] = (weighted ? input.topk_weights[slot] : 1.0f) * scale;
      }
      kernels::WeightedSum(summands.data() + first, weights.data() + first, count, rows.cols,
                           out.Row(i));
      std::fill_n(out.Row(i) + rows.cols, out.cols - rows.cols, 0.0f);
    }
  });
}

}  // namespace switchyard::moe::runners
