// How one block of each of ggml's types becomes f32. Plain loops of constant length, which the
// compiler vectorises; compiled once per instruction set. `b` is a block, `y` its elements.
// Source: gguf/quants.py of the gguf package, whose order of operations is kept.
#if defined(SWITCHYARD_KERNELS_GGML_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_GGML_BLOCKS_INL_H_
#undef SWITCHYARD_KERNELS_GGML_BLOCKS_INL_H_
#else
#define SWITCHYARD_KERNELS_GGML_BLOCKS_INL_H_
#endif

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <hwy/highway.h>

#include "kernels/ggml/grids.h"
#include "kernels/load-inl.h"
#include "switchyard/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

using Bytes = const uint8_t* HWY_RESTRICT;
using Floats = float* HWY_RESTRICT;

HWY_INLINE uint32_t U16At(Bytes b) { return b[0] | static_cast<uint32_t>(b[1]) << 8; }
HWY_INLINE uint32_t U32At(Bytes b) { return U16At(b) | U16At(b + 2) << 16; }
HWY_INLINE float HalfOf(uint32_t bits) { return ToFloat(F16{static_cast<uint16_t>(bits)}); }
HWY_INLINE float HalfAt(Bytes b) { return HalfOf(U16At(b)); }
// Nibble i, the low one of a byte first.
HWY_INLINE uint32_t NibbleAt(Bytes b, size_t i) { return (b[i / 2] >> (4 * (i % 2))) & 15u; }
HWY_INLINE float AsFloat(int value) { return static_cast<float>(value); }

// Q4_0: f16 d; 16 bytes, low nibbles are the first 16 elements. d * (q - 8).
HWY_INLINE void BlockQ40(Bytes b, Floats y) {
  const float d = HalfAt(b);
  Bytes q = b + 2;
  for (size_t j = 0; j < 16; ++j) y[j] = d * AsFloat((q[j] & 15) - 8);
  for (size_t j = 0; j < 16; ++j) y[16 + j] = d * AsFloat((q[j] >> 4) - 8);
}

// Q4_1: f16 d, f16 m; nibbles as Q4_0. d * q + m.
HWY_INLINE void BlockQ41(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const float m = HalfAt(b + 2);
  Bytes q = b + 4;
  for (size_t j = 0; j < 16; ++j) y[j] = d * AsFloat(q[j] & 15) + m;
  for (size_t j = 0; j < 16; ++j) y[16 + j] = d * AsFloat(q[j] >> 4) + m;
}

// Code j of Q5_0 or Q5_1: 4 bits of its byte from `shift` on, bit j of `high` above them.
HWY_INLINE int Code5(uint32_t q, int shift, uint32_t high, uint32_t j) {
  return static_cast<int>((q >> shift) & 15u) | static_cast<int>((high >> j) & 1u) << 4;
}

// Q5_0: f16 d; u32 of the high bits; nibbles. d * (q - 16).
HWY_INLINE void BlockQ50(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const uint32_t high = U32At(b + 2);
  Bytes q = b + 6;
  for (uint32_t j = 0; j < 16; ++j) y[j] = d * AsFloat(Code5(q[j], 0, high, j) - 16);
  for (uint32_t j = 0; j < 16; ++j) y[16 + j] = d * AsFloat(Code5(q[j], 4, high >> 16, j) - 16);
}

// Q5_1: f16 d, f16 m; u32 of the high bits; nibbles. d * q + m.
HWY_INLINE void BlockQ51(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const float m = HalfAt(b + 2);
  const uint32_t high = U32At(b + 4);
  Bytes q = b + 8;
  for (uint32_t j = 0; j < 16; ++j) y[j] = d * AsFloat(Code5(q[j], 0, high, j)) + m;
  for (uint32_t j = 0; j < 16; ++j) y[16 + j] = d * AsFloat(Code5(q[j], 4, high >> 16, j)) + m;
}

// Q8_0: f16 d; 32 x i8. d * q.
HWY_INLINE void BlockQ80(Bytes b, Floats y) {
  const float d = HalfAt(b);
  Bytes q = b + 2;
  for (size_t j = 0; j < 32; ++j) y[j] = AsFloat(static_cast<int8_t>(q[j])) * d;
}

