// Gated activations: out = act(gate) * up, by name.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// n values of gate and up; `out` gets them as f32, or rounded to bf16. No overlap.
using GatedActivationF32 = void (*)(const float* gate, const float* up, size_t n,
                                    float* out) noexcept;
using GatedActivationBF16 = void (*)(const float* gate, const float* up, size_t n,
                                     BF16* out) noexcept;

struct Activation {
  std::string_view name;
  GatedActivationF32 to_f32;
  GatedActivationBF16 to_bf16;
  double (*scalar)(double gate, double up);  // the reference, one value
};

// The lines of activations.def.
std::span<const Activation> AllActivations();

// Errors: kNotFound listing the known names, with the closest first.
const Activation& FindActivation(std::string_view name);

}  // namespace switchyard::kernels
