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
HWY_EXPORT(ScaleRow);
HWY_EXPORT(ClampRow);
void AddTo(const float* x, size_t n, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(AddToRow)(x, n, out);
}
void ScaleAddTo(const float* x, float scale, size_t n, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(ScaleAddToRow)(x, scale, n, out);
}
void Scale(float* x, float scale, size_t n) noexcept {
  HWY_DYNAMIC_DISPATCH(ScaleRow)(x, scale, n);
}
void Clamp(float* x, float limit, size_t n) noexcept {
  HWY_DYNAMIC_DISPATCH(ClampRow)(x, limit, n);
}
}  // namespace switchyard::kernels
#endif
