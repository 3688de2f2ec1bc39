#include "kernels/quantize/quantize.h"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantize/quantize.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

using DI = hn::RebindToSigned<DF>;
using DU8 = hn::Rebind<uint8_t, DF>;
using VI = hn::Vec<DI>;

// Calls body(vector, at, count) for each vector of x, the last one padded with zeros.
template <class Body>
HWY_INLINE void ForEachVector(const float* HWY_RESTRICT x, size_t n, const Body& body) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) body(hn::LoadU(df, x + i), i, lanes);
  if (i < n) body(hn::LoadN(df, x + i, n - i), i, n - i);
}

// NaN has the largest magnitude bits of all, so an integer maximum finds NaN before infinity before
// all else, whatever order the float comparison of an instruction set has for NaN.
template <bool kFiniteOnly>
HWY_INLINE float MaxMagnitudeOf(const float* HWY_RESTRICT x, size_t n) {
  const DF df;
  const DI di;
  VI most = hn::Zero(di);
  ForEachVector(x, n, [&](VF v, size_t, size_t) HWY_ATTR {
    VI bits = hn::BitCast(di, hn::Abs(v));
    if constexpr (kFiniteOnly)
      bits = hn::IfThenElseZero(hn::Lt(bits, hn::Set(di, 0x7f800000)), bits);
    most = hn::Max(most, bits);
  });
  const int32_t bits = hn::ReduceMax(di, most);
  return hn::GetLane(hn::BitCast(df, hn::Set(di, bits)));
}

float RowMax(const float* x, size_t n) { return MaxMagnitudeOf<false>(x, n); }
float RowFiniteMax(const float* x, size_t n) { return MaxMagnitudeOf<true>(x, n); }

void RowToInt8(const float* HWY_RESTRICT x, size_t n, const Int8Codes& how,
               int8_t* HWY_RESTRICT out) {
  const DF df;
  const DI di;
  const hn::Rebind<int8_t, DF> d8;
  // Adding 1.5 * 2^23 rounds a small value to an integer, ties to even.
  const VF rounder = hn::Set(df, 0x1.8p23f);
  ForEachVector(x, n, [&](VF v, size_t at, size_t count) HWY_ATTR {
    v = hn::Add(hn::Mul(v, hn::Set(df, how.factor)), hn::Set(df, how.offset));
    v = hn::IfThenElseZero(hn::Eq(v, v), v);
    v = hn::Min(hn::Max(v, hn::Set(df, how.low)), hn::Set(df, how.high));
    v = hn::Sub(hn::Add(v, rounder), rounder);
    hn::StoreN(hn::DemoteTo(d8, hn::ConvertTo(di, v)), d8, out + at, count);
  });
}

// The steps of internal::RoundMagnitude, for all lanes at once.
void RowToE4M3(const float* HWY_RESTRICT x, size_t n, float scale, uint8_t* HWY_RESTRICT out) {
  const DF df;
  const DI di;
  const DU8 d8;
  ForEachVector(x, n, [&](VF v, size_t at, size_t count) HWY_ATTR {
    v = hn::Div(v, hn::Set(df, scale));
    const auto is_nan = hn::RebindMask(di, hn::IsNaN(v));
    const VF magnitude = hn::Min(hn::Abs(v), hn::Set(df, kE4M3Max));
    const VI bits = hn::BitCast(di, magnitude);
    const VI odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(di, 1));
    const VI rounded = hn::Add(hn::Add(bits, hn::Set(di, (1 << 19) - 1)), odd);
    const VI normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(di, 120 << 3));
    const VF anchor = hn::Set(df, 0x1p14f);
    const VI small = hn::Sub(hn::BitCast(di, hn::Add(magnitude, anchor)), hn::BitCast(di, anchor));
    const auto is_small = hn::RebindMask(di, hn::Lt(magnitude, hn::Set(df, 0x1p-6f)));
    const VI sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, v)), hn::Set(di, 0x80));
    VI code = hn::Or(hn::IfThenElse(is_small, small, normal), sign);
    code = hn::IfThenElse(is_nan, hn::Set(di, 0x7f), code);
    hn::StoreN(hn::DemoteTo(d8, code), d8, out + at, count);
  });
}

