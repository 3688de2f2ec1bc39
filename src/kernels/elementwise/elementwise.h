// Small operations on rows of f32.
#pragma once

#include <cstddef>

namespace switchyard::kernels {

// out[i] += x[i]
void AddTo(const float* x, size_t n, float* out) noexcept;

// out[i] += scale * x[i]
void ScaleAddTo(const float* x, float scale, size_t n, float* out) noexcept;

// x[i] *= scale
void Scale(float* x, float scale, size_t n) noexcept;

// x[i] = min(max(x[i], -limit), limit)
void Clamp(float* x, float limit, size_t n) noexcept;

}  // namespace switchyard::kernels
