#include "kernels/panels/multiply.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/panels/multiply.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/panels/scratch.h"
#include "kernels/panels/unpack-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// The register tile: some activation rows against two vectors of weight rows.
//
//   weights  a line of 32 rows for each word    w0 [row 0 .. 15]  w1 [row 16 .. 31]  (AVX-512)
//   rows     one word, broadcast          a0        +                  +
//                                         a1        +                  +     every + is a vector of
//                                         ..        ..                 ..    16 outputs
//
// Words follow each other in one accumulator per output: the order of a sum is that of the columns
// for every height of the tile, which is what makes results independent of the batch.
constexpr size_t kVecs = 2;
#if HWY_MAX_BYTES >= 64
constexpr size_t kTileRows = 6;    // with scales: 12 sums of a segment, 12 of all, 2 weights
constexpr size_t kPlainRows = 12;  // without: 24 + 2 + 1 of 32 registers
#else
constexpr size_t kTileRows = 4;
constexpr size_t kPlainRows = 6;  // 12 + 2 + 1 of 16 registers
#endif

using VI32 = hn::Vec<DI32>;

// One multiplication of a line by an activation word, and what its sums are.
struct Int8Dot {
  using Sum = VI32;
  static HWY_INLINE Sum Zero() { return hn::Zero(DI32()); }
  static HWY_INLINE Sum Load(const uint32_t* p) {
    return hn::LoadU(DI32(), reinterpret_cast<const int32_t*>(p));
  }
  static HWY_INLINE void Store(Sum sum, uint32_t* p) {
    hn::StoreU(sum, DI32(), reinterpret_cast<int32_t*>(p));
  }
  static HWY_INLINE Sum Start(uint32_t start) {
    return hn::Set(DI32(), static_cast<int32_t>(start));
  }
  static HWY_INLINE VF Float(Sum sum) { return hn::ConvertTo(DF(), sum); }
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<int8_t, DF> d8;
    return hn::SumOfMulQuadAccumulate(DI32(), hn::BitCast(DU8(), line),
                                      hn::BitCast(d8, hn::Set(DU32(), word)), sum);
  }
};
// Codes below 64: the products of a pair of columns stay below 2 * 63 * 128 < 2^15, so the form
// that saturates, which older CPUs have, does not.
struct SmallInt8Dot : Int8Dot {
#if HWY_TARGET > HWY_AVX3_DL
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<int8_t, DF> d8;
    const hn::Repartition<int16_t, DF> d16;
    const auto pairs = hn::SatWidenMulPairwiseAdd(d16, hn::BitCast(DU8(), line),
                                                  hn::BitCast(d8, hn::Set(DU32(), word)));
    return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), pairs, hn::Set(d16, 1)));
  }
#endif
};
struct FloatSum {
  using Sum = VF;
  static HWY_INLINE Sum Zero() { return hn::Zero(DF()); }
  static HWY_INLINE Sum Load(const uint32_t* p) {
    return hn::LoadU(DF(), reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE void Store(Sum sum, uint32_t* p) {
    hn::StoreU(sum, DF(), reinterpret_cast<float*>(p));
  }
  static HWY_INLINE Sum Start(uint32_t) { return Zero(); }
  static HWY_INLINE VF Float(Sum sum) { return sum; }
};
struct F32Dot : FloatSum {
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const DF df;
    return hn::MulAdd(hn::BitCast(df, line), hn::BitCast(df, hn::Set(DU32(), word)), sum);
  }
};
#if HWY_NATIVE_DOT_BF16
struct BF16Dot : FloatSum {
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    VF unused = hn::Zero(DF());  // the pair instruction leaves the second sum alone
    return hn::ReorderWidenMulAccumulate(DF(), hn::BitCast(db, line),
                                         hn::BitCast(db, hn::Set(DU32(), word)), sum, unused);
  }
};
#endif

// Columns of a panel that are multiplied at a time, all blocks whole.
struct Chunk {
  const uint8_t* lines = nullptr;  // of its first word, in the panel or unpacked
  size_t block_words = 0;          // words that follow each other ..
  size_t block_stride = 0;         // .. and the bytes from there to those of the next block
  size_t first_segment = 0, segments = 0;
  size_t first_group = 0;
  size_t first_word = 0, words = 0;
  const float* scales = nullptr;   // [groups of the chunk][32]
  const float* offsets = nullptr;  // the same, or null
};

// Rows of activations and their sums so far.
struct TileArgs {
  const std::byte* const* rows = nullptr;
  const PanelRowLayout* layout = nullptr;
  const Chunk* chunk = nullptr;
  uint32_t* sums = nullptr;  // [rows][32] f32, or i32 for whole rows of kInt8
};

