// Blocks of 32 rows into the super-blocks of grid.h, as pack_blocks-inl.h does for words.
#if defined(SWITCHYARD_KERNELS_PACK_GRID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_PACK_GRID_INL_H_
#undef SWITCHYARD_KERNELS_PACK_GRID_INL_H_
#else
#define SWITCHYARD_KERNELS_PACK_GRID_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <hwy/highway.h>

#include "kernels/panels/grid.h"
#include "kernels/panels/pack_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// The parts of a super-block.
template <PanelCodes kCodes>
struct GridOut {
  static constexpr GridLayout kGrid = GridOf(kCodes);
  explicit GridOut(const BlockOut& out) : base(out.units) {}
  // Of the first unit.
  uint32_t* indices() const { return base; }
  uint32_t* signs() const { return base + kGrid.signs_at() / sizeof(uint32_t); }
  uint8_t* highs() const { return reinterpret_cast<uint8_t*>(base) + kGrid.highs_at(); }
  uint32_t* base;
};

// 4 x 7 bits, each to a byte whose top bit makes the number of set ones even.
HWY_INLINE uint32_t WholeSigns(uint32_t x) {
  const uint32_t sevens =
      (x & 0x7fu) | (x << 1 & 0x7f00u) | (x << 2 & 0x7f0000u) | (x << 3 & 0x7f000000u);
  uint32_t parity = sevens ^ (sevens >> 4 & 0x0f0f0f0fu);
  parity ^= parity >> 2 & 0x3f3f3f3fu;
  parity ^= parity >> 1;
  return sevens | (parity & 0x01010101u) << 7;
}

// Words of 4 x 7 signs and a scale of 4 bits for each unit.
HWY_INLINE void StoreSignsAndScales(const Word* HWY_RESTRICT q, size_t step, Words signs,
                                    Field scales) {
  for (size_t unit = 0; unit < kSuperUnits; ++unit) {
    const uint32_t* HWY_RESTRICT word = q[unit * step].row;
    for (size_t r = 0; r < kPanelRows; ++r) signs[unit * kPanelRows + r] = WholeSigns(word[r]);
  }
  for (size_t pair = 0; pair < kSuperUnits / 2; ++pair) {
    const uint32_t* HWY_RESTRICT even = q[2 * pair * step].row;
    const uint32_t* HWY_RESTRICT odd = q[(2 * pair + 1) * step].row;
    for (size_t r = 0; r < kPanelRows; ++r)
      scales[pair * kPanelRows + r] = static_cast<uint8_t>(even[r] >> 28 | odd[r] >> 28 << 4);
  }
}

HWY_INLINE void PackIq2Xxs(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq2Xxs> grid(out);
  Word q[16];
  LoadWords<16>(rows, 2, q);
  for (size_t unit = 0; unit < kSuperUnits; ++unit)
    StoreWords<1>(q + 2 * unit, grid.indices() + unit * kPanelRows);
  StoreSignsAndScales(q + 1, 2, grid.signs(), out.scale);
  CopyField<2>(rows, 0, out.d);
}

// The same bits of 4 halves in 2 words, side by side as bytes.
HWY_INLINE uint32_t OfHalves(uint32_t first, uint32_t second, int shift, uint32_t mask) {
  first = first >> shift & (mask | mask << 16);
  second = second >> shift & (mask | mask << 16);
  return (first & mask) | first >> 16 << 8 | (second & mask) << 16 | second >> 16 << 24;
}

HWY_INLINE void PackIq2Xs(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq2Xs> grid(out);
  Word q[18];
  LoadWords<18>(rows, 2, q);
  for (size_t unit = 0; unit < kSuperUnits; ++unit) {
    const Word* HWY_RESTRICT halves = q + 2 * unit;
    uint32_t* HWY_RESTRICT indices = grid.indices() + unit * kPanelRows;
    uint32_t* HWY_RESTRICT signs = grid.signs() + unit * kPanelRows;
    uint8_t* HWY_RESTRICT highs = grid.highs() + unit / 2 * kPanelRows;
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t first = halves[0].row[r];
      const uint32_t second = halves[1].row[r];
      indices[r] = OfHalves(first, second, 0, 0xff);
      const uint32_t sevens = OfHalves(first, second, 9, 0x7f);
      signs[r] = WholeSigns((sevens & 0x7fu) | (sevens & 0x7f00u) >> 1 | (sevens & 0x7f0000u) >> 2 |
                            (sevens & 0x7f000000u) >> 3);
      const uint32_t bits = OfHalves(first, second, 8, 1);
      const uint32_t nibble = (bits | bits >> 7 | bits >> 14 | bits >> 21) & 15;
      const uint32_t below = unit % 2 == 0 ? 0 : highs[r];
      highs[r] = static_cast<uint8_t>(below | nibble << (unit % 2 * 4));
    }
  }
  for (size_t i = 0; i < 2; ++i) StoreBytes(q[16 + i], out.scale + i * 4 * kPanelRows);
  CopyField<2>(rows, 0, out.d);
}

