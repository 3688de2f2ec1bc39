#include "kernels/elementwise/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise/elementwise.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

void AddToRow(const float* HWY_RESTRICT x, size_t n, float* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(df, out + i), hn::LoadU(df, x + i)), df, out + i);
  for (; i < n; ++i) out[i] += x[i];
}

void ScaleAddToRow(const float* HWY_RESTRICT x, float scale, size_t n, float* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF s = hn::Set(df, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::MulAdd(s, hn::LoadU(df, x + i), hn::LoadU(df, out + i)), df, out + i);
  }
  if (i < n)
    hn::StoreN(hn::MulAdd(s, hn::LoadN(df, x + i, n - i), hn::LoadN(df, out + i, n - i)), df,
               out + i, n - i);
}

// Two vectors of columns at a time, down all rows.
void WeightedSumRows(const float* const* HWY_RESTRICT rows, const float* HWY_RESTRICT weights,
                     size_t num_rows, size_t n, float* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF sum0 = hn::Zero(df);
    VF sum1 = hn::Zero(df);
    for (size_t r = 0; r < num_rows; ++r) {
      const VF weight = hn::Set(df, weights[r]);
      sum0 = hn::MulAdd(weight, hn::LoadU(df, rows[r] + i), sum0);
      sum1 = hn::MulAdd(weight, hn::LoadU(df, rows[r] + i + lanes), sum1);
    }
    hn::StoreU(sum0, df, out + i);
    hn::StoreU(sum1, df, out + i + lanes);
  }
  for (; i < n; i += lanes) {
    const size_t left = HWY_MIN(lanes, n - i);
    VF sum = hn::Zero(df);
    for (size_t r = 0; r < num_rows; ++r)
      sum = hn::MulAdd(hn::Set(df, weights[r]), hn::LoadN(df, rows[r] + i, left), sum);
    hn::StoreN(sum, df, out + i, left);
  }
}

void ScaleRow(float* x, float scale, size_t n) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF s = hn::Set(df, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(s, hn::LoadU(df, x + i)), df, x + i);
  for (; i < n; ++i) x[i] *= scale;
}

void ClampRow(float* x, float limit, size_t n) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF high = hn::Set(df, limit);
  const VF low = hn::Neg(high);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Min(hn::Max(hn::LoadU(df, x + i), low), high), df, x + i);
  if (i < n) hn::StoreN(hn::Min(hn::Max(hn::LoadN(df, x + i, n - i), low), high), df, x + i, n - i);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(AddToRow);
HWY_EXPORT(ScaleAddToRow);
HWY_EXPORT(WeightedSumRows);
HWY_EXPORT(ScaleRow);
HWY_EXPORT(ClampRow);
void AddTo(const float* x, size_t n, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(AddToRow)(x, n, out);
}
void ScaleAddTo(const float* x, float scale, size_t n, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(ScaleAddToRow)(x, scale, n, out);
}
void WeightedSum(const float* const* rows, const float* weights, size_t num_rows, size_t n,
                 float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(WeightedSumRows)(rows, weights, num_rows, n, out);
}
void Scale(float* x, float scale, size_t n) noexcept {
  HWY_DYNAMIC_DISPATCH(ScaleRow)(x, scale, n);
}
void Clamp(float* x, float limit, size_t n) noexcept {
  HWY_DYNAMIC_DISPATCH(ClampRow)(x, limit, n);
}
}  // namespace switchyard::kernels
#endif
