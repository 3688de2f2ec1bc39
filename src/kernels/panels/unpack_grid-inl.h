// Super-blocks of grid.h to lines: see unpack-inl.h. Compiled once per instruction set.
//
// The entries of a codebook are found by lookups in registers where the CPU has those of AVX-512
// VBMI (GridLines), by scalar loads elsewhere and of large codebooks (GridWords).
#if defined(SWITCHYARD_KERNELS_PANELS_UNPACK_GRID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_PANELS_UNPACK_GRID_INL_H_
#undef SWITCHYARD_KERNELS_PANELS_UNPACK_GRID_INL_H_
#else
#define SWITCHYARD_KERNELS_PANELS_UNPACK_GRID_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kernels/panels/grid.h"
#include "kernels/panels/unpack-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Asks for memory ahead of its use: the parts of a super-block are more streams than the CPU
// follows of itself.
template <size_t kBytes>
HWY_INLINE void FetchAhead(const uint8_t* from) {
  constexpr size_t kDistance = size_t{8} << 10;
  for (size_t i = 0; i < kBytes; i += 64) hwy::Prefetch(from + kDistance + i);
}

// Bytes of value + bias as line i of a unit, of the type of the path.
template <PanelPath kPath>
HWY_INLINE void StoreBytesAsLine(VU32 words, const IntegerValues& values, size_t i, size_t row,
                                 uint32_t* HWY_RESTRICT lines) {
  if constexpr (kPath == PanelPath::kInt8) {
    StoreWord(words, lines, i, row);
  } else {
    StoreValues<kPath>(words, values, i, row, lines);
  }
}

// A digit after the other, from the top of what is left of every byte.
template <PanelPath kPath>
HWY_NOINLINE void UnpackTernary(const PanelFormat& format, const uint8_t* HWY_RESTRICT super,
                                size_t units, uint32_t* HWY_RESTRICT lines) {
  const DU32 du;
  const size_t lanes = hn::Lanes(du);
  const IntegerValues values{hn::Set(DF(), static_cast<float>(format.bias))};
  const VU32 low = hn::Set(du, 0x00ff00ffu);
  const auto thrice = [](VU32 v) HWY_ATTR { return hn::Add(hn::Add(v, v), v); };
  for (size_t u = 0; u < units; u += kSuperUnits) {
    for (size_t word = 0; word < kTernaryWords; ++word) {
      FetchAhead<kWordBytes>(super + word * kWordBytes);
      for (size_t row = 0; row < kPanelRows; row += lanes) {
        const VU32 bytes = LoadWord(super, word, row);
        VU32 even = hn::And(bytes, low);
        VU32 odd = hn::And(hn::ShiftRight<8>(bytes), low);
        for (size_t digit = 0; digit < TernaryDigits(word); ++digit) {
          even = thrice(even);
          odd = thrice(odd);
          const VU32 digits = hn::Or(hn::And(hn::ShiftRight<8>(even), low), hn::AndNot(low, odd));
          StoreBytesAsLine<kPath>(digits, values, TernaryLine(word, digit), row, lines);
          even = hn::And(even, low);
          odd = hn::And(odd, low);
        }
      }
    }
    super += kTernaryWords * kWordBytes;
    lines += kSuperUnits * WordsOfUnit(kPath) * kPanelRows;
  }
}

// One unit of a super-block of codebook indices.
template <PanelCodes kCodes>
class GridUnit {
 public:
  static constexpr GridLayout kGrid = GridOf(kCodes);
  static constexpr size_t kEntries = kGrid.entries();
  static constexpr size_t kWidth = kUnitCols / kEntries;
  static constexpr size_t kHighBits = kGrid.high_bits / kEntries;  // of an entry
  static constexpr uint32_t kHighMask = kCodes == PanelCodes::kIq1 ? 7u : (1u << kHighBits) - 1;

  GridUnit(const uint8_t* super, size_t unit)
      : indices_(super + unit * kGrid.index_words * kWordBytes),
        signs_(super + kGrid.signs_at() + unit * kWordBytes),
        highs_(super + kGrid.highs_at()),
        unit_(unit) {}

