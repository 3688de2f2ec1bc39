// Blocks of 32 rows into the words of panel.h. First the rows are transposed, 4 bytes at a time, so
// that all that follows is the same plain arithmetic on u32 in every row: loops of constant length
// that the compiler vectorises. Compiled once per instruction set. Where the parts of ggml's blocks
// lie is told in kernels/ggml/blocks-inl.h.
#if defined(SWITCHYARD_KERNELS_PACK_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_PACK_BLOCKS_INL_H_
#undef SWITCHYARD_KERNELS_PACK_BLOCKS_INL_H_
#else
#define SWITCHYARD_KERNELS_PACK_BLOCKS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <hwy/highway.h>

#include "kernels/panels/panel.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Bytes of each of the 32 rows.
using RowBytes = const uint8_t* const*;
using Words = uint32_t* HWY_RESTRICT;  // of a unit: [word][row]
using Field = uint8_t* HWY_RESTRICT;   // [group][row], of 1 or 2 bytes

// The same 4 bytes of every row.
struct alignas(64) Word {
  uint32_t row[kPanelRows];
};

// Where the parts of a block go.
struct BlockOut {
  uint32_t* units;
  uint8_t* scale;
  uint8_t* offset;
  uint8_t* d;
  uint8_t* dmin;
};

// words[i] = bytes at + 4i .. of every row.
template <size_t kCount>
HWY_INLINE void LoadWords(RowBytes rows, size_t at, Word* HWY_RESTRICT words) {
  const hn::Full128<uint32_t> d;
  const hn::Full128<uint64_t> d64;
  constexpr size_t kSquares = kCount / 4 * 4;
  for (size_t r = 0; r < kPanelRows; r += 4) {
    const auto load = [&](size_t row, size_t i) HWY_ATTR {
      return hn::BitCast(
          d, hn::LoadU(hn::Full128<uint8_t>(), rows[r + row] + at + i * sizeof(uint32_t)));
    };
    const auto store = [&](auto v, size_t i)
                           HWY_ATTR { hn::Store(hn::BitCast(d, v), d, words[i].row + r); };
    for (size_t i = 0; i < kSquares; i += 4) {
      const auto a = load(0, i), b = load(1, i), c = load(2, i), e = load(3, i);
      const auto ab_low = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
      const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
      const auto ce_low = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
      const auto ce_high = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
      store(hn::InterleaveLower(d64, ab_low, ce_low), i);
      store(hn::InterleaveUpper(d64, ab_low, ce_low), i + 1);
      store(hn::InterleaveLower(d64, ab_high, ce_high), i + 2);
      store(hn::InterleaveUpper(d64, ab_high, ce_high), i + 3);
    }
    for (size_t i = kSquares; i < kCount; ++i) {
      for (size_t j = 0; j < 4; ++j)
        std::memcpy(words[i].row + r + j, rows[r + j] + at + i * sizeof(uint32_t), 4);
    }
  }
}

// One number of each row.
template <size_t kBytes>
HWY_INLINE void CopyField(RowBytes rows, size_t at, Field field) {
  for (size_t r = 0; r < kPanelRows; ++r) std::memcpy(field + r * kBytes, rows[r] + at, kBytes);
}

// The bytes of a word, as fields of 4 groups.
HWY_INLINE void StoreBytes(const Word& word, Field field) {
  for (size_t b = 0; b < 4; ++b) {
    for (size_t r = 0; r < kPanelRows; ++r)
      field[b * kPanelRows + r] = static_cast<uint8_t>(word.row[r] >> (8 * b));
  }
}

template <size_t kCount>
HWY_INLINE void StoreWords(const Word* HWY_RESTRICT words, Words out) {
  std::memcpy(out, words, kCount * sizeof(Word));
}

// Of 32 codes, 8 words that each hold 4 of them in the bits from `shift` on.

