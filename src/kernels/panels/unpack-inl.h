// Blocks of panels to the lines that products read: one word of 32 rows each, of the type that the
// arithmetic takes. Compiled once per instruction set.
//
//   kInt8   word i of a unit: u8 codes (value + bias) of columns 4i .. 4i + 3       8 lines a unit
//   kBF16   words 2i, 2i + 1: pairs of values {4i, 4i + 2}, {4i + 1, 4i + 3}       16 lines
//   kF32    words 4i .. 4i + 3: one value each                                     32 lines
#if defined(SWITCHYARD_KERNELS_PANELS_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_PANELS_UNPACK_INL_H_
#undef SWITCHYARD_KERNELS_PANELS_UNPACK_INL_H_
#else
#define SWITCHYARD_KERNELS_PANELS_UNPACK_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <hwy/highway.h>

#include "kernels/load-inl.h"
#include "kernels/panels/panel.h"
#include "kernels/panels/rows.h"
#include "kernels/panels/values.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

using DU32 = hn::RebindToUnsigned<DF>;
using DI32 = hn::RebindToSigned<DF>;
using DU16 = hn::Repartition<uint16_t, DF>;
using DU8 = hn::Repartition<uint8_t, DF>;
using VU32 = hn::Vec<DU32>;

HWY_INLINE VU32 LoadWord(const uint8_t* unit, size_t word, size_t row) {
  return hn::LoadU(DU32(), reinterpret_cast<const uint32_t*>(unit + word * kWordBytes) + row);
}
HWY_INLINE VU32 Masked(VU32 v, uint32_t mask) { return hn::And(v, hn::Set(DU32(), mask)); }

// The codes of columns 4i .. 4i + 3 of a unit, one in each byte, of rows `row` and following.
template <PanelCodes kCodes>
HWY_INLINE VU32 CodesAt(const uint8_t* unit, size_t i, size_t row) {
  if constexpr (kCodes == PanelCodes::kBytes) {
    return LoadWord(unit, i, row);
  } else if constexpr (kCodes == PanelCodes::kBits2 || kCodes == PanelCodes::kBits3) {
    const VU32 two = LoadWord(unit, i / 4, row);
    const VU32 low = Masked(hn::ShiftRightSame(two, static_cast<int>(2 * (i % 4))), 0x03030303u);
    if constexpr (kCodes == PanelCodes::kBits2) return low;
    const VU32 high = hn::ShiftRightSame(LoadWord(unit, 2, row), static_cast<int>(i));
    return hn::Or(low, hn::ShiftLeft<2>(Masked(high, 0x01010101u)));
  } else {
    const VU32 four = LoadWord(unit, i % 4, row);
    const VU32 low = Masked(i < 4 ? four : hn::ShiftRight<4>(four), 0x0f0f0f0fu);
    if constexpr (kCodes == PanelCodes::kBits5) {
      const VU32 high = hn::ShiftRightSame(LoadWord(unit, 4, row), static_cast<int>(i));
      return hn::Or(low, hn::ShiftLeft<4>(Masked(high, 0x01010101u)));
    } else if constexpr (kCodes == PanelCodes::kBits6) {
      const VU32 high =
          hn::ShiftRightSame(LoadWord(unit, 4 + i / 4, row), static_cast<int>(2 * (i % 4)));
      return hn::Or(low, hn::ShiftLeft<4>(Masked(high, 0x03030303u)));
    } else {
      return low;
    }
  }
}

// Codes to unsigned bytes, value + bias.
template <bool kHasTable>
HWY_INLINE VU32 BytesOfCodes(VU32 codes, hn::Vec<DU8> table) {
  if constexpr (!kHasTable) return codes;
  return hn::BitCast(DU32(), hn::TableLookupBytes(table, hn::BitCast(DU8(), codes)));
}

// Byte b of each word.
template <int kByte>
HWY_INLINE VU32 ByteOf(VU32 words) {
  if constexpr (kByte == 0) {
    return Masked(words, 0xff);
  } else {
    return Masked(hn::ShiftRight<8 * kByte>(words), 0xff);
  }
}

