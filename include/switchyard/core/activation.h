// What an activation is to the code that calls it: a name, a formula over rows, the same formula
// over one value. Contract 4.1.4.
#pragma once

#include <cstddef>
#include <limits>
#include <string_view>

namespace switchyard {

// The numbers that a formula may read; each reads the ones that it names.
struct ActivationParams {
  static constexpr float kNoLimit = std::numeric_limits<float>::infinity();

  float alpha = 1.0f;             // slope of the sigmoid (SwiGLU-OAI), beta of SiTU
  float clamp_limit = kNoLimit;   // clamp of SwiGLU-OAI and SwigluStep, linear_beta of SiTU; > 0
  float swiglu_limit = kNoLimit;  // clamp before SiLU; > 0
};

// out[i] = formula(gate[i], up[i]) for i < n. Allocates nothing; any thread may call it.
//
// Shapes: gate [n], up [n], out [n]; n may be 0. An activation that is not gated reads gate alone,
//   and `up` may be null.
// `out` may be the very row `gate` or `up`; rows may not overlap in part. No byte past the n-th
// element is touched.
// Deterministic: on one instruction set a value's bits do not depend on its place in the row or on
//   n.
// Finite values give what the formula gives in exact arithmetic, to a few roundings of f32 and one
// of each exponential's argument (which counts where the result is close to 0); infinities give the
// formula's limit (a gate of -inf: 0 where the formula falls to 0), NaN stays NaN. An infinite `up`
// against a gate whose factor is too small for f32 is NaN.
using ActivationRow = void (*)(const float* gate, const float* up, size_t n,
                               const ActivationParams& params, float* out) noexcept;

// One value in f64: the reference that rows are tested against.
using ActivationScalar = double (*)(double gate, double up, const ActivationParams& params);

// A line of activations.def, or an entry that a program adds from outside
// (moe/registry/registry.h). The views must outlive the registry.
struct ActivationEntry {
  std::string_view name;     // "swiglu_step"
  std::string_view summary;  // the formula in one line
  bool is_gated = true;      // false: reads gate alone
  ActivationRow f32 = nullptr;
  ActivationScalar scalar = nullptr;
};

// An entry with the numbers of one layer.
struct Activation {
  ActivationEntry entry;
  ActivationParams params;

  // The same as entry.f32 with params.
  void operator()(const float* gate, const float* up, size_t n, float* out) const noexcept {
    entry.f32(gate, up, n, params, out);
  }
};

}  // namespace switchyard
