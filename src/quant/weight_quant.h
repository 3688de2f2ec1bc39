// Float weights to quantised matrices: online quantisation, and the tests. Not on the hot path.
#pragma once

#include <cstddef>

#include "quant/matrix.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"

namespace switchyard::quant {

// What a matrix becomes. In `format`, scale_rows or scale_cols 0 means the whole matrix.
struct WeightQuant {
  MatrixFormat format;
  MxScaleRule mx_rule = MxScaleRule::kCeil;          // scales of kF8E8M0
  MxRounding mx_rounding = MxRounding::kHalfToEven;  // kF4E2M1

  static WeightQuant Int8Channel();
  static WeightQuant Int4Channel();  // quark: amax / 7, codes in [-7, 7]
  static WeightQuant Int4Group(size_t group, DType scale_dtype);
  static WeightQuant Uint4Group(size_t group, DType scale_dtype);  // with zero points: AWQ, GPTQ
  static WeightQuant Fp8Tensor();
  static WeightQuant Fp8Channel();
  static WeightQuant Fp8Block(size_t rows, size_t cols);
  static WeightQuant MxFp8(MxScaleRule rule);
  static WeightQuant NvFp4();  // e4m3 scales per 16, and the f32 that lets them use all of e4m3
  static WeightQuant MxFp4(MxScaleRule rule, MxRounding rounding);
};

// The nearest codes (ties to even) under scales of amax / largest code, per cell of the grid, or
// under the power of two that mx_rule chooses. kI8: [-127, 127], kI4: [-7, 7], kU4 and kU8 with a
// zero point: the range from the smallest to the largest value, widened to hold 0.
// A cell of zeros gets codes 0 and a finite scale; one with NaN or infinity gets codes 0 and a NaN
// scale. Values are divided by the scale as it is stored.
// Shapes: w [rows, cols].
// Errors: kUnsupported naming a type that is none of kI8 kI4 kU8 kU4 kF8E4M3 kF4E2M1.
QuantMatrix QuantizeMatrix(ConstRows w, const WeightQuant& how);

}  // namespace switchyard::quant