HWY_INLINE VF E4M3Value(VU32 code) {
  const DF df;
  const DU32 du;
  const VU32 magnitude = Masked(code, 0x7f);
  // The bits of e4m3, moved to those of f32, lack 120 in the exponent; subnormals too.
  VF value = hn::Mul(hn::BitCast(df, hn::ShiftLeft<20>(magnitude)), hn::Set(df, 0x1p120f));
  value =
      hn::IfThenElse(hn::RebindMask(df, hn::Eq(magnitude, hn::Set(du, 0x7f))), hn::NaN(df), value);
  return hn::Or(value, hn::BitCast(df, hn::ShiftLeft<24>(Masked(code, 0x80))));
}

HWY_INLINE VF F16Value(VU32 bits) {
  const DF df;
  const VU32 magnitude = Masked(bits, 0x7fff);
  VF value = hn::Mul(hn::BitCast(df, hn::ShiftLeft<13>(magnitude)), hn::Set(df, 0x1p112f));
  const auto is_special =
      hn::RebindMask(df, hn::Gt(magnitude, hn::Set(DU32(), 0x7bff)));  // infinity, NaN
  const VF special =
      hn::BitCast(df, hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(DU32(), 0x7f800000u)));
  value = hn::IfThenElse(is_special, special, value);
  return hn::Or(value, hn::BitCast(df, hn::ShiftLeft<16>(Masked(bits, 0x8000))));
}

// Values of 8-bit words: Of<b>(word) is the value of byte b.
struct IntegerValues {
  VF bias;
  template <int kByte>
  HWY_INLINE VF Of(VU32 words) const {
    const DF df;
    return hn::Sub(hn::ConvertTo(df, hn::BitCast(DI32(), ByteOf<kByte>(words))), bias);
  }
};
struct E4M3Values {
  template <int kByte>
  HWY_INLINE VF Of(VU32 words) const {
    return E4M3Value(ByteOf<kByte>(words));
  }
};

HWY_INLINE void StoreWord(VU32 v, uint32_t* HWY_RESTRICT lines, size_t line, size_t row) {
  hn::StoreU(v, DU32(), lines + line * kPanelRows + row);
}
HWY_INLINE void StoreWord(VF v, uint32_t* HWY_RESTRICT lines, size_t line, size_t row) {
  StoreWord(hn::BitCast(DU32(), v), lines, line, row);
}

// Values that bf16 holds exactly, as a pair.
HWY_INLINE VU32 Pair(VF low, VF high) {
  const DU32 du;
  return hn::Or(hn::ShiftRight<16>(hn::BitCast(du, low)),
                Masked(hn::BitCast(du, high), 0xffff0000u));
}

template <PanelPath kPath, class Values>
HWY_INLINE void StoreValues(VU32 words, const Values& values, size_t i, size_t row,
                            uint32_t* HWY_RESTRICT lines) {
  const VF v0 = values.template Of<0>(words);
  const VF v1 = values.template Of<1>(words);
  const VF v2 = values.template Of<2>(words);
  const VF v3 = values.template Of<3>(words);
  if constexpr (kPath == PanelPath::kF32) {
    StoreWord(v0, lines, 4 * i, row);
    StoreWord(v1, lines, 4 * i + 1, row);
    StoreWord(v2, lines, 4 * i + 2, row);
    StoreWord(v3, lines, 4 * i + 3, row);
  } else {
    StoreWord(Pair(v0, v2), lines, 2 * i, row);
    StoreWord(Pair(v1, v3), lines, 2 * i + 1, row);
  }
}

#undef SY_PANEL_LOOKUPS
#if HWY_NATIVE_DOT_BF16 && HWY_MAX_BYTES == 64
#define SY_PANEL_LOOKUPS 1
#else
#define SY_PANEL_LOOKUPS 0
#endif