  const uint8_t* indices() const { return indices_; }
  const uint8_t* signs() const { return signs_; }
  HWY_INLINE VU32 HighBits(size_t row) const {
    if constexpr (kGrid.high_bits == 0) {
      return hn::Zero(DU32());
    } else if constexpr (kGrid.high_bits == 4) {
      const VU32 pair = LoadBytes(highs_ + unit_ / 2 * kPanelRows + row);
      return hn::ShiftRightSame(pair, static_cast<int>(unit_ % 2 * 4));
    } else if constexpr (kGrid.high_bits == 8) {
      return LoadBytes(highs_ + unit_ * kPanelRows + row);
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(highs_) + unit_ * kPanelRows + row;
      return hn::PromoteTo(DU32(), hn::LoadU(hn::Rebind<uint16_t, DF>(), halves));
    }
  }

 private:
  const uint8_t* HWY_RESTRICT indices_;
  const uint8_t* HWY_RESTRICT signs_;
  const uint8_t* HWY_RESTRICT highs_;
  size_t unit_;
};

#undef SY_PANEL_BOOKS
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define SY_PANEL_BOOKS 1
#else
#define SY_PANEL_BOOKS 0
#endif

#if SY_PANEL_BOOKS
// Entries of the codebooks that are searched this way: 1024 are faster so (IQ2_S, a row on one Zen
// 4 core: 16 G weights a second, 13 by loads), 2048 slower (IQ1: 11 and 15).
constexpr size_t kMaxBook = 1024;

// Codebooks in registers. An entry is 16 bits, codes of 2 bits (3 in IQ3) for each column; so 32 of
// them are found at once by lookups of 64 words, joined by the upper bits of the index. Then bytes
// are cut out of them at any bit, and a last lookup takes the code with its sign to the value.
template <PanelCodes kCodes>
class GridLines {
 public:
  GridLines(const GridUnit<kCodes>& unit, size_t row) : signs_(LoadWord(unit.signs(), 0, row)) {
    const VU32 high = unit.HighBits(row);
    SY_UNROLL
    for (size_t w = 0; w < kWords; ++w) {
      const VU32 bytes = LoadWord(unit.indices(), w, row);
      entries_[2 * w] = Find(hn::Or(Masked(bytes, 0x00ff00ffu), Highs<0>(high, w)));
      entries_[2 * w + 1] =
          Find(hn::Or(Masked(hn::ShiftRight<8>(bytes), 0x00ff00ffu), Highs<1>(high, w)));
    }
  }

  // Columns 4i .. 4i + 3.
  template <PanelPath kPath>
  HWY_INLINE void Store(const IntegerValues& values, size_t i, size_t row,
                        uint32_t* HWY_RESTRICT lines) const {
    const VU32 codes = SignedCodes(i);
#if SY_PANEL_LOOKUPS
    if constexpr (kPath == PanelPath::kBF16) {
      const ShortTable table = {hn::LoadU(DU16(), kShorts.data()), hn::Zero(DU16())};
      StoreWord(Lookup<PanelCodes::kBits5>(codes, table), lines, 2 * i, row);
      StoreWord(Lookup<PanelCodes::kBits5>(ShiftShorts8(codes), table), lines, 2 * i + 1, row);
      return;
    }
#endif
    const auto table = hn::LoadU(DU8(), kBytes.data());
    const VU32 bytes{_mm512_permutexvar_epi8(codes.raw, table.raw)};
    StoreBytesAsLine<kPath>(bytes, values, i, row, lines);
  }

 private:
  using Unit = GridUnit<kCodes>;
  static constexpr GridLayout kGrid = Unit::kGrid;
  static constexpr size_t kWords = kGrid.index_words;
  static constexpr size_t kWidth = Unit::kWidth;
  static constexpr size_t kCodeBits = kWidth == 8 ? 2 : 3;
  static constexpr uint32_t kSignBit = 1u << kCodeBits;
  static_assert(kGrid.has_signs);