// Words of the low 4 bits.
HWY_INLINE void StoreNibbles(const Word* HWY_RESTRICT q, int shift, Words out) {
  for (size_t j = 0; j < 4; ++j) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t low = (q[j].row[r] >> shift) & 0x0f0f0f0fu;
      const uint32_t high = (q[j + 4].row[r] >> shift) & 0x0f0f0f0fu;
      out[j * kPanelRows + r] = low | high << 4;
    }
  }
}

// Two words of 2 bits.
HWY_INLINE void StorePairs(const Word* HWY_RESTRICT q, int shift, Words out) {
  for (size_t h = 0; h < 2; ++h) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      uint32_t word = 0;
      for (size_t i = 0; i < 4; ++i)
        word |= ((q[4 * h + i].row[r] >> shift) & 0x03030303u) << (2 * i);
      out[h * kPanelRows + r] = word;
    }
  }
}

// A word of 1 bit.
HWY_INLINE void StoreBits(const Word* HWY_RESTRICT q, int shift, Words out) {
  for (size_t r = 0; r < kPanelRows; ++r) {
    uint32_t word = 0;
    for (size_t i = 0; i < 8; ++i) word |= ((q[i].row[r] >> shift) & 0x01010101u) << i;
    out[r] = word;
  }
}

// Exchanges the bits of `mask` with those `shift` above them.
HWY_INLINE uint32_t SwapBits(uint32_t x, uint32_t mask, int shift) {
  const uint32_t different = ((x >> shift) ^ x) & mask;
  return x ^ different ^ (different << shift);
}

// Bit 4i + b to bit 8b + i: the digits of the bit's index, from i2 i1 i0 b1 b0 to b1 b0 i2 i1 i0.
HWY_INLINE uint32_t BitsByBytes(uint32_t x) {
  x = SwapBits(x, 0x0000ccccu, 14);
  x = SwapBits(x, 0x00aa00aau, 7);
  x = SwapBits(x, 0x0c0c0c0cu, 2);
  return SwapBits(x, 0x22222222u, 1);
}

// 16 bytes whose low nibbles are the first 16 codes and the high ones the last: words of panel.h as
// they are.
HWY_INLINE void CopyNibbles(RowBytes rows, size_t at, Words out) {
  Word q[4];
  LoadWords<4>(rows, at, q);
  StoreWords<4>(q, out);
}

// The fifth bits of Q5_0 and Q5_1.
HWY_INLINE void CopyHighBits(RowBytes rows, size_t at, Words out) {
  Word high;
  LoadWords<1>(rows, at, &high);
  for (size_t r = 0; r < kPanelRows; ++r) out[r] = BitsByBytes(high.row[r]);
}

HWY_INLINE uint32_t* WordAt(const BlockOut& out, size_t i) { return out.units + i * kPanelRows; }

HWY_INLINE void PackQ40(RowBytes rows, const BlockOut& out) {
  CopyNibbles(rows, 2, out.units);
  CopyField<2>(rows, 0, out.scale);
}

HWY_INLINE void PackQ41(RowBytes rows, const BlockOut& out) {
  CopyNibbles(rows, 4, out.units);
  CopyField<2>(rows, 0, out.scale);
  CopyField<2>(rows, 2, out.offset);
}

HWY_INLINE void PackQ50(RowBytes rows, const BlockOut& out) {
  CopyNibbles(rows, 6, out.units);
  CopyHighBits(rows, 2, WordAt(out, 4));
  CopyField<2>(rows, 0, out.scale);
}

HWY_INLINE void PackQ51(RowBytes rows, const BlockOut& out) {
  CopyNibbles(rows, 8, out.units);
  CopyHighBits(rows, 4, WordAt(out, 4));
  CopyField<2>(rows, 0, out.scale);
  CopyField<2>(rows, 2, out.offset);
}