#if SY_PANEL_LOOKUPS
// bf16 of 16-bit lanes whose low bits are a code: one lookup in a register, without unpacking.
struct ShortTable {
  hn::Vec<DU16> first, second;  // codes 0 .. 31, 32 .. 63
};
HWY_INLINE ShortTable LoadShortTable(const uint16_t* table) {
  const DU16 d;
  return {hn::LoadU(d, table), hn::LoadU(d, table + 32)};
}
template <PanelCodes kCodes>
HWY_INLINE VU32 Lookup(VU32 words, const ShortTable& table) {
  const DU16 d;
  const auto codes = hn::BitCast(d, words);
  if constexpr (kCodes == PanelCodes::kBits6) {
    const auto at = hn::IndicesFromVec(d, hn::And(codes, hn::Set(d, 63)));
    return hn::BitCast(DU32(), hn::TwoTablesLookupLanes(d, table.first, table.second, at));
  } else {
    const auto at = hn::IndicesFromVec(d, hn::And(codes, hn::Set(d, 31)));
    return hn::BitCast(DU32(), hn::TableLookupLanes(table.first, at));
  }
}
HWY_INLINE VU32 ShiftShorts8(VU32 words) {
  return hn::BitCast(DU32(), hn::ShiftRight<8>(hn::BitCast(DU16(), words)));
}

// e4m3 magnitudes 0 .. 127 as bf16.
struct E4M3Table {
  hn::Vec<DU16> part[4];
};
HWY_INLINE E4M3Table LoadE4M3Table() {
  const DU16 d;
  E4M3Table table;
  for (size_t i = 0; i < 4; ++i) table.part[i] = hn::LoadU(d, kE4M3AsBF16.data() + 32 * i);
  return table;
}
// Of the low bytes of 16-bit lanes.
HWY_INLINE VU32 LookupE4M3(VU32 words, const E4M3Table& table) {
  const DU16 d;
  const auto codes = hn::BitCast(d, words);
  const auto at = hn::IndicesFromVec(d, hn::And(codes, hn::Set(d, 63)));
  const auto low = hn::TwoTablesLookupLanes(d, table.part[0], table.part[1], at);
  const auto high = hn::TwoTablesLookupLanes(d, table.part[2], table.part[3], at);
  const auto is_high = hn::TestBit(codes, hn::Set(d, 64));
  const auto sign = hn::And(hn::ShiftLeft<8>(codes), hn::Set(d, 0x8000));
  return hn::BitCast(DU32(), hn::Or(hn::IfThenElse(is_high, high, low), sign));
}
#endif

// Lines of a unit that stays packed: see StoredLines in multiply.cc.
template <PanelCodes kCodes, PanelPath kPath, bool kHasTable>
struct PackedLines;

template <PanelCodes kCodes, bool kHasTable>
struct PackedLines<kCodes, PanelPath::kInt8, kHasTable> {
  static constexpr bool kIsPacked = true;
  static constexpr size_t kWords = 8;
  static constexpr size_t kUnitBytes = kWordBytes * UnitWords(kCodes);
  explicit PackedLines(const PanelFormat& format)
      : table(hn::LoadDup128(DU8(), BytesTable(format))) {}
  HWY_INLINE VU32 At(const uint8_t* unit, size_t i, size_t row) const {
    return BytesOfCodes<kHasTable>(CodesAt<kCodes>(unit, i, row), table);
  }
  hn::Vec<DU8> table;
};

#if SY_PANEL_LOOKUPS
template <PanelCodes kCodes, bool kHasTable>
struct PackedLines<kCodes, PanelPath::kBF16, kHasTable> {
  static constexpr bool kIsPacked = true;
  static constexpr size_t kWords = 16;
  static constexpr size_t kUnitBytes = kWordBytes * UnitWords(kCodes);
  explicit PackedLines(const PanelFormat& format) : table(LoadShortTable(ShortValues(format))) {}
  HWY_INLINE VU32 At(const uint8_t* unit, size_t i, size_t row) const {
    const VU32 codes = CodesAt<kCodes>(unit, i / 2, row);
    return Lookup<kCodes>(i % 2 == 0 ? codes : ShiftShorts8(codes), table);
  }
  ShortTable table;
};
struct PackedE4M3 {
  static constexpr bool kIsPacked = true;
  static constexpr size_t kWords = 16;
  static constexpr size_t kUnitBytes = kWordBytes * 8;
  explicit PackedE4M3(const PanelFormat&) : table(LoadE4M3Table()) {}
  HWY_INLINE VU32 At(const uint8_t* unit, size_t i, size_t row) const {
    const VU32 codes = LoadWord(unit, i / 2, row);
    return LookupE4M3(i % 2 == 0 ? codes : ShiftShorts8(codes), table);
  }
  E4M3Table table;
};
#endif

