#include "kernels/convert/convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/convert/convert.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

template <class T>
void Widen(const T* HWY_RESTRICT in, size_t n, float* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(LoadF32(df, in + i), df, out + i);
  if (i < n) hn::StoreN(LoadF32N(df, in + i, n - i), df, out + i, n - i);
}

template <class T>
void Narrow(const float* HWY_RESTRICT in, size_t n, T* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) StoreF32(hn::LoadU(df, in + i), df, out + i);
  if (i < n) StoreF32N(hn::LoadN(df, in + i, n - i), df, out + i, n - i);
}

void WidenF32(const void* in, size_t n, float* out) {
  Widen(static_cast<const float*>(in), n, out);
}
void WidenF16(const void* in, size_t n, float* out) {
  Widen(static_cast<const hwy::float16_t*>(in), n, out);
}
void WidenBF16(const void* in, size_t n, float* out) {
  Widen(static_cast<const hwy::bfloat16_t*>(in), n, out);
}
void NarrowF32(const float* in, size_t n, void* out) { Narrow(in, n, static_cast<float*>(out)); }
void NarrowF16(const float* in, size_t n, void* out) {
  Narrow(in, n, static_cast<hwy::float16_t*>(out));
}
void NarrowBF16(const float* in, size_t n, void* out) {
  Narrow(in, n, static_cast<hwy::bfloat16_t*>(out));
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(WidenF32);
HWY_EXPORT(WidenF16);
HWY_EXPORT(WidenBF16);
HWY_EXPORT(NarrowF32);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(NarrowBF16);

void ConvertToF32(const void* in, DType from, size_t n, float* out) noexcept {
  switch (from) {
    case DType::kF16: return HWY_DYNAMIC_DISPATCH(WidenF16)(in, n, out);
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(WidenBF16)(in, n, out);
    default: return HWY_DYNAMIC_DISPATCH(WidenF32)(in, n, out);
  }
}

void ConvertFromF32(const float* in, size_t n, DType to, void* out) noexcept {
  switch (to) {
    case DType::kF16: return HWY_DYNAMIC_DISPATCH(NarrowF16)(in, n, out);
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(NarrowBF16)(in, n, out);
    default: return HWY_DYNAMIC_DISPATCH(NarrowF32)(in, n, out);
  }
}

}  // namespace switchyard::kernels
#endif