// Two's complement to offset by 128.
HWY_INLINE void PackQ80(RowBytes rows, const BlockOut& out) {
  Word q[8];
  LoadWords<8>(rows, 2, q);
  for (size_t j = 0; j < 8; ++j) {
    for (size_t r = 0; r < kPanelRows; ++r) WordAt(out, j)[r] = q[j].row[r] ^ 0x80808080u;
  }
  CopyField<2>(rows, 0, out.scale);
}

HWY_INLINE void PackMxFp4(RowBytes rows, const BlockOut& out) {
  CopyNibbles(rows, 1, out.units);
  CopyField<1>(rows, 0, out.scale);
}

HWY_INLINE void PackQ2K(RowBytes rows, const BlockOut& out) {
  Word q[20];
  LoadWords<20>(rows, 0, q);
  for (size_t i = 0; i < 4; ++i) StoreBytes(q[i], out.scale + i * 4 * kPanelRows);
  for (size_t unit = 0; unit < 8; ++unit)
    StorePairs(q + 4 + unit / 4 * 8, static_cast<int>(unit % 4 * 2), WordAt(out, unit * 2));
  CopyField<2>(rows, 80, out.d);
  CopyField<2>(rows, 82, out.dmin);
}

// Numbers of 6 bits less 32, in two's complement of 8 bits.
HWY_INLINE uint32_t Less32(uint32_t bytes) {
  const uint32_t flipped = bytes ^ 0x20202020u;
  const uint32_t sign = flipped & 0x20202020u;
  return flipped | sign << 1 | sign << 2;
}

HWY_INLINE void PackQ3K(RowBytes rows, const BlockOut& out) {
  Word q[27];
  LoadWords<27>(rows, 0, q);
  for (size_t unit = 0; unit < 8; ++unit) {
    StorePairs(q + 8 + unit / 4 * 8, static_cast<int>(unit % 4 * 2), WordAt(out, unit * 3));
    StoreBits(q, static_cast<int>(unit), WordAt(out, unit * 3 + 2));
  }
  const Word* scales = q + 24;
  for (size_t i = 0; i < 4; ++i) {  // 4 sub-scales each
    Word codes;
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t low = (scales[i % 2].row[r] >> (i / 2 * 4)) & 0x0f0f0f0fu;
      const uint32_t high = (scales[2].row[r] >> (i * 2)) & 0x03030303u;
      codes.row[r] = Less32(low | high << 4);
    }
    StoreBytes(codes, out.scale + i * 4 * kPanelRows);
  }
  CopyField<2>(rows, 108, out.d);
}

// The 12 bytes of scales and mins of Q4_K and Q5_K.
HWY_INLINE void StoreScalesAndMins(const Word* HWY_RESTRICT s, const BlockOut& out) {
  Word scales[2];
  Word mins[2];
  for (size_t r = 0; r < kPanelRows; ++r) {
    const uint32_t first = s[0].row[r];
    const uint32_t second = s[1].row[r];
    const uint32_t last = s[2].row[r];
    scales[0].row[r] = first & 0x3f3f3f3fu;
    mins[0].row[r] = second & 0x3f3f3f3fu;
    scales[1].row[r] = (last & 0x0f0f0f0fu) | ((first >> 2) & 0x30303030u);
    mins[1].row[r] = ((last >> 4) & 0x0f0f0f0fu) | ((second >> 2) & 0x30303030u);
  }
  for (size_t i = 0; i < 2; ++i) {
    StoreBytes(scales[i], out.scale + i * 4 * kPanelRows);
    StoreBytes(mins[i], out.offset + i * 4 * kPanelRows);
  }
}

HWY_INLINE void PackQ4K(RowBytes rows, const BlockOut& out) {
  Word q[36];
  LoadWords<36>(rows, 0, q);
  StoreScalesAndMins(q + 1, out);
  for (size_t unit = 0; unit < 8; ++unit)
    StoreNibbles(q + 4 + unit / 2 * 8, static_cast<int>(unit % 2 * 4), WordAt(out, unit * 4));
  CopyField<2>(rows, 0, out.d);
  CopyField<2>(rows, 2, out.dmin);
}

