// Activations to codes and back. Contract 3.1, 4.1.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"

namespace switchyard::quant {

// The exponent of the scale of an MX block whose largest magnitude is `amax`, for codes up to
// `largest`, whose own exponent is `largest_exponent` (448 and 8 for e4m3, 6 and 2 for e2m1). May
// lie outside e8m0, whose encoder clamps it; -127 for amax = 0.
int MxExponent(float amax, MxScaleRule rule, float largest, int largest_exponent);

// Codes and scales of x in the arena; with kNone the result refers to x.
//
// Shapes: x [T, K]; counted [T], or empty = all of them. Rows whose flag is 0 are padding: they are
//   not read, count for no scale and give zeros.
// Rows are independent of each other, except that kFp8Tensor has one scale over all counted rows.
// A row or group of zeros gets codes 0 and a finite scale.
// NaN and infinity stay visible and stay where they are: one in a group that has a scale of its own
//   makes that scale NaN (e8m0 255) and the codes 0; with kFp8Tensor they are left out of the scale
//   and become NaN codes. The static kinds saturate infinities; kFp8TensorStatic keeps a NaN,
//   kInt8Static has no code for it and writes 0.
// Errors: kInvalidArgument if the scale of a static kind is not positive and finite, or the group
//   is 0.
QuantRows QuantizeRows(ExecContext& context, ConstRows x, const ActQuant& how,
                       std::span<const uint8_t> counted = {});

// The values of rows of any kind, rounded once to f32.
// Shapes: out [x.rows, x.cols].
void DequantizeRows(ExecContext& context, const QuantRows& x, Rows out);

// Row i of the above.
void DequantizeRow(const QuantRows& x, size_t i, float* out);

// Calls body(i) for each row, in parallel, several to a task.
template <typename Body>
void ForEachRow(ExecContext& context, size_t rows, const Body& body) {
  constexpr size_t kRowsPerTask = 16;
  context.pool.Run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t) {
    const size_t end = task * kRowsPerTask + kRowsPerTask;
    for (size_t i = task * kRowsPerTask; i < end && i < rows; ++i) body(i);
  });
}

}  // namespace switchyard::quant