// Q2_K: 16 bytes (scale, min) of 16 elements each; 64 bytes of 2-bit codes; f16 d, f16 dmin.
// (d * scale) * q - dmin * min. Codes of all K types: each 32 bytes hold the bits of several runs
// of 32 elements, the first run in the lowest bits.
HWY_INLINE void BlockQ2K(Bytes b, Floats y) {
  const float d = HalfAt(b + 80);
  const float dmin = HalfAt(b + 82);
  for (size_t sub = 0; sub < 16; ++sub) {
    const float scale = d * AsFloat(b[sub] & 15);
    const float min = dmin * AsFloat(b[sub] >> 4);
    Bytes q = b + 16 + sub / 8 * 32 + sub % 2 * 16;
    const auto shift = static_cast<int>(sub / 2 % 4 * 2);
    for (size_t j = 0; j < 16; ++j) y[sub * 16 + j] = scale * AsFloat((q[j] >> shift) & 3) - min;
  }
}

// Q3_K: 32 bytes, bit i of byte l is the high bit of element 32 i + l; 64 bytes of 2-bit codes; 16
// 6-bit scales in 12 bytes; f16 d. (d * (scale - 32)) * (q - 4).
HWY_INLINE void BlockQ3K(Bytes b, Floats y) {
  const float d = HalfAt(b + 108);
  Bytes scales = b + 96;
  for (size_t sub = 0; sub < 16; ++sub) {
    const int low = (scales[sub % 8] >> (sub / 8 * 4)) & 15;
    const int high = (scales[8 + sub % 4] >> (sub / 4 * 2)) & 3;
    const float scale = d * AsFloat((low | high << 4) - 32);
    Bytes q = b + 32 + sub / 8 * 32 + sub % 2 * 16;
    Bytes mask = b + sub % 2 * 16;
    const auto shift = static_cast<int>(sub / 2 % 4 * 2);
    const auto bit = static_cast<int>(sub / 2);
    for (size_t j = 0; j < 16; ++j) {
      const int code = ((q[j] >> shift) & 3) | ((mask[j] >> bit) & 1) << 2;
      y[sub * 16 + j] = scale * AsFloat(code - 4);
    }
  }
}

// Scale and min of run i of 32 elements of Q4_K and Q5_K: 8 + 8 numbers of 6 bits in 12 bytes. The
// first four are whole bytes but for the top bits, which belong to the last four.
HWY_INLINE void ScaleMinAt(Bytes s, size_t i, float d, float dmin, float& scale, float& min) {
  const size_t k = i % 4;
  const int scale_code = i < 4 ? s[k] & 63 : (s[8 + k] & 15) | ((s[k] >> 2) & 48);
  const int min_code = i < 4 ? s[4 + k] & 63 : (s[8 + k] >> 4) | ((s[4 + k] >> 2) & 48);
  scale = d * AsFloat(scale_code);
  min = dmin * AsFloat(min_code);
}

// Q4_K: f16 d, f16 dmin; 12 bytes of scales and mins; 128 bytes. (d * scale) * q - dmin * min.
HWY_INLINE void BlockQ4K(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const float dmin = HalfAt(b + 2);
  for (size_t sub = 0; sub < 8; ++sub) {
    float scale;
    float min;
    ScaleMinAt(b + 4, sub, d, dmin, scale, min);
    Bytes q = b + 16 + sub / 2 * 32;
    const auto shift = static_cast<int>(sub % 2 * 4);
    for (size_t j = 0; j < 32; ++j) y[sub * 32 + j] = scale * AsFloat((q[j] >> shift) & 15) - min;
  }
}

