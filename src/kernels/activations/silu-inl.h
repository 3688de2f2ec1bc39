// SwiGLU: silu(gate) * up, silu(x) = x / (1 + exp(-x)). Contract 4.1.4, "Swiglu".
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SILU_SCALAR_
#define SWITCHYARD_KERNELS_SILU_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double silu_scalar(double gate, double up, const ActivationParams&) {
  return scalar::Silu(gate) * up;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SILU_INL_H_
#undef SWITCHYARD_KERNELS_SILU_INL_H_
#else
#define SWITCHYARD_KERNELS_SILU_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct silu {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams&) const {
    return hn::Mul(Silu(d, gate), up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
