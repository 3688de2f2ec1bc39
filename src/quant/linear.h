// Linear layers: activations times weight matrices, spread over the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/matmul/matmul.h"
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

  ActRows Slice(size_t first, size_t count) const {
    return {dtype, rows.subspan(first, count), cols,
            row_scale.empty() ? row_scale : row_scale.subspan(first, count)};
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

// The type that activations take for weights of `weights` under a setting "auto", "f32" or "bf16".
// Errors: kInvalidArgument for another setting; kUnsupported naming both types if no kernel
//   multiplies them.
DType ResolveActDType(std::string_view setting, DType weights);

// out[t, n] = sum over k of x[t, k] w[n, k] (+ bias[n]).
struct LinearJob {
  WeightMatrix weight;
  const float* bias = nullptr;  // [weight.rows] or nullptr
  Rows out;                     // [T, weight.rows]
};

// Runs all jobs over the same activations in one parallel region. Deterministic: the bits of a row
// depend on nothing but the row and the matrix.
void RunLinears(ExecContext& context, const ActRows& x, std::span<const LinearJob> jobs);

// Products of different activations, in one parallel region: those of the heads of a layer.
struct LinearCall {
  ActRows x;
  LinearJob job;
};
void RunLinearCalls(ExecContext& context, std::span<const LinearCall> calls);

// One matrix; x is rounded to `act` first.
void Linear(ExecContext& context, ConstRows x, DType act, const LinearJob& job);

// The kernel for a pair that ResolveActDType allowed.
kernels::MatmulFn MatmulFor(DType act, DType weight);

// Rows of a weight matrix that one task takes, so that `total_rows` fill `num_threads` threads a
// few times over.
size_t TaskRows(size_t total_rows, size_t num_threads);

}  // namespace switchyard::quant
