// SwiGLU with a clamp before SiLU: silu(min(g, limit)) u, u within the limit. Contract 4.1.4,
// "swiglu_limit"; the DeepSeek-V4 models.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SWIGLU_LIMIT_SCALAR_
#define SWITCHYARD_KERNELS_SWIGLU_LIMIT_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double swiglu_limit_scalar(double gate, double up, const ActivationParams& params) {
  return scalar::Silu(scalar::AtMost(gate, params.swiglu_limit)) *
         scalar::Within(up, params.swiglu_limit);
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SWIGLU_LIMIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SWIGLU_LIMIT_INL_H_
#undef SWITCHYARD_KERNELS_SWIGLU_LIMIT_INL_H_
#else
#define SWITCHYARD_KERNELS_SWIGLU_LIMIT_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct swiglu_limit {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams& params) const {
    return hn::Mul(Silu(d, AtMost(d, gate, params.swiglu_limit)),
                   Within(d, up, params.swiglu_limit));
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
