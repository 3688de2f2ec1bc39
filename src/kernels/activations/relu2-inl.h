// max(x, 0)^2, not gated. Contract 4.1.4.
// Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_RELU2_SCALAR_
#define SWITCHYARD_KERNELS_RELU2_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double relu2_scalar(double gate, double, const ActivationParams&) {
  const double positive = gate < 0.0 ? 0.0 : gate;
  return positive * positive;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_RELU2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_RELU2_INL_H_
#undef SWITCHYARD_KERNELS_RELU2_INL_H_
#else
#define SWITCHYARD_KERNELS_RELU2_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct relu2 {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, const ActivationParams&) const {
    const V positive = IfNegative(d, gate, hn::Zero(d), gate);
    return hn::Mul(positive, positive);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
