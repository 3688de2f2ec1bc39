// SwiGLU with silu(gate) rounded to bf16 before it meets `up`, as models compute it that were
// trained in bf16 layer by layer. Contract 1.6, "silu_rounded". `up` and the product are not
// rounded.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SILU_ROUNDED_SCALAR_
#define SWITCHYARD_KERNELS_SILU_ROUNDED_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double silu_rounded_scalar(double gate, double up, const ActivationParams&) {
  return ToFloat(ToBF16(static_cast<float>(scalar::Silu(gate)))) * up;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SILU_ROUNDED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SILU_ROUNDED_INL_H_
#undef SWITCHYARD_KERNELS_SILU_ROUNDED_INL_H_
#else
#define SWITCHYARD_KERNELS_SILU_ROUNDED_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct silu_rounded {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams&) const {
    return hn::Mul(RoundToBF16(d, Silu(d, gate)), up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