HWY_INLINE void PackIq2S(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq2S> grid(out);
  Word q[20];
  LoadWords<20>(rows, 2, q);
  StoreWords<8>(q, grid.indices());
  StoreWords<8>(q + 8, grid.signs());
  for (size_t i = 0; i < 2; ++i) {
    StoreBytes(q[16 + i], grid.highs() + i * 4 * kPanelRows);
    StoreBytes(q[18 + i], out.scale + i * 4 * kPanelRows);
  }
  CopyField<2>(rows, 0, out.d);
}

HWY_INLINE void PackIq3Xxs(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq3Xxs> grid(out);
  Word q[24];
  LoadWords<24>(rows, 2, q);
  StoreWords<16>(q, grid.indices());
  StoreSignsAndScales(q + 16, 1, grid.signs(), out.scale);
  CopyField<2>(rows, 0, out.d);
}

HWY_INLINE void PackIq3S(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq3S> grid(out);
  Word q[27];
  LoadWords<27>(rows, 2, q);
  StoreWords<16>(q, grid.indices());
  for (size_t i = 0; i < 2; ++i) StoreBytes(q[16 + i], grid.highs() + i * 4 * kPanelRows);
  StoreWords<8>(q + 18, grid.signs());
  StoreBytes(q[26], out.scale);
  CopyField<2>(rows, 0, out.d);
}

// Halves of one unit each, two in a word.
HWY_INLINE void StoreHighHalves(const Word& word, size_t pair, uint8_t* highs) {
  for (size_t half = 0; half < 2; ++half) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const auto bits = static_cast<uint16_t>(word.row[r] >> (16 * half));
      std::memcpy(highs + ((2 * pair + half) * kPanelRows + r) * sizeof(bits), &bits, sizeof(bits));
    }
  }
}

HWY_INLINE void PackIq1S(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq1> grid(out);
  Word q[12];
  LoadWords<12>(rows, 2, q);
  StoreWords<8>(q, grid.indices());
  for (size_t pair = 0; pair < kSuperUnits / 2; ++pair) {
    Word nibbles;
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t x = q[8 + pair].row[r];
      const uint32_t minus = (x >> 15 & 0x00010001u) * 0x8888u;
      nibbles.row[r] = (x & 0x00070007u) | (x & 0x00380038u) << 1 | (x & 0x01c001c0u) << 2 |
                       (x & 0x0e000e00u) << 3 | minus;
      out.scale[pair * kPanelRows + r] = static_cast<uint8_t>((x >> 12 & 7u) | (x >> 28 & 7u) << 4);
    }
    StoreHighHalves(nibbles, pair, grid.highs());
  }
  CopyField<2>(rows, 0, out.d);
}

HWY_INLINE void PackIq1M(RowBytes rows, const BlockOut& out) {
  const GridOut<PanelCodes::kIq1> grid(out);
  Word q[14];
  LoadWords<14>(rows, 0, q);
  StoreWords<8>(q, grid.indices());
  for (size_t pair = 0; pair < kSuperUnits / 2; ++pair)
    StoreHighHalves(q[8 + pair], pair, grid.highs());
  for (size_t unit = 0; unit < kSuperUnits; ++unit) {
    const Word& scales = q[12 + unit / 4];
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t x = scales.row[r] >> (unit / 2 % 2 * 16 + unit % 2 * 6);
      out.scale[unit * kPanelRows + r] = static_cast<uint8_t>((x & 7u) | (x & 0x38u) << 1);
    }
  }
  for (size_t r = 0; r < kPanelRows; ++r) {
    const uint32_t low = q[12].row[r];
    const uint32_t high = q[13].row[r];
    const auto d = static_cast<uint16_t>((low >> 12 & 15u) | (low >> 28) << 4 |
                                         (high >> 12 & 15u) << 8 | (high >> 28) << 12);
    std::memcpy(out.d + r * sizeof(d), &d, sizeof(d));
  }
}

HWY_INLINE void PackTq10(RowBytes rows, const BlockOut& out) {
  Word q[kTernaryWords];
  LoadWords<kTernaryWords>(rows, 0, q);
  StoreWords<kTernaryWords>(q, out.units);
  CopyField<2>(rows, 52, out.scale);
}

HWY_INLINE void PackTq20(RowBytes rows, const BlockOut& out) {
  Word q[16];
  LoadWords<16>(rows, 0, q);
  for (size_t unit = 0; unit < kSuperUnits; ++unit)
    StorePairs(q + unit / 4 * 8, static_cast<int>(unit % 4 * 2), WordAt(out, unit * 2));
  CopyField<2>(rows, 64, out.scale);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