// Q5_K: as Q4_K, with 32 bytes of high bits (bit i of byte l: element 32 i + l) before the nibbles.
HWY_INLINE void BlockQ5K(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const float dmin = HalfAt(b + 2);
  Bytes high = b + 16;
  for (size_t sub = 0; sub < 8; ++sub) {
    float scale;
    float min;
    ScaleMinAt(b + 4, sub, d, dmin, scale, min);
    Bytes q = b + 48 + sub / 2 * 32;
    const auto shift = static_cast<int>(sub % 2 * 4);
    const auto bit = static_cast<int>(sub);
    for (size_t j = 0; j < 32; ++j) {
      const int code = ((q[j] >> shift) & 15) | ((high[j] >> bit) & 1) << 4;
      y[sub * 32 + j] = scale * AsFloat(code) - min;
    }
  }
}

// Q6_K: 128 bytes of nibbles, in runs of 64; 64 bytes of 2-bit high parts, in runs of 32; 16 x i8
// scales of 16 elements each; f16 d. (d * scale) * (q - 32).
HWY_INLINE void BlockQ6K(Bytes b, Floats y) {
  const float d = HalfAt(b + 208);
  for (size_t sub = 0; sub < 16; ++sub) {
    const float scale = d * AsFloat(static_cast<int8_t>(b[192 + sub]));
    const size_t half = sub / 8;
    Bytes low = b + half * 64 + sub % 4 * 16;
    Bytes high = b + 128 + half * 32 + sub % 2 * 16;
    const auto low_shift = static_cast<int>(sub / 4 % 2 * 4);
    const auto high_shift = static_cast<int>(sub / 2 % 4 * 2);
    for (size_t j = 0; j < 16; ++j) {
      const int code = ((low[j] >> low_shift) & 15) | ((high[j] >> high_shift) & 3) << 4;
      y[sub * 16 + j] = scale * AsFloat(code - 32);
    }
  }
}

// 16 elements: d * value.
HWY_INLINE void Scaled16(const int8_t* HWY_RESTRICT values, float d, Floats y) {
  const hn::CappedTag<float, 16> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<int8_t, decltype(df)> d8;
  for (size_t j = 0; j < 16; j += hn::Lanes(df)) {
    const auto value = hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d8, values + j)));
    hn::StoreU(hn::Mul(hn::Set(df, d), value), df, y + j);
  }
}

// 32 elements: d * table[q], first the low nibbles of 16 bytes, then the high ones. Each half has
// its own array: a load across two stores would wait for both to reach the cache.
HWY_INLINE void ScaledLookUp(Bytes q, const int8_t* HWY_RESTRICT table, float d, Floats y) {
  const hn::Full128<int8_t> d8;
  const hn::Full128<uint8_t> du8;
  const auto entries = hn::LoadU(d8, table);
  const auto bytes = hn::LoadU(du8, q);
  const auto low = hn::TableLookupBytes(entries, hn::And(bytes, hn::Set(du8, 15)));
  const auto high = hn::TableLookupBytes(entries, hn::ShiftRight<4>(bytes));
  int8_t low_values[16];
  int8_t high_values[16];
  hn::StoreU(hn::BitCast(d8, low), d8, low_values);
  hn::StoreU(hn::BitCast(d8, high), d8, high_values);
  Scaled16(low_values, d, y);
  Scaled16(high_values, d, y + 16);
}

// IQ4_NL: f16 d; nibbles as Q4_0, indices of a table. d * table[q].
HWY_INLINE void BlockIq4Nl(Bytes b, Floats y) {
  ScaledLookUp(b + 2, ggml::kIq4Values, HalfAt(b), y);
}

// IQ4_XS: f16 d; u16 of the high 2 bits and 4 bytes of the low 4 bits of 8 scales; 8 x 16 bytes, as
// IQ4_NL. (d * (scale - 32)) * table[q].
HWY_INLINE void BlockIq4Xs(Bytes b, Floats y) {
  const float d = HalfAt(b);
  const uint32_t high = U16At(b + 2);
  for (size_t sub = 0; sub < 8; ++sub) {
    const uint32_t code = NibbleAt(b + 4, sub) | ((high >> (2 * sub)) & 3u) << 4;
    const float scale = d * AsFloat(static_cast<int>(code) - 32);
    ScaledLookUp(b + 8 + sub * 16, ggml::kIq4Values, scale, y + sub * 32);
  }
}

