// Conversions between float types, a row at a time.
#pragma once

#include <cstddef>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// n values of `from` (kF32, kF16 or kBF16) at `in`, widened exactly to f32.
void ConvertToF32(const void* in, DType from, size_t n, float* out) noexcept;

// n f32 values rounded to `to` (kF32, kF16 or kBF16): to nearest, ties to even.
void ConvertFromF32(const float* in, size_t n, DType to, void* out) noexcept;

}  // namespace switchyard::kernels
