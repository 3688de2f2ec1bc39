// Rows of f32 to codes under one scale. The scalar definitions are core/small_floats.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/core/small_floats.h"

namespace switchyard::kernels {

// The largest |x[i]|, 0 for n = 0; NaN if one of them is NaN.
float MaxMagnitude(const float* x, size_t n) noexcept;

// The same over the finite values only.
float MaxFiniteMagnitude(const float* x, size_t n) noexcept;

// out[i] = clamp(round(x[i] * factor + offset), low, high), product and sum rounded on their own,
// ties to even; -128 <= low <= high <= 127. A NaN becomes 0.
struct Int8Codes {
  float factor = 1.0f;
  float offset = 0.0f;
  float low = -128.0f;
  float high = 127.0f;
};
void EncodeInt8(const float* x, size_t n, const Int8Codes& how, int8_t* out) noexcept;

// out[i] = EncodeE4M3(x[i] / scale).
void EncodeE4M3Row(const float* x, size_t n, float scale, uint8_t* out) noexcept;

// Pairs of EncodeE2M1(x[i] / scale), the even index in the low nibble; (n + 1) / 2 bytes, an unused
// last nibble is 0.
void EncodeE2M1Row(const float* x, size_t n, float scale, MxRounding rounding,
                   uint8_t* out) noexcept;

}  // namespace switchyard::kernels
