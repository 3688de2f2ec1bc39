// The last step of the fused runner: rows of the down product to rows of tokens.
#pragma once

#include "moe/runners/aiter/sorted_slots.h"
#include "switchyard/core/rows.h"

namespace switchyard::moe::runners {

// What becomes of the rows of the down product.
struct Epilogue {
  bool no_combine = false;
  bool weighted = true;
  float scale = 1.0f;

  // out[t] = sum over k of weight[t, k] * scale * rows[row of (t, k)], columns in order; with
  // no_combine out[t * K + k] is one term of it. Skipped slots add (are) 0. Columns past those of
  // `rows` become 0.
  //
  // Shapes: rows [sorted.num_rows(), H']; out [T, H] or [T * K, H], H' <= H.
  void Run(ExecContext& context, const SortedSlots& sorted, const AiterRunnerInput& input,
           ConstRows rows, Rows out) const;
};

}  // namespace switchyard::moe::runners