// MXFP4: one byte, the exponent e; nibbles as Q4_0, codes of e2m1. 2^(e - 127) * value, as half the
// power times twice the value; e = 255 is no NaN here but 2^128.
HWY_INLINE void BlockMxFp4(Bytes b, Floats y) {
  const uint32_t bits = b[0] < 2 ? 0x00200000u << b[0] : (b[0] - 1u) << 23;
  ScaledLookUp(b + 1, ggml::kE2M1Doubled, std::bit_cast<float>(bits), y);
}

// The value of a ternary digit: the top digit of a byte that holds a fraction of base 3, times d.
HWY_INLINE void Trits(Bytes q, size_t n, uint32_t power, float d, Floats y) {
  for (size_t j = 0; j < n; ++j) {
    const uint32_t shifted = (q[j] * power) & 255u;
    y[j] = d * AsFloat(static_cast<int>(shifted * 3 >> 8) - 1);
  }
}

// TQ1_0: 48 + 4 bytes of 5 and 4 ternary digits; f16 d. d * (digit - 1).
HWY_INLINE void BlockTq10(Bytes b, Floats y) {
  const float d = HalfAt(b + 52);
  constexpr uint32_t kPowers[5] = {1, 3, 9, 27, 81};
  for (size_t i = 0; i < 5; ++i) Trits(b, 32, kPowers[i], d, y + i * 32);
  for (size_t i = 0; i < 5; ++i) Trits(b + 32, 16, kPowers[i], d, y + 160 + i * 16);
  for (size_t i = 0; i < 4; ++i) Trits(b + 48, 4, kPowers[i], d, y + 240 + i * 4);
}

// TQ2_0: 64 bytes of 2-bit codes; f16 d. d * (q - 1).
HWY_INLINE void BlockTq20(Bytes b, Floats y) {
  const float d = HalfAt(b + 64);
  for (size_t run = 0; run < 8; ++run) {
    Bytes q = b + run / 4 * 32;
    const auto shift = static_cast<int>(run % 4 * 2);
    for (size_t j = 0; j < 32; ++j) y[run * 32 + j] = d * AsFloat(((q[j] >> shift) & 3) - 1);
  }
}

// Entry `code` of a codebook.
template <size_t kWidth, size_t kSize>
HWY_INLINE const int8_t* Entry(const std::array<int8_t, kSize>& grid, size_t code) {
  return grid.data() + code * kWidth;
}

// kWidth elements: scale * value, negated where bit j of `signs` is set.
template <size_t kWidth>
HWY_INLINE void Signed(float scale, const int8_t* HWY_RESTRICT values, uint32_t signs, Floats y) {
  for (uint32_t j = 0; j < kWidth; ++j) {
    const int sign = 1 - 2 * static_cast<int>((signs >> j) & 1u);
    y[j] = scale * AsFloat(values[j] * sign);
  }
}

// The eighth sign makes the number of minus signs even.
HWY_INLINE uint32_t SignsOf7(uint32_t bits) {
  bits &= 127u;
  return bits | (static_cast<uint32_t>(std::popcount(bits)) & 1u) << 7;
}

// IQ2_XXS: f16 d; per 32 elements 4 bytes, codes of 8 elements each, and a u32: 4 x 7 sign bits and
// a scale. (d * (0.5 + scale) * 0.25) * value.
HWY_INLINE void BlockIq2Xxs(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t sub = 0; sub < 8; ++sub) {
    Bytes q = b + 2 + sub * 8;
    const uint32_t word = U32At(q + 4);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
    for (size_t i = 0; i < 4; ++i) {
      Signed<8>(scale, Entry<8>(ggml::kIq2XxsGrid, q[i]), SignsOf7(word >> (7 * i)),
                y + sub * 32 + i * 8);
    }
  }
}

// IQ2_XS: f16 d; 32 x u16, a 9-bit code of 8 elements and 7 signs; 16 scales of 4 bits.
HWY_INLINE void BlockIq2Xs(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t code = U16At(b + 2 + i * 2);
    const float scale = d * (0.5f + static_cast<float>(NibbleAt(b + 66, i / 2))) * 0.25f;
    Signed<8>(scale, Entry<8>(ggml::kIq2XsGrid, code & 511u), SignsOf7(code >> 9), y + i * 8);
  }
}

