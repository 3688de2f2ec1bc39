// Loads of 8-bit codes as f32 vectors, without their scale. Compiled once per instruction set;
// include it before the templates that are to load codes.
#if defined(SWITCHYARD_KERNELS_LOAD_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_LOAD_CODES_INL_H_
#undef SWITCHYARD_KERNELS_LOAD_CODES_INL_H_
#else
#define SWITCHYARD_KERNELS_LOAD_CODES_INL_H_
#endif

#include "kernels/e4m3_code.h"
#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

using CodesOfVF = hn::Vec<hn::Rebind<int8_t, DF>>;

HWY_INLINE VF WidenInt8(DF df, CodesOfVF codes) {
  return hn::ConvertTo(df, hn::PromoteTo(hn::RebindToSigned<DF>(), codes));
}

// The bits of e4m3, spread to those of f16, are the value / 256 in f16, subnormals too: the
// exponents differ in their bias alone. NaN is not known.
//
//   e4m3         s e e e e m m m
//   f16    s 0 e e e e m m m 0 0 0 0 0 0 0
HWY_INLINE VF WidenE4M3(DF df, CodesOfVF codes) {
  const hn::Rebind<int16_t, DF> d16;
  const auto shifted = hn::ShiftLeft<7>(hn::PromoteTo(d16, codes));
  const auto bits = hn::And(shifted, hn::Set(d16, static_cast<int16_t>(0xBF80)));
  return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
}

HWY_INLINE VF LoadF32(DF df, const int8_t* HWY_RESTRICT p) {
  return WidenInt8(df, hn::LoadU(hn::Rebind<int8_t, DF>(), p));
}
HWY_INLINE VF LoadF32N(DF df, const int8_t* HWY_RESTRICT p, size_t n) {
  return WidenInt8(df, hn::LoadN(hn::Rebind<int8_t, DF>(), p, n));
}
HWY_INLINE VF LoadF32(DF df, const E4M3Code* HWY_RESTRICT p) {
  return WidenE4M3(df, hn::LoadU(hn::Rebind<int8_t, DF>(), &p->bits));
}
HWY_INLINE VF LoadF32N(DF df, const E4M3Code* HWY_RESTRICT p, size_t n) {
  return WidenE4M3(df, hn::LoadN(hn::Rebind<int8_t, DF>(), &p->bits, n));
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