// All words of a unit. `format` says what the template does not.
template <PanelCodes kCodes, PanelPath kPath, bool kHasTable>
HWY_INLINE void UnpackUnits(const PanelFormat& format, const uint8_t* HWY_RESTRICT unit,
                            size_t units, uint32_t* HWY_RESTRICT lines) {
  constexpr size_t kLines = kPath == PanelPath::kInt8 ? 8 : kPath == PanelPath::kBF16 ? 16 : 32;
  constexpr size_t kUnitBytes = kWordBytes * UnitWords(kCodes);
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const auto bytes = hn::LoadDup128(DU8(), BytesTable(format));
  const IntegerValues values{hn::Set(df, static_cast<float>(ByteBias(format)))};
#if SY_PANEL_LOOKUPS
  constexpr bool kLooksUp = kPath == PanelPath::kBF16 && kCodes != PanelCodes::kBytes;
  ShortTable table;
  if constexpr (kLooksUp) table = LoadShortTable(ShortValues(format));
#endif
  for (size_t u = 0; u < units; ++u, unit += kUnitBytes, lines += kLines * kPanelRows) {
    for (size_t row = 0; row < kPanelRows; row += lanes) {
      SY_UNROLL
      for (size_t i = 0; i < 8; ++i) {
        const VU32 codes = CodesAt<kCodes>(unit, i, row);
#if SY_PANEL_LOOKUPS
        if constexpr (kLooksUp) {
          StoreWord(Lookup<kCodes>(codes, table), lines, 2 * i, row);
          StoreWord(Lookup<kCodes>(ShiftShorts8(codes), table), lines, 2 * i + 1, row);
          continue;
        }
#endif
        const VU32 words = BytesOfCodes<kHasTable>(codes, bytes);
        if constexpr (kPath == PanelPath::kInt8) {
          StoreWord(words, lines, i, row);
        } else {
          StoreValues<kPath>(words, values, i, row, lines);
        }
      }
    }
  }
}

template <PanelPath kPath>
HWY_INLINE void UnpackE4M3(const uint8_t* HWY_RESTRICT unit, size_t units,
                           uint32_t* HWY_RESTRICT lines) {
  constexpr size_t kLines = kPath == PanelPath::kBF16 ? 16 : 32;
  const size_t lanes = hn::Lanes(DF());
#if SY_PANEL_LOOKUPS
  const E4M3Table table = LoadE4M3Table();
#endif
  for (size_t u = 0; u < units; ++u, unit += 8 * kWordBytes, lines += kLines * kPanelRows) {
    for (size_t row = 0; row < kPanelRows; row += lanes) {
      for (size_t i = 0; i < 8; ++i) {
        const VU32 words = LoadWord(unit, i, row);
#if SY_PANEL_LOOKUPS
        if constexpr (kPath == PanelPath::kBF16) {
          StoreWord(LookupE4M3(words, table), lines, 2 * i, row);
          StoreWord(LookupE4M3(ShiftShorts8(words), table), lines, 2 * i + 1, row);
          continue;
        }
#endif
        StoreValues<kPath>(words, E4M3Values(), i, row, lines);
      }
    }
  }
}

