#include "kernels/rope/rope.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/rope.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

void RotateHead(float* HWY_RESTRICT x, const float* HWY_RESTRICT cos, const float* HWY_RESTRICT sin,
                size_t half) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  for (size_t i = 0; i < half; i += lanes) {
    const size_t n = HWY_MIN(lanes, half - i);
    const VF a = hn::LoadN(df, x + i, n);
    const VF b = hn::LoadN(df, x + half + i, n);
    const VF c = hn::LoadN(df, cos + i, n);
    const VF s = hn::LoadN(df, sin + i, n);
    hn::StoreN(hn::NegMulAdd(b, s, hn::Mul(a, c)), df, x + i, n);
    hn::StoreN(hn::MulAdd(a, s, hn::Mul(b, c)), df, x + half + i, n);
  }
}

void RotateInterleaved(float* HWY_RESTRICT x, const float* HWY_RESTRICT cos,
                       const float* HWY_RESTRICT sin, size_t half) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= half; i += lanes) {
    VF a;
    VF b;
    hn::LoadInterleaved2(df, x + 2 * i, a, b);
    const VF c = hn::LoadU(df, cos + i);
    const VF s = hn::LoadU(df, sin + i);
    hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)), df,
                          x + 2 * i);
  }
  for (; i < half; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(RotateHead);
HWY_EXPORT(RotateInterleaved);
void RotateHalves(float* x, const float* cos, const float* sin, size_t half) noexcept {
  HWY_DYNAMIC_DISPATCH(RotateHead)(x, cos, sin, half);
}
void RotatePairs(float* x, const float* cos, const float* sin, size_t half) noexcept {
  HWY_DYNAMIC_DISPATCH(RotateInterleaved)(x, cos, sin, half);
}
}  // namespace switchyard::kernels
#endif
