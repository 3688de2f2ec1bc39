// GEGLU by tanh: gelu(gate) * up, gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
// Contract 4.1.4, "GeluAndMul" in the tanh form.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_GELU_TANH_SCALAR_
#define SWITCHYARD_KERNELS_GELU_TANH_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double gelu_tanh_scalar(double gate, double up, const ActivationParams&) {
  return scalar::GeluTanh(gate) * up;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_GELU_TANH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_GELU_TANH_INL_H_
#undef SWITCHYARD_KERNELS_GELU_TANH_INL_H_
#else
#define SWITCHYARD_KERNELS_GELU_TANH_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct gelu_tanh {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams&) const {
    return hn::Mul(GeluTanh(d, gate), up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
