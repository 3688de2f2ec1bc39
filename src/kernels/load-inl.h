// Loads of 16- and 32-bit floats as f32 vectors, shared by all kernels. Compiled once per
// instruction set.
#if defined(SWITCHYARD_KERNELS_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_LOAD_INL_H_
#undef SWITCHYARD_KERNELS_LOAD_INL_H_
#else
#define SWITCHYARD_KERNELS_LOAD_INL_H_
#endif

#include <hwy/highway.h>

#include "switchyard/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// Lanes(DF()) values at p, widened to f32.
HWY_INLINE VF LoadF32(DF df, const float* HWY_RESTRICT p) { return hn::LoadU(df, p); }
template <class T>
HWY_INLINE VF LoadF32(DF df, const T* HWY_RESTRICT p) {
  return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, DF>(), p));
}

#if HWY_TARGET == HWY_EMU128
// Highway's portable conversion takes an f16 infinity for 65536, so the portable target converts by
// our own.
HWY_INLINE VF LoadF32N(DF df, const hwy::float16_t* HWY_RESTRICT p, size_t n) {
  HWY_ALIGN float lanes[HWY_MAX_LANES_D(DF)] = {};
  for (size_t i = 0; i < n; ++i) lanes[i] = ToFloat(reinterpret_cast<const F16*>(p)[i]);
  return hn::Load(df, lanes);
}
HWY_INLINE VF LoadF32(DF df, const hwy::float16_t* HWY_RESTRICT p) {
  return LoadF32N(df, p, hn::Lanes(df));
}
#endif

// The first n (< Lanes) of them, zeros after; touches no byte past the n-th.
HWY_INLINE VF LoadF32N(DF df, const float* HWY_RESTRICT p, size_t n) { return hn::LoadN(df, p, n); }
template <class T>
HWY_INLINE VF LoadF32N(DF df, const T* HWY_RESTRICT p, size_t n) {
  return hn::PromoteTo(df, hn::LoadN(hn::Rebind<T, DF>(), p, n));
}

// Stores f32 lanes as f32 or bf16 (to nearest even).
HWY_INLINE void StoreF32(VF v, DF df, float* HWY_RESTRICT p) { hn::StoreU(v, df, p); }
HWY_INLINE void StoreF32(VF v, DF, hwy::bfloat16_t* HWY_RESTRICT p) {
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  hn::StoreU(hn::DemoteTo(db, v), db, p);
}
HWY_INLINE void StoreF32(VF v, DF, hwy::float16_t* HWY_RESTRICT p) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  hn::StoreU(hn::DemoteTo(dh, v), dh, p);
}
HWY_INLINE void StoreF32N(VF v, DF df, float* HWY_RESTRICT p, size_t n) { hn::StoreN(v, df, p, n); }
HWY_INLINE void StoreF32N(VF v, DF, hwy::bfloat16_t* HWY_RESTRICT p, size_t n) {
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  hn::StoreN(hn::DemoteTo(db, v), db, p, n);
}
HWY_INLINE void StoreF32N(VF v, DF, hwy::float16_t* HWY_RESTRICT p, size_t n) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  hn::StoreN(hn::DemoteTo(dh, v), dh, p, n);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
