#include "moe/runners/aiter/epilogue.h"

#include <algorithm>

#include "kernels/elementwise/elementwise.h"

namespace switchyard::moe::runners {

void Epilogue::Run(ExecContext& context, const SortedSlots& sorted, const AiterRunnerInput& input,
                   ConstRows rows, Rows out) const {
  constexpr size_t kRowsPerTask = 4;
  const size_t slots_per_row = no_combine ? 1 : input.top_k;
  context.pool.Run((out.rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(out.rows, (task + 1) * kRowsPerTask);
    for (size_t i = task * kRowsPerTask; i < end; ++i) {
      std::fill_n(out.Row(i), out.cols, 0.0f);
      const size_t first = i * slots_per_row;
      for (size_t slot = first; slot < first + slots_per_row; ++slot) {
        if (slot >= sorted.row_of_slot.size() || sorted.row_of_slot[slot] < 0) continue;
        const float weight = weighted ? input.topk_weights[slot] : 1.0f;
        kernels::ScaleAddTo(rows.Row(static_cast<size_t>(sorted.row_of_slot[slot])), weight * scale,
                            rows.cols, out.Row(i));
      }
    }
  });
}

}  // namespace switchyard::moe::runners
