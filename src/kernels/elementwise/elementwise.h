// Small operations on rows of f32.
#pragma once

#include <cstddef>

namespace switchyard::kernels {

// out[i] += x[i]
void AddTo(const float* x, size_t n, float* out) noexcept;

// out[i] += scale * x[i]
void ScaleAddTo(const float* x, float scale, size_t n, float* out) noexcept;

// out[i] = weights[0] * rows[0][i] + weights[1] * rows[1][i] + …, added in this order: the bits of
// ScaleAddTo row by row on zeros, in one pass, so that misses of several rows overlap.
void WeightedSum(const float* const* rows, const float* weights, size_t num_rows, size_t n,
                 float* out) noexcept;

// x[i] *= scale
void Scale(float* x, float scale, size_t n) noexcept;

// x[i] = min(max(x[i], -limit), limit)
void Clamp(float* x, float limit, size_t n) noexcept;

}  // namespace switchyard::kernels
