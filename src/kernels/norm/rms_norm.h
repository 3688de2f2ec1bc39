// Root-mean-square normalisation.
#pragma once

#include <cstddef>

namespace switchyard::kernels {

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], for one row of n values. out may be x.
// Deterministic: the order of the sum depends on n and the instruction set alone.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
void RmsNorm(const float* x, const float* weight, size_t n, float eps, float* out) noexcept;

// The scalar reference, in f64.
void RmsNormReference(const float* x, const float* weight, size_t n, float eps, float* out);

}  // namespace switchyard::kernels
