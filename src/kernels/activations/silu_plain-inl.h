// silu(x) = x / (1 + exp(-x)), not gated. Contract 4.1.4.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SILU_PLAIN_SCALAR_
#define SWITCHYARD_KERNELS_SILU_PLAIN_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double silu_plain_scalar(double gate, double, const ActivationParams&) {
  return scalar::Silu(gate);
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SILU_PLAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SILU_PLAIN_INL_H_
#undef SWITCHYARD_KERNELS_SILU_PLAIN_INL_H_
#else
#define SWITCHYARD_KERNELS_SILU_PLAIN_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct silu_plain {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, const ActivationParams&) const {
    return Silu(d, gate);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