// IQ2_S: f16 d; 32 bytes, codes of 8 elements; 32 bytes of signs; 8 bytes, 2 more bits of each
// code; 16 scales of 4 bits.
HWY_INLINE void BlockIq2S(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t high = (static_cast<uint32_t>(b[66 + i / 4]) >> (i % 4 * 2)) & 3u;
    const float scale = d * (0.5f + static_cast<float>(NibbleAt(b + 74, i / 2))) * 0.25f;
    Signed<8>(scale, Entry<8>(ggml::kIq2SGrid, b[2 + i] | high << 8), b[34 + i], y + i * 8);
  }
}

// IQ3_XXS: f16 d; 64 bytes, codes of 4 elements; 8 x u32, 4 x 7 signs and a scale.
// (d * (0.5 + scale) * 0.5) * value.
HWY_INLINE void BlockIq3Xxs(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t sub = 0; sub < 8; ++sub) {
    const uint32_t word = U32At(b + 66 + sub * 4);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t signs = SignsOf7(word >> (7 * (i / 2))) >> (i % 2 * 4);
      Signed<4>(scale, Entry<4>(ggml::kIq3XxsGrid, b[2 + sub * 8 + i]), signs,
                y + sub * 32 + i * 4);
    }
  }
}

// IQ3_S: f16 d; 64 bytes, codes of 4 elements; 8 bytes, a ninth bit of each code; 32 bytes of
// signs; 8 scales of 4 bits. (d * (1 + 2 scale)) * value.
HWY_INLINE void BlockIq3S(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t high = (static_cast<uint32_t>(b[66 + i / 8]) >> (i % 8)) & 1u;
    const float scale = d * static_cast<float>(1 + 2 * NibbleAt(b + 106, i / 8));
    const uint32_t signs = static_cast<uint32_t>(b[74 + i / 2]) >> (i % 2 * 4);
    Signed<4>(scale, Entry<4>(ggml::kIq3SGrid, b[2 + i] | high << 8), signs, y + i * 4);
  }
}

// 8 elements of IQ1: scale * (value + delta).
HWY_INLINE void Shifted(float scale, uint32_t code, bool minus, Floats y) {
  const int8_t* HWY_RESTRICT values = Entry<8>(ggml::kIq1Grid, code);
  const float delta = minus ? -0.125f : 0.125f;
  for (size_t j = 0; j < 8; ++j) y[j] = scale * (AsFloat(values[j]) + delta);
}

// IQ1_S: f16 d; 32 bytes, codes of 8 elements; 8 x u16: 4 x 3 more bits of the codes, a scale of 3
// bits and the sign of the delta. d * (2 scale + 1).
HWY_INLINE void BlockIq1S(Bytes b, Floats y) {
  const float d = HalfAt(b);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t word = U16At(b + 34 + i / 4 * 2);
    const float scale = d * static_cast<float>(2 * ((word >> 12) & 7u) + 1);
    const uint32_t code = b[2 + i] | ((word >> (i % 4 * 3)) & 7u) << 8;
    Shifted(scale, code, (word & 0x8000u) != 0, y + i * 8);
  }
}

// IQ1_M: 32 bytes, codes of 8 elements; 32 nibbles: 3 more bits of the code and the sign of the
// delta; 4 x u16: 4 x 3 bits of scales, each for 16 elements, and 4 bits of the f16 d.
HWY_INLINE void BlockIq1M(Bytes b, Floats y) {
  Bytes scales = b + 48;
  uint32_t d_bits = 0;
  for (size_t i = 0; i < 4; ++i) d_bits |= (U16At(scales + i * 2) >> 12) << (4 * i);
  const float d = HalfOf(d_bits);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t nibble = NibbleAt(b + 32, i);
    const uint32_t scale_code = (U16At(scales + i / 8 * 2) >> (i / 2 % 4 * 3)) & 7u;
    const float scale = d * static_cast<float>(2 * scale_code + 1);
    Shifted(scale, b[i] | (nibble & 7u) << 8, (nibble & 8u) != 0, y + i * 8);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