  // In every byte a code, the sign above it, and above that any bits.
  HWY_INLINE VU32 SignedCodes(size_t i) const {
    const size_t entry = i * 4 / kWidth;
    const VU32 codes = Cut(entries_[entry / 4 * 2 + entry % 2], CodeBits(i));
    const VU32 signs = Cut(signs_, SignBits(i));
    return hn::BitwiseIfThenElse(hn::Set(DU32(), kSignBit * 0x01010101u), signs, codes);
  }

  // Byte b of each 8 from bit `bits[b]` on.
  static HWY_INLINE VU32 Cut(VU32 from, uint64_t bits) {
    const auto at = hn::Set(hn::Repartition<uint64_t, DF>(), bits);
    return VU32{_mm512_multishift_epi64_epi8(at.raw, from.raw)};
  }
  template <class Bit>
  static constexpr uint64_t BitsOfRows(const Bit& bit) {  // of two rows
    uint64_t bits = 0;
    for (size_t b = 0; b < 8; ++b) bits |= uint64_t{(b / 4 * 32 + bit(b % 4)) % 64} << (8 * b);
    return bits;
  }
  static constexpr uint64_t CodeBits(size_t i) {
    const size_t entry = i * 4 / kWidth;
    const size_t first = entry % 4 / 2 * 16 + (i * 4 % kWidth) * kCodeBits;
    return BitsOfRows([=](size_t b) { return first + b * kCodeBits; });
  }
  // So that the sign is bit kCodeBits of its byte.
  static constexpr uint64_t SignBits(size_t i) {
    return BitsOfRows([=](size_t b) { return 64 + 4 * i + b - kCodeBits; });
  }

  // What signed codes stand for, whatever the bits above them.
  static constexpr int ValueOf(size_t code) {
    const int value = GridValue(kCodes, code % kSignBit);
    return (code & kSignBit) == 0 ? value : -value;
  }
  static constexpr std::array<uint8_t, 64> Bytes() {
    std::array<uint8_t, 64> bytes{};
    for (size_t i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(kSignedBias + ValueOf(i));
    return bytes;
  }
  static constexpr std::array<uint16_t, 32> Shorts() {
    std::array<uint16_t, 32> shorts{};
    for (size_t i = 0; i < 32; ++i)
      shorts[i] = internal::BF16BitsOf(static_cast<float>(ValueOf(i)));
    return shorts;
  }
  alignas(64) static constexpr std::array<uint8_t, 64> kBytes = Bytes();
  alignas(64) static constexpr std::array<uint16_t, 32> kShorts = Shorts();

  // The high bits of entries kOdd and kOdd + 2 of index word w, in their places.
  template <size_t kOdd>
  static HWY_INLINE VU32 Highs(VU32 high, size_t w) {
    const DU32 du;
    if constexpr (kGrid.high_bits == 0) return hn::Zero(du);
    const auto part = [&](size_t half) HWY_ATTR {
      const size_t entry = 4 * w + kOdd + 2 * half;
      const size_t to = 16 * half + 8;
      const size_t from = Unit::kHighBits * entry;
      return Masked(hn::ShiftLeftSame(high, static_cast<int>(to - from)), Unit::kHighMask << to);
    };
    return hn::Or(part(0), part(1));
  }

  // Entries of 16-bit indices.
  static HWY_INLINE VU32 Find(VU32 indices) {
    const auto at = hn::BitCast(DU16(), indices);
    return hn::BitCast(DU32(), FindIn<0, GridEntries(kCodes) / 64>(at));
  }
  template <size_t kFirst, size_t kCount>
  static HWY_INLINE hn::Vec<DU16> FindIn(hn::Vec<DU16> indices) {
    const DU16 d;
    if constexpr (kCount == 1) {
      const uint16_t* book = GridCodes(kCodes) + kFirst * 64;
      const auto at = hn::IndicesFromVec(d, hn::And(indices, hn::Set(d, 63)));
      return hn::TwoTablesLookupLanes(d, hn::LoadU(d, book), hn::LoadU(d, book + 32), at);
    } else {
      const auto low = FindIn<kFirst, kCount / 2>(indices);
      const auto high = FindIn<kFirst + kCount / 2, kCount / 2>(indices);
      const auto is_high = hn::TestBit(indices, hn::Set(d, uint16_t{kCount / 2 * 64}));
      return hn::IfThenElse(is_high, high, low);
    }
  }

  VU32 entries_[2 * kWords];
  VU32 signs_;
};
#endif  // SY_PANEL_BOOKS

// Entries by scalar loads from tables in the first-level cache, turned, 4 rows at a time, into
// words of rows.
template <PanelCodes kCodes>
class GridWords {
 public:
  explicit GridWords(const GridUnit<kCodes>& unit) : unit_(unit) {
    if constexpr (kGrid.high_bits == 0) {
      LookUp([&](size_t entry, size_t row) HWY_ATTR -> size_t {
        return unit.indices()[entry / 4 * kWordBytes + 4 * row + entry % 4];
      });
    } else {
      HWY_ALIGN uint32_t indices[Unit::kEntries * kPanelRows];
      StoreIndices(indices);
      LookUp([&](size_t entry, size_t row)
                 HWY_ATTR -> size_t { return indices[entry * kPanelRows + row]; });
    }
  }

