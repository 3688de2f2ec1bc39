// Rotary position embedding, applied.
#pragma once

#include <cstddef>

namespace switchyard::kernels {

// Rotates one head in place: pair (x[i], x[i + half]) by the angle whose cosine and sine are
// cos[i], sin[i], i < half; x has 2 * half values. The frequencies and their scaling kinds are the
// model layer's (model/rope.h).
// Source: Su et al., "RoFormer", 2021, in the half-split layout that Hugging Face checkpoints use.
void RotateHalves(float* x, const float* cos, const float* sin, size_t half) noexcept;

// The same of neighbours: pair (x[2 i], x[2 i + 1]), the layout of the paper.
void RotatePairs(float* x, const float* cos, const float* sin, size_t half) noexcept;

}  // namespace switchyard::kernels
