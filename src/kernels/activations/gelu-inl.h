// GEGLU: gelu(gate) * up, gelu(x) = x (1 + erf(x / sqrt(2))) / 2. Contract 4.1.4, "GeluAndMul" in
// the erf form.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_GELU_SCALAR_
#define SWITCHYARD_KERNELS_GELU_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double gelu_scalar(double gate, double up, const ActivationParams&) {
  return scalar::Gelu(gate) * up;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_GELU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_GELU_INL_H_
#undef SWITCHYARD_KERNELS_GELU_INL_H_
#else
#define SWITCHYARD_KERNELS_GELU_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct gelu {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams&) const {
    return hn::Mul(Gelu(d, gate), up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