  // Bytes of columns 4i .. 4i + 3 with their signs, or deltas.
  HWY_INLINE VU32 At(size_t i, size_t row) const {
    const DU32 du;
    const DU8 d8;
    const VU32 bytes = hn::Load(du, words_ + i * kPanelRows + row);
    if constexpr (!kGrid.has_signs) {
      const auto is_minus = hn::TestBit(unit_.HighBits(row), hn::Set(du, 8u << (i / 2 * 4)));
      return hn::MaskedSubOr(bytes, is_minus, bytes, hn::Set(du, 0x02020202u));
    } else {
      const VU32 at = hn::Add(hn::BitCast(du, hn::LoadDup128(d8, kWordStarts)),
                              hn::Set(du, static_cast<uint32_t>(i / 2) * 0x01010101u));
      const auto signs = hn::TableLookupBytes(hn::BitCast(d8, LoadWord(unit_.signs(), 0, row)),
                                              hn::BitCast(d8, at));
      const auto bits = hn::BitCast(d8, hn::Set(du, i % 2 == 0 ? 0x08040201u : 0x80402010u));
      const auto v = hn::BitCast(d8, bytes);
      const auto negative = hn::Sub(hn::Set(d8, 2 * kSignedBias), v);
      return hn::BitCast(du, hn::IfThenElse(hn::TestBit(signs, bits), negative, v));
    }
  }

 private:
  using Unit = GridUnit<kCodes>;
  static constexpr GridLayout kGrid = Unit::kGrid;
  alignas(16) static constexpr uint8_t kWordStarts[16] = {0, 0, 0, 0, 4,  4,  4,  4,
                                                          8, 8, 8, 8, 12, 12, 12, 12};

  HWY_INLINE void StoreIndices(uint32_t* HWY_RESTRICT indices) const {
    for (size_t row = 0; row < kPanelRows; row += hn::Lanes(DU32())) {
      const VU32 high = unit_.HighBits(row);
      SY_UNROLL
      for (size_t entry = 0; entry < Unit::kEntries; ++entry) {
        const VU32 low = Masked(hn::ShiftRightSame(LoadWord(unit_.indices(), entry / 4, row),
                                                   static_cast<int>(entry % 4 * 8)),
                                0xff);
        const VU32 bits = Masked(
            hn::ShiftRightSame(high, static_cast<int>(entry * Unit::kHighBits)), Unit::kHighMask);
        StoreWord(hn::Or(low, hn::ShiftLeft<8>(bits)), indices, entry, row);
      }
    }
  }

