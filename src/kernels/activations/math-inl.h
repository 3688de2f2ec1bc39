// Functions that several activations share. Each keeps NaN, has its limit at infinities, and has
// small relative error where it falls to 0.

// The scalar forms, once.
#ifndef SWITCHYARD_KERNELS_ACTIVATION_MATH_SCALAR_
#define SWITCHYARD_KERNELS_ACTIVATION_MATH_SCALAR_
#include <cmath>
#include <numbers>

#include "switchyard/core/activation.h"
#include "switchyard/core/dtype.h"
namespace switchyard::kernels::scalar {

inline double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// x times a factor that falls to 0 faster than x grows: 0, not NaN, for an infinite x.
inline double Damped(double x, double factor) { return factor == 0.0 ? 0.0 : x * factor; }

// Clamps that let NaN through.
inline double AtMost(double x, double limit) { return x > limit ? limit : x; }
inline double Within(double x, double limit) { return x < -limit ? -limit : AtMost(x, limit); }

inline double Silu(double x) { return Damped(x, Sigmoid(x)); }

// x Phi(x), Phi the normal distribution: (1 + erf(x / sqrt(2))) / 2, without its cancellation.
inline double Gelu(double x) { return Damped(x, 0.5 * std::erfc(-x / std::numbers::sqrt2)); }

// x (1 + tanh(z)) / 2 = x sigma(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
// Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
constexpr double kGeluTanhSlope = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double kGeluTanhCubic = 0.044715;
inline double GeluTanh(double x) {
  return Damped(x, Sigmoid(kGeluTanhSlope * x * (1.0 + kGeluTanhCubic * x * x)));
}

}  // namespace switchyard::kernels::scalar
#endif

// The vector forms, once per instruction set.
#if defined(SWITCHYARD_KERNELS_ACTIVATION_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_ACTIVATION_MATH_INL_H_
#undef SWITCHYARD_KERNELS_ACTIVATION_MATH_INL_H_
#else
#define SWITCHYARD_KERNELS_ACTIVATION_MATH_INL_H_
#endif

#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Of two branches, one for negative x (NaN is not).
template <class D, class V>
HWY_INLINE V IfNegative(D d, V x, V yes, V no) {
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), yes, no);
}

// sigmoid(x) = 1 / (1 + e) for x >= 0 and e / (1 + e) for x < 0, with e = exp(-|x|) <= 1: the
// exponential stays in the range that it is computed for (below +104), whatever x. NaN gives 1.
template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V e = hn::CallExp(d, hn::Neg(hn::Abs(x)));
  return hn::Div(IfNegative(d, x, e, one), hn::Add(one, e));
}

template <class D, class V>
HWY_INLINE V Damped(D d, V x, V factor) {
  return hn::IfThenZeroElse(hn::Eq(factor, hn::Zero(d)), hn::Mul(x, factor));
}

// Comparisons, since Min and Max may drop a NaN.
template <class D, class V>
HWY_INLINE V AtMost(D d, V x, float limit) {
  const V high = hn::Set(d, limit);
  return hn::IfThenElse(hn::Gt(x, high), high, x);
}
template <class D, class V>
HWY_INLINE V Within(D d, V x, float limit) {
  const V low = hn::Set(d, -limit);
  return hn::IfThenElse(hn::Lt(x, low), low, AtMost(d, x, limit));
}

template <class D, class V>
HWY_INLINE V Silu(D d, V x) {
  return Damped(d, x, Sigmoid(d, x));
}

// By Horner's rule; coefficients from the highest power down.
template <class D, class V, size_t kCount>
HWY_INLINE V Polynomial(D d, V x, const float (&coefficients)[kCount]) {
  V sum = hn::Set(d, coefficients[0]);
  for (size_t i = 1; i < kCount; ++i) sum = hn::MulAdd(sum, x, hn::Set(d, coefficients[i]));
  return sum;
}

// (Phi(x) - 1/2) / x for |x| <= 1 by a polynomial in x^2, relative error 4e-8: ours, through the
// Chebyshev nodes of x^2 in [0, 1].
template <class D, class V>
HWY_INLINE V NormalSlope(D d, V x) {
  constexpr float kCoefficients[] = {-7.66053835832281e-06f, 0.0001135022976086475f,
                                     -0.001186343957670033f, 0.009973328560590744f,
                                     -0.06649035960435867f,  0.3989422917366028f};
  return Polynomial(d, hn::Mul(x, x), kCoefficients);
}

// Phi(-t) for t in [0, 15]: exp(-t^2 / 2) P(s) / (t + 4), s = (t - 4) / (t + 4), relative error of
// P 2.5e-8.
// Source: the substitution is that of Shepherd and Laframboise, "Chebyshev Approximation of
//   (1 + 2x) exp(x^2) erfc(x)", 1981; P is ours, of degree 10, through the Chebyshev nodes of s.
// In all, the roundings of t + 4 and t^2 leave a relative error of (8 + t^2 / 2) 2^-24. From t
// = 14.5 on, the exponential is 0 in f32.
template <class D, class V>
HWY_INLINE V NormalTail(D d, V t) {
  constexpr float kCoefficients[] = {
      -5.155659164302051e-05f, -0.00023179868003353477f, 0.0001710546057438478f,
      0.0016452192794531584f,  -0.003489317372441292f,   -0.007545268163084984f,
      0.06039753183722496f,    -0.1865212768316269f,     0.38713735342025757f,
      -0.6078966856002808f,    0.7552851438522339f};
  const V inverse = hn::Div(hn::Set(d, 1.0f), hn::Add(t, hn::Set(d, 4.0f)));
  const V s = hn::NegMulAdd(hn::Set(d, 8.0f), inverse, hn::Set(d, 1.0f));
  const V e = hn::CallExp(d, hn::Mul(hn::Mul(t, t), hn::Set(d, -0.5f)));
  return hn::Mul(e, hn::Mul(Polynomial(d, s, kCoefficients), inverse));
}

// x Phi(x), as the scalar form: from the middle where |x| < 1, since the tail is less accurate
// there.
template <class D, class V>
HWY_INLINE V Gelu(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V t = AtMost(d, hn::Abs(x), 15.0f);
  const V tail = NormalTail(d, t);
  const V far = IfNegative(d, x, tail, hn::Sub(one, tail));
  const V near = hn::MulAdd(x, NormalSlope(d, x), hn::Set(d, 0.5f));
  return Damped(d, x, hn::IfThenElse(hn::Lt(t, one), near, far));
}

template <class D, class V>
HWY_INLINE V GeluTanh(D d, V x) {
  const V cubic = hn::Set(d, static_cast<float>(scalar::kGeluTanhCubic));
  const V slope = hn::Set(d, static_cast<float>(scalar::kGeluTanhSlope));
  const V bend = hn::MulAdd(hn::Mul(x, x), cubic, hn::Set(d, 1.0f));
  return Damped(d, x, Sigmoid(d, hn::Mul(hn::Mul(slope, x), bend)));
}

// bound tanh(x / bound): x near 0, never beyond the bound.
template <class D, class V>
HWY_INLINE V Bounded(D d, V x, float bound) {
  const V b = hn::Set(d, bound);
  return hn::Mul(b, hn::CallTanh(d, hn::Div(x, b)));
}

// To bf16, to nearest even, as f32. By integers: some instruction sets take subnormals for 0.
template <class D, class V>
HWY_INLINE V RoundToBF16(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded =
      hn::And(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd), hn::Set(du, 0xffff0000u));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::BitCast(d, rounded));
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
