#include "kernels/norm/rms_norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

void RmsNormRow(const float* HWY_RESTRICT x, const float* HWY_RESTRICT weight, size_t n, float eps,
                float* out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  // Four sums hide the latency of the multiply-add.
  VF sum0 = hn::Zero(df);
  VF sum1 = hn::Zero(df);
  VF sum2 = hn::Zero(df);
  VF sum3 = hn::Zero(df);
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const VF x0 = hn::LoadU(df, x + i);
    const VF x1 = hn::LoadU(df, x + i + lanes);
    const VF x2 = hn::LoadU(df, x + i + 2 * lanes);
    const VF x3 = hn::LoadU(df, x + i + 3 * lanes);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  for (; i < n; i += lanes) {
    const VF v = hn::LoadN(df, x + i, n - i);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  const float total = hn::ReduceSum(df, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
  const VF scale = hn::Set(df, 1.0f / std::sqrt(total / static_cast<float>(n) + eps));
  for (i = 0; i + lanes <= n; i += lanes) {
    const VF v = hn::Mul(hn::LoadU(df, x + i), scale);
    hn::StoreU(hn::Mul(v, hn::LoadU(df, weight + i)), df, out + i);
  }
  if (i < n) {
    const VF v = hn::Mul(hn::LoadN(df, x + i, n - i), scale);
    hn::StoreN(hn::Mul(v, hn::LoadN(df, weight + i, n - i)), df, out + i, n - i);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(RmsNormRow);
void RmsNorm(const float* x, const float* weight, size_t n, float eps, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(RmsNormRow)(x, weight, n, eps, out);
}
}  // namespace switchyard::kernels
#endif