  template <class Index>
  HWY_INLINE void LookUp(const Index& index) {
    constexpr const uint8_t* kBytes = GridBytesOf(kCodes);
    if constexpr (Unit::kWidth == 4) {
      for (size_t entry = 0; entry < 8; ++entry) {
        SY_UNROLL
        for (size_t row = 0; row < kPanelRows; ++row)
          std::memcpy(words_ + entry * kPanelRows + row, kBytes + index(entry, row) * 4, 4);
      }
    } else {
      const hn::Full128<uint64_t> d64;
      const hn::Full128<uint32_t> d32;
      const auto load = [&](size_t entry, size_t row) HWY_ATTR {
        uint64_t two[2];
        std::memcpy(&two[0], kBytes + index(entry, row) * 8, 8);
        std::memcpy(&two[1], kBytes + index(entry, row + 1) * 8, 8);
        return hn::BitCast(d32, hn::Dup128VecFromValues(d64, two[0], two[1]));
      };
      for (size_t entry = 0; entry < 4; ++entry) {
        SY_UNROLL
        for (size_t row = 0; row < kPanelRows; row += 4) {
          const auto a = load(entry, row);
          const auto b = load(entry, row + 2);
          uint32_t* HWY_RESTRICT to = words_ + 2 * entry * kPanelRows + row;
          hn::Store(hn::ConcatEven(d32, b, a), d32, to);
          hn::Store(hn::ConcatOdd(d32, b, a), d32, to + kPanelRows);
        }
      }
    }
  }

  const Unit& unit_;
  HWY_ALIGN uint32_t words_[8 * kPanelRows];
};

template <PanelCodes kCodes, PanelPath kPath>
HWY_NOINLINE void UnpackGrid(const PanelFormat& format, const uint8_t* HWY_RESTRICT super,
                             size_t units, uint32_t* HWY_RESTRICT lines) {
  const size_t lanes = hn::Lanes(DU32());
  const IntegerValues values{hn::Set(DF(), static_cast<float>(format.bias))};
  constexpr size_t kUnitBytes = GridOf(kCodes).super_bytes() / kSuperUnits;
  const uint8_t* unit_at = super;
  for (size_t u = 0; u < units; ++u) {
    const GridUnit<kCodes> unit(super + u / kSuperUnits * GridOf(kCodes).super_bytes(),
                                u % kSuperUnits);
    FetchAhead<kUnitBytes>(unit_at);
    unit_at += kUnitBytes;
#if SY_PANEL_BOOKS
    if constexpr (GridEntries(kCodes) <= kMaxBook) {
      for (size_t row = 0; row < kPanelRows; row += lanes) {
        const GridLines<kCodes> words(unit, row);
        SY_UNROLL
        for (size_t i = 0; i < 8; ++i) words.template Store<kPath>(values, i, row, lines);
      }
      lines += WordsOfUnit(kPath) * kPanelRows;
      continue;
    }
#endif
    const GridWords<kCodes> words(unit);
    for (size_t row = 0; row < kPanelRows; row += lanes) {
      SY_UNROLL
      for (size_t i = 0; i < 8; ++i)
        StoreBytesAsLine<kPath>(words.At(i, row), values, i, row, lines);
    }
    lines += WordsOfUnit(kPath) * kPanelRows;
  }
}

// Whole super-blocks, or what UnpackCodes unpacks.
template <PanelPath kPath>
HWY_INLINE void UnpackAnyCodes(const PanelFormat& format, const uint8_t* unit, size_t units,
                               uint32_t* lines) {
  using C = PanelCodes;
  switch (format.codes) {
    case C::kTernary: return UnpackTernary<kPath>(format, unit, units, lines);
    case C::kIq1: return UnpackGrid<C::kIq1, kPath>(format, unit, units, lines);
    case C::kIq2Xxs: return UnpackGrid<C::kIq2Xxs, kPath>(format, unit, units, lines);
    case C::kIq2Xs: return UnpackGrid<C::kIq2Xs, kPath>(format, unit, units, lines);
    case C::kIq2S: return UnpackGrid<C::kIq2S, kPath>(format, unit, units, lines);
    case C::kIq3Xxs: return UnpackGrid<C::kIq3Xxs, kPath>(format, unit, units, lines);
    case C::kIq3S: return UnpackGrid<C::kIq3S, kPath>(format, unit, units, lines);
    default: return UnpackCodes<kPath>(format, unit, units, lines);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