HWY_INLINE void PackQ5K(RowBytes rows, const BlockOut& out) {
  Word q[44];
  LoadWords<44>(rows, 0, q);
  StoreScalesAndMins(q + 1, out);
  for (size_t unit = 0; unit < 8; ++unit) {
    StoreNibbles(q + 12 + unit / 2 * 8, static_cast<int>(unit % 2 * 4), WordAt(out, unit * 5));
    StoreBits(q + 4, static_cast<int>(unit), WordAt(out, unit * 5 + 4));
  }
  CopyField<2>(rows, 0, out.d);
  CopyField<2>(rows, 2, out.dmin);
}

HWY_INLINE void PackQ6K(RowBytes rows, const BlockOut& out) {
  Word q[52];
  LoadWords<52>(rows, 0, q);
  for (size_t unit = 0; unit < 8; ++unit) {
    const Word* low = q + unit / 4 * 16 + unit % 2 * 8;
    const Word* high = q + 32 + unit / 4 * 8;
    StoreNibbles(low, static_cast<int>(unit / 2 % 2 * 4), WordAt(out, unit * 6));
    StorePairs(high, static_cast<int>(unit % 4 * 2), WordAt(out, unit * 6 + 4));
  }
  for (size_t i = 0; i < 4; ++i) StoreBytes(q[48 + i], out.scale + i * 4 * kPanelRows);
  CopyField<2>(rows, 208, out.d);
}

// 4 nibbles to the low ones of 4 bytes.
HWY_INLINE uint32_t SpreadNibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0fu;
}

HWY_INLINE void PackIq4Xs(RowBytes rows, const BlockOut& out) {
  Word q[34];
  LoadWords<34>(rows, 0, q);
  for (size_t i = 0; i < 2; ++i) {  // 4 sub-scales each
    Word codes;
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t low = SpreadNibbles((q[1].row[r] >> (16 * i)) & 0xffffu);
      uint32_t high = (q[0].row[r] >> (16 + 8 * i)) & 0xffu;
      high = (high | high << 12) & 0x000f000fu;
      high = (high | high << 6) & 0x03030303u;
      codes.row[r] = Less32(low | high << 4);
    }
    StoreBytes(codes, out.scale + i * 4 * kPanelRows);
  }
  StoreWords<32>(q + 2, out.units);
  CopyField<2>(rows, 0, out.d);
}

// Units of plain codes, one after another.

// 16 bits; 16 words.
HWY_INLINE void StoreHalves(const Word* HWY_RESTRICT q, Words out) {
  for (size_t i = 0; i < 16; i += 2) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t first = q[i].row[r];
      const uint32_t second = q[i + 1].row[r];
      out[i * kPanelRows + r] = (first & 0xffffu) | second << 16;
      out[(i + 1) * kPanelRows + r] = first >> 16 | (second & 0xffff0000u);
    }
  }
}

// 8 bits; 8 words. The bits of `flip` become others.
HWY_INLINE void StoreCodeBytes(const Word* HWY_RESTRICT q, uint32_t flip, Words out) {
  for (size_t i = 0; i < 8; ++i) {
    for (size_t r = 0; r < kPanelRows; ++r) out[i * kPanelRows + r] = q[i].row[r] ^ flip;
  }
}

// 4 bits, neighbours in one byte; 4 words.
HWY_INLINE void StoreCodeNibbles(const Word* HWY_RESTRICT q, uint32_t flip, Words out) {
  for (size_t j = 0; j < 4; ++j) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint32_t low = SpreadNibbles((q[j / 2].row[r] >> (j % 2 * 16)) & 0xffffu);
      const uint32_t high = SpreadNibbles((q[2 + j / 2].row[r] >> (j % 2 * 16)) & 0xffffu);
      out[j * kPanelRows + r] = (low | high << 4) ^ flip;
    }
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
