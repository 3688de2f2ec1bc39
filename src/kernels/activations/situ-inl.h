// SiTU: b tanh(g / b) sigma(g) * l tanh(u / l), b = alpha, l = the clamp limit; u as it is if there
// is no limit. Contract 4.1.4, "SiTU".

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SITU_SCALAR_
#define SWITCHYARD_KERNELS_SITU_SCALAR_
#include "kernels/activations/math-inl.h"
namespace switchyard::kernels {
inline double situ_scalar(double gate, double up, const ActivationParams& params) {
  const double b = params.alpha;
  const double l = params.clamp_limit;
  const double bounded_up = l == ActivationParams::kNoLimit ? up : l * std::tanh(up / l);
  return b * std::tanh(gate / b) * scalar::Sigmoid(gate) * bounded_up;
}
}  // namespace switchyard::kernels
#endif

// The vector form, once per instruction set.
#if defined(SWITCHYARD_KERNELS_SITU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_SITU_INL_H_
#undef SWITCHYARD_KERNELS_SITU_INL_H_
#else
#define SWITCHYARD_KERNELS_SITU_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/activations/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct situ {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up, const ActivationParams& params) const {
    const V bounded_gate = Bounded(d, gate, params.alpha);
    const V bounded_up =
        params.clamp_limit == ActivationParams::kNoLimit ? up : Bounded(d, up, params.clamp_limit);
    return hn::Mul(hn::Mul(bounded_gate, Sigmoid(d, gate)), bounded_up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