// 16-bit codes to f32.
template <PanelCodes kCodes>
HWY_INLINE void UnpackHalves(const uint8_t* HWY_RESTRICT unit, size_t units,
                             uint32_t* HWY_RESTRICT lines) {
  const DF df;
  const auto low = [&](VU32 words) HWY_ATTR {
    if constexpr (kCodes == PanelCodes::kBF16) return hn::BitCast(df, hn::ShiftLeft<16>(words));
    return F16Value(Masked(words, 0xffff));
  };
  const auto high = [&](VU32 words) HWY_ATTR {
    if constexpr (kCodes == PanelCodes::kBF16) return hn::BitCast(df, Masked(words, 0xffff0000u));
    return F16Value(hn::ShiftRight<16>(words));
  };
  const size_t lanes = hn::Lanes(df);
  for (size_t u = 0; u < units; ++u, unit += 16 * kWordBytes, lines += 32 * kPanelRows) {
    for (size_t row = 0; row < kPanelRows; row += lanes) {
      for (size_t i = 0; i < 8; ++i) {
        const VU32 even = LoadWord(unit, 2 * i, row);
        const VU32 odd = LoadWord(unit, 2 * i + 1, row);
        StoreWord(low(even), lines, 4 * i, row);
        StoreWord(low(odd), lines, 4 * i + 1, row);
        StoreWord(high(even), lines, 4 * i + 2, row);
        StoreWord(high(odd), lines, 4 * i + 3, row);
      }
    }
  }
}

HWY_INLINE void UnpackFloats(PanelCodes codes, const uint8_t* unit, size_t units, uint32_t* lines) {
  if (codes == PanelCodes::kBF16) return UnpackHalves<PanelCodes::kBF16>(unit, units, lines);
  UnpackHalves<PanelCodes::kF16>(unit, units, lines);
}

template <PanelPath kPath>
HWY_INLINE void UnpackCodes(const PanelFormat& format, const uint8_t* unit, size_t units,
                            uint32_t* lines) {
  switch (format.codes) {
    case PanelCodes::kBits2:
      return UnpackUnits<PanelCodes::kBits2, kPath, false>(format, unit, units, lines);
    case PanelCodes::kBits3:
      return UnpackUnits<PanelCodes::kBits3, kPath, false>(format, unit, units, lines);
    case PanelCodes::kBits4:
      if (format.values == PanelValues::kLinear)
        return UnpackUnits<PanelCodes::kBits4, kPath, false>(format, unit, units, lines);
      return UnpackUnits<PanelCodes::kBits4, kPath, true>(format, unit, units, lines);
    case PanelCodes::kBits5:
      return UnpackUnits<PanelCodes::kBits5, kPath, false>(format, unit, units, lines);
    case PanelCodes::kBits6:
      return UnpackUnits<PanelCodes::kBits6, kPath, false>(format, unit, units, lines);
    case PanelCodes::kBytes:
      return UnpackUnits<PanelCodes::kBytes, kPath, false>(format, unit, units, lines);
    case PanelCodes::kE4M3:
      if constexpr (kPath != PanelPath::kInt8) UnpackE4M3<kPath>(unit, units, lines);
      return;
    case PanelCodes::kBF16:
    case PanelCodes::kF16:
      if constexpr (kPath == PanelPath::kF32) UnpackFloats(format.codes, unit, units, lines);
      return;
    default: return;  // f32 is lines already
  }
}

// Scales of groups, and what is added: f32 [groups][32] each.
struct GroupScales {
  float* HWY_RESTRICT scales;
  float* HWY_RESTRICT offsets;  // not written without PanelOffsets
};

HWY_INLINE VU32 LoadBytes(const uint8_t* p) {
  return hn::PromoteTo(DU32(), hn::LoadU(hn::Rebind<uint8_t, DF>(), p));
}
HWY_INLINE VF BytesF32(const uint8_t* p) {
  return hn::ConvertTo(DF(), hn::BitCast(DI32(), LoadBytes(p)));
}
HWY_INLINE VF SignedBytesF32(const uint8_t* p) {
  const auto bytes = hn::LoadU(hn::Rebind<int8_t, DF>(), reinterpret_cast<const int8_t*>(p));
  return hn::ConvertTo(DF(), hn::PromoteTo(DI32(), bytes));
}
HWY_INLINE VF LoadE8M0(const uint8_t* p) {
  const DF df;
  const DU32 du;
  const VU32 code = LoadBytes(p);
  VU32 bits = hn::ShiftLeft<23>(code);
  bits = hn::IfThenElse(hn::Eq(code, hn::Zero(du)), hn::Set(du, 0x00400000u), bits);
  bits = hn::IfThenElse(hn::Eq(code, hn::Set(du, 255)), hn::Set(du, 0x7fc00000u), bits);
  return hn::BitCast(df, bits);
}
HWY_INLINE VF LoadF16(const uint8_t* p) {
  return LoadF32(DF(), reinterpret_cast<const hwy::float16_t*>(p));
}

