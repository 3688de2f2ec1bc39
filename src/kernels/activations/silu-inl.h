// SwiGLU: silu(gate) * up, silu(x) = x / (1 + exp(-x)). Contract 4.1.4, "Swiglu".
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.

// The scalar form, once.
#ifndef SWITCHYARD_KERNELS_SILU_SCALAR_
#define SWITCHYARD_KERNELS_SILU_SCALAR_
#include <cmath>
namespace switchyard::kernels {
inline double silu_scalar(double gate, double up) { return gate / (1.0 + std::exp(-gate)) * up; }
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
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

struct silu {
  template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
  HWY_INLINE V operator()(D d, V gate, V up) const {
    namespace hn = hwy::HWY_NAMESPACE;
    // sigmoid(x) = 1 / (1 + e) for x >= 0 and e / (1 + e) for x < 0, with e = exp(-|x|) <= 1: the
    // exponential stays in the range that it is computed for, whatever the gate.
    const V one = hn::Set(d, 1.0f);
    const V e = hn::CallExp(d, hn::Neg(hn::Abs(gate)));
    const V numerator = hn::IfThenElse(hn::Lt(gate, hn::Zero(d)), e, one);
    return hn::Mul(hn::Mul(gate, hn::Div(numerator, hn::Add(one, e))), up);
  }
};

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