// The codes of up to kCodes values, one in a byte.
constexpr size_t kCodes = 64;
template <bool kHalfToEven>
HWY_INLINE void ToE2M1(const float* HWY_RESTRICT x, size_t n, float scale,
                       uint8_t* HWY_RESTRICT codes) {
  const DF df;
  const DI di;
  const DU8 d8;
  ForEachVector(x, n, [&](VF v, size_t at, size_t count) HWY_ATTR {
    v = hn::Div(v, hn::Set(df, scale));
    const VF magnitude = hn::Abs(v);
    VI code = hn::Zero(di);
    // One more for each middle between codes that lies below the value (a mask is -1).
    const auto count_above = [&](float middle, bool upper_is_even) HWY_ATTR {
      const VF m = hn::Set(df, middle);
      const auto above = kHalfToEven && upper_is_even ? hn::Ge(magnitude, m) : hn::Gt(magnitude, m);
      code = hn::Sub(code, hn::VecFromMask(di, hn::RebindMask(di, above)));
    };
    count_above(0.25f, false);
    count_above(0.75f, true);
    count_above(1.25f, false);
    count_above(1.75f, true);
    count_above(2.5f, false);
    count_above(3.5f, true);
    count_above(5.0f, false);
    const VI sign = hn::And(hn::ShiftRight<28>(hn::BitCast(di, v)), hn::Set(di, 8));
    const VI known = hn::VecFromMask(di, hn::RebindMask(di, hn::Eq(v, v)));
    hn::StoreN(hn::DemoteTo(d8, hn::And(hn::Or(code, sign), known)), d8, codes + at, count);
  });
}

template <bool kHalfToEven>
HWY_INLINE void RowToE2M1(const float* HWY_RESTRICT x, size_t n, float scale,
                          uint8_t* HWY_RESTRICT out) {
  uint8_t codes[kCodes + 1];
  for (size_t i = 0; i < n; i += kCodes) {
    const size_t count = std::min(kCodes, n - i);
    ToE2M1<kHalfToEven>(x + i, count, scale, codes);
    codes[count] = 0;
    for (size_t j = 0; j < count; j += 2)
      out[(i + j) / 2] = static_cast<uint8_t>(codes[j] | (codes[j + 1] << 4));
  }
}
void RowToE2M1Even(const float* x, size_t n, float scale, uint8_t* out) {
  RowToE2M1<true>(x, n, scale, out);
}
void RowToE2M1Zero(const float* x, size_t n, float scale, uint8_t* out) {
  RowToE2M1<false>(x, n, scale, out);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(RowMax);
HWY_EXPORT(RowFiniteMax);
HWY_EXPORT(RowToInt8);
HWY_EXPORT(RowToE4M3);
HWY_EXPORT(RowToE2M1Even);
HWY_EXPORT(RowToE2M1Zero);

float MaxMagnitude(const float* x, size_t n) noexcept { return HWY_DYNAMIC_DISPATCH(RowMax)(x, n); }
float MaxFiniteMagnitude(const float* x, size_t n) noexcept {
  return HWY_DYNAMIC_DISPATCH(RowFiniteMax)(x, n);
}
void EncodeInt8(const float* x, size_t n, const Int8Codes& how, int8_t* out) noexcept {
  HWY_DYNAMIC_DISPATCH(RowToInt8)(x, n, how, out);
}
void EncodeE4M3Row(const float* x, size_t n, float scale, uint8_t* out) noexcept {
  HWY_DYNAMIC_DISPATCH(RowToE4M3)(x, n, scale, out);
}
void EncodeE2M1Row(const float* x, size_t n, float scale, MxRounding rounding,
                   uint8_t* out) noexcept {
  if (rounding == MxRounding::kHalfToEven)
    return HWY_DYNAMIC_DISPATCH(RowToE2M1Even)(x, n, scale, out);
  HWY_DYNAMIC_DISPATCH(RowToE2M1Zero)(x, n, scale, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