// Scales of rows `row` and following of one super-block, or of all groups.
template <PanelScales kScales>
struct ScaleReader {
  HWY_INLINE ScaleReader(const PanelLayout& layout, const uint8_t* HWY_RESTRICT slice, size_t super,
                         size_t row, float tensor)
      : field(slice + layout.scales.at), d(hn::Set(DF(), tensor)) {
    if constexpr (IsSuper(kScales))
      d = LoadF16(slice + layout.d.at + 2 * (super * kPanelRows + row));
  }
  // Number `at` of the field.
  HWY_INLINE VF At(size_t at) const {
    const DF df;
    if constexpr (kScales == PanelScales::kF16) return LoadF16(field + 2 * at);
    if constexpr (kScales == PanelScales::kBF16)
      return LoadF32(df, reinterpret_cast<const hwy::bfloat16_t*>(field + 2 * at));
    if constexpr (kScales == PanelScales::kF32)
      return LoadF32(df, reinterpret_cast<const float*>(field + 4 * at));
    if constexpr (kScales == PanelScales::kE8M0) return LoadE8M0(field + at);
    if constexpr (kScales == PanelScales::kE4M3)
      return hn::Mul(E4M3Value(LoadBytes(field + at)), d);
    if constexpr (kScales == PanelScales::kSuperU8) return hn::Mul(BytesF32(field + at), d);
    if constexpr (kScales == PanelScales::kSuperI8) return hn::Mul(SignedBytesF32(field + at), d);
    return hn::Mul(hn::ConvertTo(df, hn::BitCast(DI32(), Masked(LoadBytes(field + at), 15))), d);
  }
  const uint8_t* HWY_RESTRICT field;
  VF d;
};

template <PanelScales kScales, PanelOffsets kOffsets>
HWY_INLINE void ReadScales(const PanelFormat& format, const PanelLayout& layout,
                           const uint8_t* HWY_RESTRICT slice, float tensor, size_t groups,
                           const GroupScales& out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF factor = hn::Set(df, TableFactor(format));
  const uint8_t* HWY_RESTRICT offsets = slice + layout.offsets.at;
  const size_t step = IsSuper(kScales) ? kSuperCols / format.group : groups;
  for (size_t g = 0; g < groups; g += step) {
    const size_t super = g / step;
    for (size_t row = 0; row < kPanelRows; row += lanes) {
      const ScaleReader<kScales> reader(layout, slice, super, row, tensor);
      VF dmin = reader.d;
      if constexpr (kOffsets == PanelOffsets::kSuperMin)
        dmin = hn::Neg(LoadF16(slice + layout.dmin.at + 2 * (super * kPanelRows + row)));
      for (size_t i = g; i < g + step; ++i) {
        const size_t at = i * kPanelRows + row;
        const VF scale = reader.At(at);
        hn::StoreU(hn::Mul(scale, factor), df, out.scales + i * kPanelRows + row);
        VF offset;
        if constexpr (kOffsets == PanelOffsets::kNone) {
          continue;
        } else if constexpr (kOffsets == PanelOffsets::kF16) {
          offset = LoadF16(offsets + 2 * at);
        } else if constexpr (kOffsets == PanelOffsets::kZero) {
          offset = hn::Neg(hn::Mul(BytesF32(offsets + at), scale));
        } else if constexpr (kScales == PanelScales::kSuperU4) {
          const VU32 mins = hn::ShiftRight<4>(LoadBytes(offsets + at));
          offset = hn::Mul(hn::ConvertTo(df, hn::BitCast(DI32(), mins)), dmin);
        } else {
          offset = hn::Mul(BytesF32(offsets + at), dmin);
        }
        hn::StoreU(offset, df, out.offsets + i * kPanelRows + row);
      }
    }
  }
}

