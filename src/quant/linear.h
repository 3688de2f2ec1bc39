// Linear layers: activations times weight matrices, spread over the threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/matmul/matmul.h"
#include "kernels/panels/rows.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard::quant {

// Activation rows in the type that a kernel multiplies with: pointers to the f32 rows themselves,
// to rounded copies, or to codes. Row i stands for row_scale[i] times its elements.
struct ActRows {
  DType dtype = DType::kF32;  // kF32, kBF16 or kI8
  std::span<const void* const> rows;
  size_t cols = 0;
  std::span<const float> row_scale = {};  // one per row, or empty = 1
  // Records that meet weights in panels; segment 0 = rows of elements.
  kernels::PanelRowLayout records = {};

  bool are_records() const { return records.segment != 0; }
  ActRows Slice(size_t first, size_t count) const {
    return {dtype, rows.subspan(first, count), cols,
            row_scale.empty() ? row_scale : row_scale.subspan(first, count), records};
  }
};

// The rows with these indices, in this order; indices may repeat. Copies pointers and scales into
// the arena, no elements.
ActRows GatherRows(Arena& arena, const ActRows& x, std::span<const uint32_t> indices);

// Elements [first, first + count) of every row; copies pointers into the arena.
ActRows SliceColumns(Arena& arena, const ActRows& x, size_t first, size_t count);

// Shapes: x [T, K]. With dtype kF32 the result points into x; with kBF16 rows are rounded (nearest
//   even) into the arena, once per token, however many matrices use them.
ActRows PrepareActivations(ExecContext& context, ConstRows x, DType dtype);

// The type that activations take which no scheme quantises: kF32, kBF16 or kI8 (codes of 32 columns
// under one scale).
//   "f32": kF32. "bf16": kBF16 where there is such a product with these weights.
//   "auto": kBF16 for bf16 weights and for quantised ones in panels, where the CPU multiplies bf16
//     pairs; kI8 with quantised weights if fast is "on", or "auto" and they are blocks of ggml.
// Errors: kInvalidArgument for another setting; kUnsupported naming both types if no kernel
//   multiplies plain weights with what was asked for.
DType ResolveActDType(std::string_view setting, std::string_view fast, const MatrixFormat& weights,
                      size_t cols);

// out[t, n] = sum over k of x[t, k] w[n, k] (+ bias[n]), for outputs [first, first + count).
struct LinearJob {
  WeightMatrix weight;
  const float* bias = nullptr;    // [weight.rows] or nullptr
  Rows out;                       // [T, weight.rows]
  DType act_dtype = DType::kF32;  // of the activations, where the scheme quantises nothing: kF32,
                                  // kBF16, or kI8 (codes of 32 columns under one scale)
  size_t first = 0;
  size_t count = SIZE_MAX;  // cut off at the last row

  size_t num_outputs() const { return std::min(count, weight.rows - first); }
};

// Runs all jobs over the same activations in one parallel region. Each job's scheme decides what
// becomes of them first (weight.act); jobs that want the same share it. Deterministic: the bits of
// a row depend on nothing but the row and the matrix.
// Shapes: x [T, cols of all weights].
// Errors: those of QuantizeRows.
void RunLinears(ExecContext& context, ConstRows x, std::span<const LinearJob> jobs);

// Products of different activations, prepared for each, in one parallel region: those of the heads
// of a layer.
struct LinearCall {
  ActRows x;
  LinearJob job;
};
void RunLinearCalls(ExecContext& context, std::span<const LinearCall> calls);

// The kernel for a pair that ResolveActDType allowed.
kernels::MatmulFn MatmulFor(DType act, DType weight);

// Rows of a weight matrix that one task takes, so that `total_rows` fill `num_threads` threads a
// few times over.
size_t TaskRows(size_t total_rows, size_t num_threads);

}  // namespace switchyard::quant