template <size_t kRows>
struct RowPointers {
  HWY_INLINE RowPointers(const TileArgs& args, size_t at) {
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m)
      words[m] = reinterpret_cast<const uint32_t*>(args.rows[m] + at);
  }
  const uint32_t* words[kRows];
};

// sums += products of `count` words.
template <class Dot, size_t kRows>
HWY_INLINE void AddWords(const uint8_t* HWY_RESTRICT lines, size_t row,
                         const uint32_t* const* HWY_RESTRICT words, size_t first, size_t count,
                         typename Dot::Sum* HWY_RESTRICT sums) {
  const DU32 du;
  const size_t lanes = hn::Lanes(du);
  const auto* w = reinterpret_cast<const uint32_t*>(lines) + row;
  for (size_t i = 0; i < count; ++i, w += kPanelRows) {
    const VU32 w0 = hn::LoadU(du, w);
    const VU32 w1 = hn::LoadU(du, w + lanes);
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      const uint32_t a = words[m][first + i];
      sums[kVecs * m] = Dot::Add(w0, a, sums[kVecs * m]);
      sums[kVecs * m + 1] = Dot::Add(w1, a, sums[kVecs * m + 1]);
    }
  }
}

// Whole rows of one scale: sums of words alone.
template <class Dot, size_t kRows>
HWY_INLINE void PlainTile(const TileArgs& args) {
  const Chunk& chunk = *args.chunk;
  const size_t lanes = hn::Lanes(DU32());
  const RowPointers<kRows> a(args, 0);
  for (size_t row = 0; row < kPanelRows; row += kVecs * lanes) {
    typename Dot::Sum sums[kRows * kVecs];
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      sums[i] = Dot::Load(args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
    AddWords<Dot, kRows>(chunk.lines, row, a.words, chunk.first_word, chunk.words, sums);
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      Dot::Store(sums[i], args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
  }
}

// Groups of columns:
//
//   sum of a segment   s = start + words                      exact in i32, or f32
//   sum of a group     t = s0 * scale0 + s1 * scale1 + ..     scales of the activations
//   sum of the row     r = r + t * scale (+ offset * sum of the activations of the group)
template <class Dot, size_t kRows>
HWY_INLINE void GroupTile(const TileArgs& args) {
  const DF df;
  const Chunk& chunk = *args.chunk;
  const PanelRowLayout& layout = *args.layout;
  const size_t lanes = hn::Lanes(df);
  const RowPointers<kRows> a(args, 0);
  const RowPointers<kRows> scale(args, layout.scales_at);
  const RowPointers<kRows> start(args, layout.starts_at);
  const RowPointers<kRows> sum(args, layout.sums_at);
  const size_t per_group = layout.segments / layout.groups;
  const size_t groups = chunk.segments / per_group;
  const size_t segment_words = chunk.words / chunk.segments;
  const auto broadcast = [df](uint32_t bits)
                             HWY_ATTR { return hn::BitCast(df, hn::Set(DU32(), bits)); };
  for (size_t row = 0; row < kPanelRows; row += kVecs * lanes) {
    VF total[kRows * kVecs];
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      total[i] = FloatSum::Load(args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
    const uint8_t* lines = chunk.lines;
    size_t left = chunk.block_words;
    size_t word = chunk.first_word;
    size_t s = chunk.first_segment;
    for (size_t g = 0; g < groups; ++g) {
      VF t[kRows * kVecs];
      for (size_t part = 0; part < per_group; ++part, ++s, word += segment_words) {
        typename Dot::Sum sums[kRows * kVecs];
        SY_UNROLL
        for (size_t m = 0; m < kRows; ++m) {
          sums[kVecs * m] = layout.has_starts ? Dot::Start(start.words[m][s]) : Dot::Zero();
          sums[kVecs * m + 1] = sums[kVecs * m];
        }
        AddWords<Dot, kRows>(lines, row, a.words, word, segment_words, sums);
        lines += segment_words * kWordBytes;
        left -= segment_words;
        if (left == 0) {
          left = chunk.block_words;
          lines += chunk.block_stride;
        }
        SY_UNROLL
        for (size_t i = 0; i < kRows * kVecs; ++i) {
          const VF value = Dot::Float(sums[i]);
          if (!layout.has_scales) {
            t[i] = part == 0 ? value : hn::Add(t[i], value);
          } else {
            const VF by = broadcast(scale.words[i / kVecs][s]);
            t[i] = part == 0 ? hn::Mul(value, by) : hn::MulAdd(value, by, t[i]);
          }
        }
      }
      const float* at = chunk.scales + g * kPanelRows + row;
      SY_UNROLL
      for (size_t i = 0; i < kRows * kVecs; ++i)
        total[i] = hn::MulAdd(t[i], hn::LoadU(df, at + i % kVecs * lanes), total[i]);
      if (chunk.offsets == nullptr) continue;
      at = chunk.offsets + g * kPanelRows + row;
      SY_UNROLL
      for (size_t i = 0; i < kRows * kVecs; ++i) {
        total[i] = hn::MulAdd(hn::LoadU(df, at + i % kVecs * lanes),
                              broadcast(sum.words[i / kVecs][chunk.first_group + g]), total[i]);
      }
    }
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      FloatSum::Store(total[i], args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
  }
}

template <class Dot, bool kGroups, size_t kRows>
HWY_INLINE void TileOfHeight(size_t rows, const TileArgs& args) {
  if (rows == kRows) {
    if constexpr (kGroups) return GroupTile<Dot, kRows>(args);
    return PlainTile<Dot, kRows>(args);
  }
  if constexpr (kRows > 1) TileOfHeight<Dot, kGroups, kRows - 1>(rows, args);
}

template <class Dot, bool kGroups>
HWY_NOINLINE void AllTiles(const TileArgs& args, size_t num_rows) {
  constexpr size_t kRows = kGroups ? kTileRows : kPlainRows;
  TileArgs tile = args;
  for (size_t m = 0; m < num_rows; m += kRows) {
    tile.rows = args.rows + m;
    tile.sums = args.sums + m * kPanelRows;
    TileOfHeight<Dot, kGroups, kRows>(std::min(kRows, num_rows - m), tile);
  }
}

// The codes are small if no byte of a line reaches 64.
bool HasSmallBytes(const PanelFormat& format) {
  return format.codes != PanelCodes::kBytes && format.values != PanelValues::kIq4Nl;
}

template <bool kGroups>
HWY_INLINE void Tiles(const PanelFormat& format, const TileArgs& args, size_t num_rows) {
  switch (args.layout->path) {
    case PanelPath::kInt8:
      if (HasSmallBytes(format)) return AllTiles<SmallInt8Dot, kGroups>(args, num_rows);
      return AllTiles<Int8Dot, kGroups>(args, num_rows);
    case PanelPath::kBF16:
#if HWY_NATIVE_DOT_BF16
      AllTiles<BF16Dot, kGroups>(args, num_rows);
#endif
      return;
    case PanelPath::kF32: return AllTiles<F32Dot, kGroups>(args, num_rows);
  }
}

// Codes that are lines already.
bool IsDirect(const PanelFormat& format, PanelPath path) {
  return (path == PanelPath::kInt8 && format.codes == PanelCodes::kBytes) ||
         (path == PanelPath::kBF16 && format.codes == PanelCodes::kBF16);
}

HWY_INLINE void UnpackLines(const PanelFormat& format, PanelPath path, const uint8_t* unit,
                            size_t units, uint32_t* lines) {
  switch (path) {
    case PanelPath::kInt8: return UnpackCodes<PanelPath::kInt8>(format, unit, units, lines);
    case PanelPath::kBF16:
#if HWY_NATIVE_DOT_BF16
      UnpackCodes<PanelPath::kBF16>(format, unit, units, lines);
#endif
      return;
    case PanelPath::kF32: return UnpackCodes<PanelPath::kF32>(format, unit, units, lines);
  }
}

// Scales of the groups [first, first + count), of whole rows or in a header, for all 32 rows.
void HeaderScales(const PanelFormat& format, const uint8_t* header, size_t first, size_t count,
                  float* scales) {
  const auto* values = reinterpret_cast<const float*>(header);
  const float factor = TableFactor(format);
  for (size_t g = 0; g < count; ++g, scales += kPanelRows) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const bool has_scale = format.scales != PanelScales::kNone;
      const size_t at = format.scales == PanelScales::kGrid ? first + g : r;
      scales[r] = has_scale ? values[at] * factor : 1.0f;
    }
  }
}

// Sums to results: what is common to a row is applied last.
void Finish(const PanelProduct& product, bool has_groups, const uint32_t* sums) {
  const float factor = TableFactor(*product.format);
  const bool has_row_scale = !has_groups && product.format->scales == PanelScales::kRow;
  const bool is_integer = !has_groups && product.rows_layout->path == PanelPath::kInt8;
  const auto* header = reinterpret_cast<const float*>(product.panel);
  for (size_t m = 0; m < product.num_rows; ++m) {
    const uint32_t* row = sums + m * kPanelRows + product.first;
    float* out = product.out + m * product.out_stride;
    const float by = product.row_scale == nullptr ? 1.0f : product.row_scale[m];
    for (size_t j = 0; j < product.count; ++j) {
      float value;
      if (is_integer) {
        value = static_cast<float>(static_cast<int32_t>(row[j]));
      } else {
        std::memcpy(&value, row + j, sizeof(value));
      }
      const float scale = has_row_scale ? header[product.first + j] * factor : 1.0f;
      out[j] = value * (by * scale);
    }
  }
}

// Sums before the first chunk.
void Start(const PanelProduct& product, bool has_groups, uint32_t* sums) {
  std::memset(sums, 0, product.num_rows * kPanelRows * sizeof(uint32_t));
  const PanelRowLayout& layout = *product.rows_layout;
  if (has_groups || !layout.has_starts) return;
  for (size_t m = 0; m < product.num_rows; ++m) {
    const auto* start = reinterpret_cast<const uint32_t*>(product.rows[m] + layout.starts_at);
    std::fill_n(sums + m * kPanelRows, kPanelRows, *start);
  }
}

void Multiply(const PanelProduct& product) {
  const PanelFormat& format = *product.format;
  const PanelLayout& layout = *product.layout;
  const PanelRowLayout& rows = *product.rows_layout;
  const PanelScratch scratch = ScratchOf(format, layout, rows.path, product.num_rows);
  const bool has_groups = format.group != 0 || rows.has_scales;
  const bool is_direct = IsDirect(format, rows.path);
  const auto* header = reinterpret_cast<const uint8_t*>(product.panel);
  const uint8_t* blocks = header + layout.header_bytes;
  auto* lines = reinterpret_cast<uint32_t*>(product.scratch);
  auto* scales = reinterpret_cast<float*>(product.scratch + scratch.scales_at);
  auto* offsets = reinterpret_cast<float*>(product.scratch + scratch.offsets_at);
  auto* sums = reinterpret_cast<uint32_t*>(product.scratch + scratch.sums_at);
  const bool has_offsets = format.offsets != PanelOffsets::kNone;
  float tensor = 1.0f;
  if (format.scales == PanelScales::kE4M3) std::memcpy(&tensor, header, sizeof(tensor));

  Start(product, has_groups, sums);
  const size_t word_cols = rows.path == PanelPath::kInt8   ? 4
                           : rows.path == PanelPath::kBF16 ? 2
                                                           : 1;
  for (size_t b = 0; b < layout.blocks; b += scratch.chunk_blocks) {
    const size_t count = std::min(scratch.chunk_blocks, layout.blocks - b);
    const size_t first_col = b * format.block;
    const size_t cols = count * format.block;
    Chunk chunk;
    chunk.first_word = first_col / word_cols;
    chunk.words = cols / word_cols;
    const uint8_t* first = blocks + b * layout.block_bytes;
    if (is_direct) {
      chunk.lines = first;
      chunk.block_words = format.block / word_cols;
      chunk.block_stride = layout.block_bytes - layout.code_bytes;
    } else {
      chunk.lines = reinterpret_cast<const uint8_t*>(lines);
      chunk.block_words = chunk.words;
      const size_t units = format.block / kUnitCols;
      const size_t block_lines = format.block / word_cols * kPanelRows;
      if (layout.block_bytes == layout.code_bytes) {
        UnpackLines(format, rows.path, first, units * count, lines);
      } else {
        for (size_t i = 0; i < count; ++i)
          UnpackLines(format, rows.path, first + i * layout.block_bytes, units,
                      lines + i * block_lines);
      }
    }
    TileArgs args{product.rows, &rows, &chunk, sums};
    if (!has_groups) {
      Tiles<false>(format, args, product.num_rows);
      continue;
    }
    chunk.first_segment = first_col / rows.segment;
    chunk.segments = cols / rows.segment;
    const size_t group = rows.group();
    chunk.first_group = first_col / group;
    if (format.group == 0 || format.scales == PanelScales::kGrid) {
      HeaderScales(format, header, chunk.first_group, cols / group, scales);
    } else {
      for (size_t i = 0; i < count; ++i) {
        const size_t at = i * layout.block_groups * kPanelRows;
        UnpackScales(format, layout, first + i * layout.block_bytes, tensor,
                     {scales + at, offsets + at});
      }
    }
    chunk.scales = scales;
    chunk.offsets = has_offsets ? offsets : nullptr;
    Tiles<true>(format, args, product.num_rows);
  }
  Finish(product, has_groups, sums);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {

HWY_EXPORT(Multiply);

void MultiplyPanel(const PanelProduct& product) noexcept {
  if (product.num_rows == 0) return;
  HWY_DYNAMIC_DISPATCH(Multiply)(product);
}

size_t PanelScratchBytes(const PanelFormat& format, const PanelLayout& layout, PanelPath path,
                         size_t num_rows) {
  return ScratchOf(format, layout, path, num_rows).bytes;
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
