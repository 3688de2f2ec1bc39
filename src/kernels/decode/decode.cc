#include "kernels/decode/decode.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/decode/decode.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/convert/convert.h"
#include "kernels/ggml/ggml.h"
#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

using DI = hn::RebindToSigned<DF>;

// out[i] = of(vector of in at i), for 8-bit integers in.
template <class T, class Of>
HWY_INLINE void MapBytes(const T* HWY_RESTRICT in, size_t n, float* HWY_RESTRICT out,
                         const Of& of) {
  const DF df;
  const hn::Rebind<T, DF> d8;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(of(hn::LoadU(d8, in + i)), df, out + i);
  if (i < n) hn::StoreN(of(hn::LoadN(d8, in + i, n - i)), df, out + i, n - i);
}

template <class T>
HWY_INLINE void IntegersToF32(const T* HWY_RESTRICT in, size_t n, float factor,
                              float* HWY_RESTRICT out) {
  const DF df;
  const DI di;
  const VF f = hn::Set(df, factor);
  MapBytes(in, n, out, [&](auto bytes) HWY_ATTR {
    return hn::Mul(hn::ConvertTo(df, hn::PromoteTo(di, bytes)), f);
  });
}

void Int8ToF32(const int8_t* in, size_t n, float factor, float* out) {
  IntegersToF32(in, n, factor, out);
}
void Uint8ToF32(const uint8_t* in, size_t n, float* out) { IntegersToF32(in, n, 1.0f, out); }

// Shifted by 20 bits, an e4m3 magnitude is an f32 whose exponent is too small by 120. Subnormals
// (below 8) are 2^-9 times an integer.
void E4M3ToF32(const uint8_t* HWY_RESTRICT in, size_t n, float* HWY_RESTRICT out) {
  const DF df;
  const DI di;
  MapBytes(in, n, out, [&](auto bytes) HWY_ATTR {
    const auto code = hn::PromoteTo(di, bytes);
    const auto magnitude = hn::And(code, hn::Set(di, 0x7f));
    const auto normal =
        hn::BitCast(df, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 120 << 23)));
    const VF small = hn::Mul(hn::ConvertTo(df, magnitude), hn::Set(df, 0x1p-9f));
    VF value = hn::IfThenElse(hn::RebindMask(df, hn::Lt(magnitude, hn::Set(di, 8))), small, normal);
    value = hn::IfThenElse(hn::RebindMask(df, hn::Eq(magnitude, hn::Set(di, 0x7f))), hn::NaN(df),
                           value);
    const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(di, 0x80)));
    return hn::Or(value, hn::BitCast(df, sign));
  });
}

// out[2 i] = table[low nibble of byte i], out[2 i + 1] = table[high nibble]; 16 entries.
void NibblesToInt8(const uint8_t* HWY_RESTRICT in, size_t n, const int8_t* HWY_RESTRICT table,
                   int8_t* HWY_RESTRICT out) {
  const hn::ScalableTag<int8_t> d8;
  const hn::RebindToUnsigned<decltype(d8)> du8;
  const size_t step = 2 * hn::Lanes(d8);
  const auto values = hn::LoadDup128(d8, table);
  const auto mask = hn::Set(du8, 15);
  size_t i = 0;
  for (; i + step <= n; i += step) {
    const auto bytes = hn::LoadU(du8, in + i / 2);
    const auto low = hn::TableLookupBytes(values, hn::And(bytes, mask));
    const auto high = hn::TableLookupBytes(values, hn::ShiftRight<4>(bytes));
    hn::StoreInterleaved2(hn::BitCast(d8, low), hn::BitCast(d8, high), d8, out + i);
  }
  for (; i < n; ++i) out[i] = table[i % 2 == 0 ? in[i / 2] & 15 : in[i / 2] >> 4];
}

// out[i] = (out[i] - zero) * scale
void ApplyScale(float* HWY_RESTRICT out, size_t n, float zero, float scale) {
  const DF df;
  const VF z = hn::Set(df, zero);
  const VF s = hn::Set(df, scale);
  const size_t lanes = hn::Lanes(df);
  const auto scaled = [&](VF v) HWY_ATTR { return hn::Mul(hn::Sub(v, z), s); };
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(scaled(hn::LoadU(df, out + i)), df, out + i);
  if (i < n) hn::StoreN(scaled(hn::LoadN(df, out + i, n - i)), df, out + i, n - i);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

HWY_EXPORT(Int8ToF32);
HWY_EXPORT(Uint8ToF32);
HWY_EXPORT(E4M3ToF32);
HWY_EXPORT(NibblesToInt8);
HWY_EXPORT(ApplyScale);

alignas(16) constexpr int8_t kInt4Values[16] = {0,  1,  2,  3,  4,  5,  6,  7,
                                                -8, -7, -6, -5, -4, -3, -2, -1};
alignas(16) constexpr int8_t kUint4Values[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                 8, 9, 10, 11, 12, 13, 14, 15};
// Twice the values of e2m1.
alignas(16) constexpr int8_t kE2M1Doubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                 0, -1, -2, -3, -4, -6, -8, -12};

