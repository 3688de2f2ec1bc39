// SwiGLU with a clamp after SiLU: min(silu(g), limit) u, u within the limit. Contract 4.1.4,
// "SwigluStepAndMul".

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SWIGLU_STEP_SCALAR_
#define SWITCHYARD_KERNELS_SWIGLU_STEP_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double swiglu_step_scalar(double gate, double up, const ActivationParams& params) {
  return scalar::AtMost(scalar::Silu(gate), params.clamp_limit) *
         scalar::Within(up, params.clamp_limit);
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SWIGLU_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SWIGLU_STEP_INL_H_
#undef SWITCHYARD_KERNELS_SWIGLU_STEP_INL_H_
#else
#define SWITCHYARD_KERNELS_SWIGLU_STEP_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct swiglu_step {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams& params) const {
    return hn::Mul(AtMost(d, Silu(d, gate), params.clamp_limit), Within(d, up, params.clamp_limit));
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
