// SwiGLU of the GPT-OSS models: g sigma(alpha g) (u + 1), g at most the limit, u within it.
// Contract 4.1.4, "SwigluOAI".

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SWIGLU_OAI_SCALAR_
#define SWITCHYARD_KERNELS_SWIGLU_OAI_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double swiglu_oai_scalar(double gate, double up, const ActivationParams& params) {
  const double g = scalar::AtMost(gate, params.clamp_limit);
  const double u = scalar::Within(up, params.clamp_limit);
  return scalar::Damped(g, scalar::Sigmoid(params.alpha * g)) * (u + 1.0);
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SWIGLU_OAI_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SWIGLU_OAI_INL_H_
#undef SWITCHYARD_KERNELS_SWIGLU_OAI_INL_H_
#else
#define SWITCHYARD_KERNELS_SWIGLU_OAI_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct swiglu_oai {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams& params) const {
    const V g = AtMost(d, gate, params.clamp_limit);
    const V u = Within(d, up, params.clamp_limit);
    const V sigmoid = Sigmoid(d, hn::Mul(hn::Set(d, params.alpha), g));
    return hn::Mul(Damped(d, g, sigmoid), hn::Add(u, hn::Set(d, 1.0f)));
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