void NibblesToF32(const void* q, size_t n, const int8_t* table, float factor, float* out) {
  constexpr size_t kChunk = 512;
  int8_t values[kChunk];
  for (size_t i = 0; i < n; i += kChunk) {
    const size_t count = std::min(kChunk, n - i);
    HWY_DYNAMIC_DISPATCH(NibblesToInt8)
    (static_cast<const uint8_t*>(q) + i / 2, count, table, values);
    HWY_DYNAMIC_DISPATCH(Int8ToF32)(values, count, factor, out + i);
  }
}

// Whole blocks, and the beginning of the last one, which is there as a whole.
void GgmlToF32(DType dtype, const void* q, size_t n, float* out) {
  const size_t block = DTypeBlock(dtype);
  const size_t whole = n / block * block;
  DecodeGgmlRow(dtype, q, whole, out);
  if (whole == n) return;
  float last[256];
  DecodeGgmlRow(dtype, static_cast<const uint8_t*>(q) + BytesOf(dtype, whole), block, last);
  std::copy_n(last, n - whole, out + whole);
}

void CodesToF32(DType dtype, const void* q, size_t n, float* out) {
  switch (dtype) {
    case DType::kI8:
      return HWY_DYNAMIC_DISPATCH(Int8ToF32)(static_cast<const int8_t*>(q), n, 1.0f, out);
    case DType::kU8:
      return HWY_DYNAMIC_DISPATCH(Uint8ToF32)(static_cast<const uint8_t*>(q), n, out);
    case DType::kF8E4M3:
      return HWY_DYNAMIC_DISPATCH(E4M3ToF32)(static_cast<const uint8_t*>(q), n, out);
    case DType::kI4: return NibblesToF32(q, n, kInt4Values, 1.0f, out);
    case DType::kU4: return NibblesToF32(q, n, kUint4Values, 1.0f, out);
    case DType::kF4E2M1: return NibblesToF32(q, n, kE2M1Doubled, 0.5f, out);
    default:
      return IsGgmlBlock(dtype) ? GgmlToF32(dtype, q, n, out) : ConvertToF32(q, dtype, n, out);
  }
}

// Of a row whose groups lie apart.
void ApplyColumnGroups(const CodeRow& row, float* out) noexcept {
  constexpr size_t kTable = 512;  // groups whose scales are widened once
  float zeros[kTable], scales[kTable];
  for (size_t first = 0; first < row.num_groups; first += kTable) {
    const size_t count = std::min(kTable, row.num_groups - first);
    for (size_t i = 0; i < count; ++i) {
      zeros[i] = row.zero == nullptr ? 0.0f : static_cast<float>(row.zero[first + i]);
      scales[i] = ScaleAt(row.scale_dtype, row.scale, first + i) * row.tensor_scale;
    }
    for (size_t k = 0; k < row.n; ++k) {
      const size_t group = static_cast<size_t>(row.column_group[k]) - first;
      if (group < count) out[k] = (out[k] - zeros[group]) * scales[group];
    }
  }
}

}  // namespace

void DecodeRow(const CodeRow& row, float* out) noexcept {
  CodesToF32(row.dtype, row.q, row.n, out);
  if (row.scale == nullptr && row.zero == nullptr) return;
  if (row.column_group != nullptr) return ApplyColumnGroups(row, out);
  for (size_t i = 0, at = 0; i < row.n; i += row.group, ++at) {
    const float zero = row.zero == nullptr ? 0.0f : static_cast<float>(row.zero[at]);
    const float scale =
        row.scale == nullptr ? 1.0f : ScaleAt(row.scale_dtype, row.scale, at) * row.tensor_scale;
    HWY_DYNAMIC_DISPATCH(ApplyScale)(out + i, std::min(row.group, row.n - i), zero, scale);
  }
}

void DecodeToInt8(DType dtype, const void* q, size_t n, int8_t* out) noexcept {
  if (dtype == DType::kI8) {
    if (n != 0) std::memcpy(out, q, n);
    return;
  }
  HWY_DYNAMIC_DISPATCH(NibblesToInt8)(static_cast<const uint8_t*>(q), n, kInt4Values, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