// kSuperOdd: whole super-blocks.
HWY_INLINE void OddScales(const PanelFormat& format, const PanelLayout& layout,
                          const uint8_t* HWY_RESTRICT slice, size_t groups,
                          float* HWY_RESTRICT scales) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF factor = hn::Set(df, TableFactor(format));
  const size_t step = kSuperCols / format.group;
  const uint8_t* HWY_RESTRICT field = slice + layout.scales.at;
  for (size_t row = 0; row < kPanelRows; row += lanes) {
    VF d = hn::Zero(df);
    for (size_t g = 0; g < groups; g += 2) {
      const size_t super = g / step;
      if (g % step == 0)
        d = hn::Mul(LoadF16(slice + layout.d.at + 2 * (super * kPanelRows + row)), factor);
      const VU32 pair = LoadBytes(field + g / 2 * kPanelRows + row);
      const auto scale = [&](VU32 doubled) HWY_ATTR {
        const VU32 odd = hn::Or(Masked(doubled, 30), hn::Set(DU32(), 1));
        return hn::Mul(hn::ConvertTo(df, hn::BitCast(DI32(), odd)), d);
      };
      hn::StoreU(scale(hn::ShiftLeft<1>(pair)), df, scales + g * kPanelRows + row);
      hn::StoreU(scale(hn::ShiftRight<3>(pair)), df, scales + (g + 1) * kPanelRows + row);
    }
  }
}

template <PanelScales kScales>
HWY_INLINE void FieldScales(const PanelFormat& format, const PanelLayout& layout,
                            const uint8_t* slice, float tensor, size_t groups,
                            const GroupScales& out) {
  using O = PanelOffsets;
  switch (format.offsets) {
    case O::kNone: return ReadScales<kScales, O::kNone>(format, layout, slice, tensor, groups, out);
    case O::kF16: return ReadScales<kScales, O::kF16>(format, layout, slice, tensor, groups, out);
    case O::kZero: return ReadScales<kScales, O::kZero>(format, layout, slice, tensor, groups, out);
    case O::kSuperMin: SY_CHECK(false && "mins without a super-block");
  }
}

// Those of kRow and kGrid, for all 32 rows.
HWY_INLINE void HeaderScales(const PanelFormat& format, const uint8_t* panel, size_t groups,
                             float* HWY_RESTRICT scales) {
  const auto* values = reinterpret_cast<const float*>(panel);
  const float factor = TableFactor(format);
  for (size_t g = 0; g < groups; ++g, scales += kPanelRows) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const size_t at = format.scales == PanelScales::kGrid ? g : r;
      scales[r] = format.scales == PanelScales::kNone ? 1.0f : values[at] * factor;
    }
  }
}

// Those of the first `groups` groups of a slice.
HWY_INLINE void UnpackScales(const PanelFormat& format, const PanelLayout& layout,
                             const uint8_t* panel, const uint8_t* slice, size_t groups,
                             const GroupScales& out) {
  using S = PanelScales;
  using O = PanelOffsets;
  float tensor = 1.0f;
  if (format.scales == S::kE4M3) std::memcpy(&tensor, panel, sizeof(tensor));
  switch (format.scales) {
    case S::kF16: return FieldScales<S::kF16>(format, layout, slice, tensor, groups, out);
    case S::kBF16: return FieldScales<S::kBF16>(format, layout, slice, tensor, groups, out);
    case S::kF32: return FieldScales<S::kF32>(format, layout, slice, tensor, groups, out);
    case S::kE8M0: return FieldScales<S::kE8M0>(format, layout, slice, tensor, groups, out);
    case S::kE4M3: return FieldScales<S::kE4M3>(format, layout, slice, tensor, groups, out);
    case S::kSuperU8:
      return ReadScales<S::kSuperU8, O::kSuperMin>(format, layout, slice, tensor, groups, out);
    case S::kSuperI8:
      return ReadScales<S::kSuperI8, O::kNone>(format, layout, slice, tensor, groups, out);
    case S::kSuperU4:
      return ReadScales<S::kSuperU4, O::kSuperMin>(format, layout, slice, tensor, groups, out);
    case S::kSuperOdd: return OddScales(format, layout, slice, groups, out.scales);
    case S::kNone:
    case S::kRow:
    case S::kGrid: return HeaderScales(format, panel, groups, out.scales);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
