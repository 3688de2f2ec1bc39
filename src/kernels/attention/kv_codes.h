// Rows of the KV cache as codes of 8 bits under one scale.
#pragma once

#include <cstddef>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// Writes the codes of a row of n values and returns its scale: x is about code * scale.
//
//   kI8: scale = max |x| / 127, code = round(x * (1 / scale)), ties to even, in [-127, 127].
//   kF8E4M3: scale = max |x| / 448, code = e4m3(x / scale).
// A scale is never smaller than the smallest normal f32, so a row of zeros has one too. A row with
// a NaN or an infinity has the scale NaN, which makes everything computed from it NaN.
// The same bits on every instruction set.
float EncodeKvRow(const float* x, size_t n, DType dtype, void* codes) noexcept;

}  // namespace switchyard::kernels
