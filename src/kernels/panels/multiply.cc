#include "kernels/panels/multiply.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/panels/multiply.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kernels/panels/scratch.h"
#include "kernels/panels/unpack_grid-inl.h"
#include "switchyard/core/macros.h"

#undef SY_PANEL_NO_UNROLL
#if defined(__clang__)
#define SY_PANEL_NO_UNROLL SY_PRAGMA_(clang loop unroll(disable))
#else
#define SY_PANEL_NO_UNROLL SY_PRAGMA_(GCC unroll 1)
#endif

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
constexpr size_t kTileRows = 6;   // with scales: 12 sums of a segment, 12 of groups, 2 weights
constexpr size_t kPlainRows = 8;  // without: 16 + 2 + 1 of 32 registers
// Up to this many, codes are unpacked in registers by every tile; more share unpacked ones (which
// is also what narrow vectors always do). Wide vectors have units to spare for small codes, but
// hardly for the four lookups of an e4m3.
constexpr size_t kMaxPackedRows = SIZE_MAX;
constexpr size_t kMaxPackedE4M3 = kTileRows;
#else
constexpr size_t kTileRows = 4;
constexpr size_t kPlainRows = 6;  // 12 + 2 + 1 of 16 registers
constexpr size_t kMaxPackedRows = 4;
constexpr size_t kMaxPackedE4M3 = 4;
#endif

constexpr size_t kPartsRows = 2;  // no format of note has such groups

using VI32 = hn::Vec<DI32>;

// One multiplication of a line by an activation word, and what its sums are.
struct Int8Dot {
  static constexpr bool kIsInteger = true;
  using Sum = VI32;
  static HWY_INLINE Sum Load(const uint32_t* p) {
    return hn::LoadU(DI32(), reinterpret_cast<const int32_t*>(p));
  }
  static HWY_INLINE void Store(Sum sum, uint32_t* p) {
    hn::StoreU(sum, DI32(), reinterpret_cast<int32_t*>(p));
  }
  static HWY_INLINE Sum Start(const uint8_t* row, size_t at) {
    int32_t start;
    std::memcpy(&start, row + at, sizeof(start));
    return hn::Set(DI32(), start);
  }
  static HWY_INLINE VF Float(Sum sum) { return hn::ConvertTo(DF(), sum); }
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<int8_t, DF> d8;
    return hn::SumOfMulQuadAccumulate(DI32(), hn::BitCast(DU8(), line),
                                      hn::BitCast(d8, hn::Set(DU32(), word)), sum);
  }
};
// Bytes below 128: the products of a pair of columns stay below 2 * 127 * 128 < 2^15, so the form
// that saturates, which older CPUs have, does not.
#if HWY_TARGET > HWY_AVX3_DL
struct SmallInt8Dot : Int8Dot {
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<int8_t, DF> d8;
    const hn::Repartition<int16_t, DF> d16;
    const auto pairs = hn::SatWidenMulPairwiseAdd(d16, hn::BitCast(DU8(), line),
                                                  hn::BitCast(d8, hn::Set(DU32(), word)));
    return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), pairs, hn::Set(d16, 1)));
  }
};
// Codes that are values + 128, against codes of activations above -128: the pair sums of a
// magnitude and a code with the sign of the value stay within 2 * 128 * 127 < 2^15.
struct SignedInt8Dot : Int8Dot {
  static HWY_INLINE Sum Start(const uint8_t*, size_t) { return hn::Zero(DI32()); }
  static HWY_INLINE Sum Add(VU32 line, uint32_t word, Sum sum) {
    const hn::Repartition<int8_t, DF> d8;
    const hn::Repartition<int16_t, DF> d16;
    const auto value = hn::BitCast(d8, hn::Xor(line, hn::Set(DU32(), 0x80808080u)));
    const auto code =
        hn::IfNegativeThenNegOrUndefIfZero(value, hn::BitCast(d8, hn::Set(DU32(), word)));
    const auto pairs = hn::SatWidenMulPairwiseAdd(d16, hn::BitCast(DU8(), hn::Abs(value)), code);
    return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), pairs, hn::Set(d16, 1)));
  }
};
#else
using SmallInt8Dot = Int8Dot;
using SignedInt8Dot = Int8Dot;
#endif
struct FloatSum {
  static constexpr bool kIsInteger = false;
  using Sum = VF;
  static HWY_INLINE Sum Load(const uint32_t* p) {
    return hn::LoadU(DF(), reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE void Store(Sum sum, uint32_t* p) {
    hn::StoreU(sum, DF(), reinterpret_cast<float*>(p));
  }
  static HWY_INLINE Sum Start(const uint8_t*, size_t) { return hn::Zero(DF()); }
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
#if HWY_ARCH_X86
    // Clang 16 does not come to an end with a broadcast that is cast to bf16.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(line.raw), "v"(hn::Set(DU32(), word).raw));
    return sum;
#else
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    VF unused = hn::Zero(DF());  // the pair instruction leaves the second sum alone
    return hn::ReorderWidenMulAccumulate(DF(), hn::BitCast(db, line),
                                         hn::BitCast(db, hn::Set(DU32(), word)), sum, unused);
#endif
  }
};
#endif

// Where the lines of a unit come from. At(unit, i, row): line i, rows `row` and following.
template <PanelPath kPath>
struct StoredLines {  // as they are, in the panel or unpacked in a cache
  static constexpr bool kIsPacked = false;
  static constexpr size_t kWords = WordsOfUnit(kPath);
  static constexpr size_t kUnitBytes = kWords * kWordBytes;
  explicit StoredLines(const PanelFormat&) {}
  HWY_INLINE VU32 At(const uint8_t* unit, size_t i, size_t row) const {
    return LoadWord(unit, i, row);
  }
};

// Columns of a panel that are multiplied at a time, whole units.
struct Chunk {
  const uint8_t* units = nullptr;  // the first one, in the panel or unpacked
  size_t num_units = 0;
  size_t run_units = 0;  // that lie one behind another: those of a slice, or all
  size_t gap_bytes = 0;  // between two runs
  size_t first_col = 0;
  const float* scales = nullptr;   // [groups of the chunk][32]
  const float* offsets = nullptr;  // the same, or null
  // What of the next panel is asked for meanwhile, so many bytes with each unit.
  const uint8_t* fetch = nullptr;
  size_t fetch_bytes = 0;
};

HWY_INLINE void FetchLine(const uint8_t* line) {
#if HWY_ARCH_X86
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
#else
  hwy::Prefetch(line);
#endif
}

// Rows of activations and their sums so far.
struct TileArgs {
  const PanelFormat* format = nullptr;
  const std::byte* const* rows = nullptr;
  const PanelRowLayout* layout = nullptr;
  const Chunk* chunk = nullptr;
  uint32_t* sums = nullptr;  // [rows][32] f32, or i32 for whole rows of kInt8
  // The part of fetch_bytes that this tile asks for.
  size_t fetch_first = 0, fetch_end = 0;
};

// Brings the next panel to the second-level cache while this one is multiplied, a little with each
// unit, and each tile of rows its share: products of many rows would wait for memory in their first
// tile and leave it idle in the others. (All fields at once, between two panels, took 15 % of the
// time of a row: the CPU has few buffers for lines that are on their way.)
class Fetcher {
 public:
  HWY_INLINE explicit Fetcher(const TileArgs& args)
      : unit_(args.chunk->fetch + args.fetch_first),
        bytes_(args.fetch_end - args.fetch_first),
        step_(args.chunk->fetch_bytes) {}
  // For one unit.
  HWY_INLINE void Next() {
    for (size_t i = 0; i < bytes_; i += 64) FetchLine(unit_ + i);
    unit_ += step_;
  }

 private:
  const uint8_t* unit_;
  size_t bytes_, step_;
};

HWY_INLINE uint32_t WordAt(const uint8_t* row, size_t at) {
  uint32_t word;
  std::memcpy(&word, row + at, sizeof(word));
  return word;
}

// sums += products of the words [kFirst, kEnd) of a unit. at: bytes into a row where the unit is.
template <class Dot, class Source, size_t kRows, size_t kFirst, size_t kEnd>
HWY_INLINE void AddWords(const Source& source, const uint8_t* HWY_RESTRICT unit, size_t row,
                         const uint8_t* const* HWY_RESTRICT rows, size_t at,
                         typename Dot::Sum* HWY_RESTRICT sums) {
  const size_t lanes = hn::Lanes(DU32());
  const auto add = [&](size_t i) HWY_ATTR {
    const VU32 w0 = source.At(unit, i, row);
    const VU32 w1 = source.At(unit, i, row + lanes);
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      const uint32_t a = WordAt(rows[m], at + 4 * i);
      sums[kVecs * m] = Dot::Add(w0, a, sums[kVecs * m]);
      sums[kVecs * m + 1] = Dot::Add(w1, a, sums[kVecs * m + 1]);
    }
  };
  if constexpr (kRows == 1 && !Source::kIsPacked) {
    // As one instruction that walks over memory: of eight with a stride each the CPU brings less.
    SY_PANEL_NO_UNROLL
    for (size_t i = kFirst; i < kEnd; ++i) add(i);
  } else if constexpr (kEnd - kFirst <= 16) {
    SY_UNROLL
    for (size_t i = kFirst; i < kEnd; ++i) add(i);
  } else {
    for (size_t i = kFirst; i < kEnd; ++i) add(i);
  }
}

template <size_t kRows>
HWY_INLINE void PointToRows(const TileArgs& args, const uint8_t** rows) {
  SY_UNROLL
  for (size_t m = 0; m < kRows; ++m) rows[m] = reinterpret_cast<const uint8_t*>(args.rows[m]);
}

// Whole rows of one scale: sums of words alone.
template <class Dot, class Source, size_t kRows>
HWY_INLINE void PlainTile(const TileArgs& args) {
  const Chunk& chunk = *args.chunk;
  const Source source(*args.format);
  const size_t lanes = hn::Lanes(DU32());
  const uint8_t* rows[kRows];
  PointToRows<kRows>(args, rows);
  for (size_t row = 0; row < kPanelRows; row += kVecs * lanes) {
    typename Dot::Sum sums[kRows * kVecs];
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      sums[i] = Dot::Load(args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
    const uint8_t* unit = chunk.units;
    Fetcher fetcher(args);
    size_t at = chunk.first_col / kUnitCols * Source::kWords * 4;
    for (size_t u = 0; u < chunk.num_units; ++u, at += 4 * Source::kWords) {
      fetcher.Next();
      AddWords<Dot, Source, kRows, 0, Source::kWords>(source, unit, row, rows, at, sums);
      unit += Source::kUnitBytes;
    }
    SY_UNROLL
    for (size_t i = 0; i < kRows * kVecs; ++i)
      Dot::Store(sums[i], args.sums + i / kVecs * kPanelRows + row + i % kVecs * lanes);
  }
}

// How the sums of a product are made.
enum class Shape : uint8_t {
  kPlain,      // whole rows of one scale
  kHalfUnits,  // groups of 16 columns, each a segment
  kUnits,      // groups of 32 columns, each a segment
  kLong,       // longer groups, each a segment
  kParts       // groups of several segments
};
Shape ShapeOf(const PanelFormat& format, const PanelRowLayout& layout) {
  if (format.group == 0 && !layout.has_scales) return Shape::kPlain;
  if (layout.segment < kUnitCols) return Shape::kHalfUnits;
  if (layout.segments != layout.groups) return Shape::kParts;
  return layout.segment == kUnitCols ? Shape::kUnits : Shape::kLong;
}

// Groups of columns. Where the weights have the smaller ones, or both the same:
//
//   sum of a segment  s = start + words                           exact in i32, or f32
//   of activations    t = s0 * scale0 + s1 * scale1 + ..          scales of the weights, and
//                         (+ offset0 * sum0 + ..)                 offsets * sums of codes
//   sum of the row    r = r + t * scale of the activations
//
// and where the activations have:
//
//   of weights        t = s0 * scale0 + s1 * scale1 + ..          scales of the activations
//   sum of the row    r = r + t * scale (+ offset * sum)          of the weights
template <class Dot, class Source, Shape kShape, size_t kRows>
class GroupTile {
 public:
  HWY_INLINE explicit GroupTile(const TileArgs& args)
      : args_(args), layout_(*args.layout), chunk_(*args.chunk), source_(*args.format) {
    PointToRows<kRows>(args, rows_);
  }

  HWY_INLINE void Run() const {
    for (size_t row = 0; row < kPanelRows; row += kVecs * hn::Lanes(DF())) {
      if constexpr (kShape == Shape::kParts) {
        GroupsOfParts(row);
      } else {
        Groups(row);
      }
    }
  }

 private:
  static constexpr size_t kSums = kRows * kVecs;

  // Where a walk over the columns is; all but `unit` and `group` in bytes of a record.
  struct Place {
    const uint8_t* HWY_RESTRICT unit;
    size_t at;       // words
    size_t segment;  // numbers of a segment
    size_t sum;      // sums of a group
    size_t group;    // of the chunk
    Fetcher fetcher;
  };
  HWY_INLINE Place Begin() const {
    return {chunk_.units,
            chunk_.first_col / kUnitCols * Source::kWords * 4,
            chunk_.first_col / layout_.segment * 4,
            layout_.sums_at + chunk_.first_col / layout_.group() * 4,
            0,
            Fetcher(args_)};
  }

  HWY_INLINE VF Broadcast(size_t m, size_t at) const {
    return hn::BitCast(DF(), hn::Set(DU32(), WordAt(rows_[m], at)));
  }
  HWY_INLINE float* SumsOfRow(size_t m, size_t row) const {
    return reinterpret_cast<float*>(args_.sums) + m * kPanelRows + row;
  }

  HWY_INLINE void StartSums(size_t s, typename Dot::Sum* HWY_RESTRICT sums) const {
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      sums[kVecs * m] = Dot::Start(rows_[m], layout_.starts_at + s);
      sums[kVecs * m + 1] = sums[kVecs * m];
    }
  }

  // Words [kFirst, kEnd) of the unit at hand.
  template <size_t kFirst, size_t kEnd>
  HWY_INLINE void AddUnit(const Place& place, size_t row,
                          typename Dot::Sum* HWY_RESTRICT sums) const {
    AddWords<Dot, Source, kRows, kFirst, kEnd>(source_, place.unit, row, rows_, place.at, sums);
  }
  HWY_INLINE void NextUnit(Place& place) const {
    place.unit += Source::kUnitBytes;
    place.at += 4 * Source::kWords;
  }
  HWY_INLINE void AddUnits(size_t units, size_t row, Place& place,
                           typename Dot::Sum* HWY_RESTRICT sums) const {
    for (size_t u = 0; u < units; ++u, NextUnit(place)) {
      place.fetcher.Next();
      AddUnit<0, Source::kWords>(place, row, sums);
    }
  }

  // t += numbers of the group * those of the rows.
  HWY_INLINE void AddOffsets(const Place& place, size_t row, VF* HWY_RESTRICT t) const {
    const DF df;
    const float* offsets = chunk_.offsets + place.group * kPanelRows + row;
    const VF o0 = hn::LoadU(df, offsets);
    const VF o1 = hn::LoadU(df, offsets + hn::Lanes(df));
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      const VF sum = Broadcast(m, place.sum);
      t[kVecs * m] = hn::MulAdd(o0, sum, t[kVecs * m]);
      t[kVecs * m + 1] = hn::MulAdd(o1, sum, t[kVecs * m + 1]);
    }
  }
  HWY_INLINE void AddScaled(const Place& place, size_t row,
                            const typename Dot::Sum* HWY_RESTRICT sums, VF* HWY_RESTRICT t) const {
    const DF df;
    const float* scales = chunk_.scales + place.group * kPanelRows + row;
    const VF s0 = hn::LoadU(df, scales);
    const VF s1 = hn::LoadU(df, scales + hn::Lanes(df));
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      t[kVecs * m] = hn::MulAdd(Dot::Float(sums[kVecs * m]), s0, t[kVecs * m]);
      t[kVecs * m + 1] = hn::MulAdd(Dot::Float(sums[kVecs * m + 1]), s1, t[kVecs * m + 1]);
    }
  }
  // What follows the words of a group that is one segment.
  HWY_INLINE void EndGroup(size_t row, const typename Dot::Sum* HWY_RESTRICT sums, Place& place,
                           VF* HWY_RESTRICT t) const {
    AddScaled(place, row, sums, t);
    if (chunk_.offsets != nullptr) AddOffsets(place, row, t);
    ++place.group;
    place.segment += 4;
    place.sum += 4;
  }

  // The next group or groups that fill whole units; returns how many.
  HWY_INLINE size_t AddGroups(size_t segment_units, size_t row, Place& place,
                              VF* HWY_RESTRICT t) const {
    typename Dot::Sum sums[kSums];
    StartSums(place.segment, sums);
    if constexpr (kShape != Shape::kHalfUnits) {
      AddUnits(kShape == Shape::kUnits ? 1 : segment_units, row, place, sums);
      EndGroup(row, sums, place, t);
      return 1;
    } else {
      constexpr size_t kHalf = Source::kWords / 2;
      place.fetcher.Next();
      AddUnit<0, kHalf>(place, row, sums);
      EndGroup(row, sums, place, t);
      StartSums(place.segment, sums);
      AddUnit<kHalf, Source::kWords>(place, row, sums);
      EndGroup(row, sums, place, t);
      NextUnit(place);
      return 2;
    }
  }

  HWY_INLINE void Groups(size_t row) const {
    const DF df;
    const size_t lanes = hn::Lanes(df);
    const size_t segment_units = layout_.segment / kUnitCols;
    const size_t groups = chunk_.num_units * kUnitCols / layout_.group();
    const size_t run_groups = chunk_.run_units * kUnitCols / layout_.group();
    const size_t span = layout_.has_scales ? layout_.scale_segments : groups;
    Place place = Begin();
    size_t run_end = run_groups;
    for (size_t g = 0; g < groups;) {
      const size_t scale_at = layout_.scales_at + place.segment;
      VF t[kSums];
      SY_UNROLL
      for (size_t v = 0; v < kSums; ++v)
        t[v] = layout_.has_scales ? hn::Zero(df)
                                  : hn::LoadU(df, SumsOfRow(v / kVecs, row + v % kVecs * lanes));
      for (const size_t end = std::min(g + span, groups); g < end;) {
        g += AddGroups(segment_units, row, place, t);
        if (g == run_end) {
          place.unit += chunk_.gap_bytes;
          run_end += run_groups;
        }
      }
      AddToRow(row, scale_at, t);
    }
  }
  // r += t * scale of the activations, or r = t.
  HWY_INLINE void AddToRow(size_t row, size_t scale_at, const VF* HWY_RESTRICT t) const {
    const DF df;
    SY_UNROLL
    for (size_t v = 0; v < kSums; ++v) {
      float* sum = SumsOfRow(v / kVecs, row + v % kVecs * hn::Lanes(df));
      hn::StoreU(layout_.has_scales
                     ? hn::MulAdd(t[v], Broadcast(v / kVecs, scale_at), hn::LoadU(df, sum))
                     : t[v],
                 df, sum);
    }
  }

  // t += the next segment * its scale.
  HWY_INLINE void AddPart(size_t segment_units, size_t row, Place& place,
                          VF* HWY_RESTRICT t) const {
    typename Dot::Sum sums[kSums];
    const size_t scale_at = layout_.scales_at + place.segment;
    StartSums(place.segment, sums);
    AddUnits(segment_units, row, place, sums);
    place.segment += 4;
    SY_UNROLL
    for (size_t v = 0; v < kSums; ++v)
      t[v] = hn::MulAdd(Dot::Float(sums[v]), Broadcast(v / kVecs, scale_at), t[v]);
  }

  HWY_INLINE void GroupsOfParts(size_t row) const {
    const DF df;
    const size_t lanes = hn::Lanes(df);
    const size_t segment_units = layout_.segment / kUnitCols;
    const size_t parts = layout_.segments / layout_.groups;
    const size_t groups = chunk_.num_units * kUnitCols / layout_.group();
    const size_t run_groups = chunk_.run_units * kUnitCols / layout_.group();
    Place place = Begin();
    for (size_t g = 0; g < groups; ++g) {
      if (g != 0 && g % run_groups == 0) place.unit += chunk_.gap_bytes;
      VF t[kSums];
      SY_UNROLL
      for (size_t v = 0; v < kSums; ++v) t[v] = hn::Zero(df);
      for (size_t part = 0; part < parts; ++part) AddPart(segment_units, row, place, t);
      const float* scales = chunk_.scales + g * kPanelRows + row;
      SY_UNROLL
      for (size_t v = 0; v < kSums; ++v) {
        float* sum = SumsOfRow(v / kVecs, row + v % kVecs * lanes);
        VF total = hn::MulAdd(t[v], hn::LoadU(df, scales + v % kVecs * lanes), hn::LoadU(df, sum));
        if (chunk_.offsets != nullptr) {
          const VF offset =
              hn::LoadU(df, chunk_.offsets + g * kPanelRows + row + v % kVecs * lanes);
          total = hn::MulAdd(offset, Broadcast(v / kVecs, place.sum), total);
        }
        hn::StoreU(total, df, sum);
      }
      place.sum += 4;
    }
  }

  const TileArgs& args_;
  const PanelRowLayout& layout_;
  const Chunk& chunk_;
  const Source source_;
  const uint8_t* rows_[kRows];
};

template <class Dot, class Source, Shape kShape, size_t kRows>
HWY_INLINE void Tile(const TileArgs& args) {
  if constexpr (kShape == Shape::kPlain) {
    PlainTile<Dot, Source, kRows>(args);
  } else {
    GroupTile<Dot, Source, kShape, kRows>(args).Run();
  }
}

template <class Dot, class Source, Shape kShape, size_t kRows>
HWY_INLINE void TileOfHeight(size_t rows, const TileArgs& args) {
  if (rows == kRows) return Tile<Dot, Source, kShape, kRows>(args);
  if constexpr (kRows > 1) TileOfHeight<Dot, Source, kShape, kRows - 1>(rows, args);
}

// All rows in tiles of nearly the same height.
template <class Dot, class Source, Shape kShape, size_t kRows>
HWY_NOINLINE void TilesOf(const TileArgs& args, size_t num_rows) {
  TileArgs tile = args;
  const size_t lines = args.chunk->fetch_bytes / 64;
  const size_t num_tiles = (num_rows + kRows - 1) / kRows;
  size_t m = 0;
  for (size_t t = 0; t < num_tiles; ++t) {
    const size_t rows = (num_rows - m + num_tiles - t - 1) / (num_tiles - t);
    tile.rows = args.rows + m;
    tile.sums = args.sums + m * kPanelRows;
    tile.fetch_first = t * lines / num_tiles * 64;
    tile.fetch_end = (t + 1) * lines / num_tiles * 64;
    TileOfHeight<Dot, Source, kShape, kRows>(rows, tile);
    m += rows;
  }
}

template <class Dot, class Source, size_t kRows, size_t kPlain>
HWY_INLINE void AllTiles(const TileArgs& args, size_t num_rows) {
  switch (ShapeOf(*args.format, *args.layout)) {
    case Shape::kPlain: return TilesOf<Dot, Source, Shape::kPlain, kPlain>(args, num_rows);
    case Shape::kUnits: return TilesOf<Dot, Source, Shape::kUnits, kRows>(args, num_rows);
    case Shape::kLong: return TilesOf<Dot, Source, Shape::kLong, kRows>(args, num_rows);
    case Shape::kHalfUnits: return TilesOf<Dot, Source, Shape::kHalfUnits, kRows>(args, num_rows);
    case Shape::kParts: return TilesOf<Dot, Source, Shape::kParts, kPartsRows>(args, num_rows);
  }
}

// The codes are small if no byte of a line reaches 128.
bool HasSmallBytes(const PanelFormat& format) {
  return format.codes != PanelCodes::kBytes && format.values != PanelValues::kIq4Nl;
}

// What SignedInt8Dot asks for: activations that were quantised by PackFastRow have no code -128.
bool HasSignedBytes(const PanelFormat& format, const PanelRowLayout& rows) {
  return ByteBias(format) == 128 && rows.has_scales;
}

// Codes that are lines already.
bool IsDirect(const PanelFormat& format, PanelPath path) {
  return (path == PanelPath::kInt8 && format.codes == PanelCodes::kBytes) ||
         (path == PanelPath::kBF16 && format.codes == PanelCodes::kBF16) ||
         (path == PanelPath::kF32 && format.codes == PanelCodes::kF32);
}

#undef SY_PANEL_PACKED
#define SY_PANEL_PACKED (HWY_MAX_BYTES >= 32)

#if SY_PANEL_PACKED
// Products with codes as they lie in the panel, unpacked in registers by every tile. The shapes are
// those of formats that there are.
template <class Dot, PanelPath kPath>
HWY_INLINE void LinearTiles(const TileArgs& args, Shape shape, size_t num_rows) {
  using C = PanelCodes;
  switch (args.format->codes) {
    case C::kBits4: {
      using Lines = PackedLines<C::kBits4, kPath, false>;
      if (shape == Shape::kLong)
        return TilesOf<Dot, Lines, Shape::kLong, kTileRows>(args, num_rows);
      return TilesOf<Dot, Lines, Shape::kUnits, kTileRows>(args, num_rows);
    }
    case C::kBits5: {
      using Lines = PackedLines<C::kBits5, kPath, false>;
      return TilesOf<Dot, Lines, Shape::kUnits, kTileRows>(args, num_rows);
    }
    case C::kBits6: {
      using Lines = PackedLines<C::kBits6, kPath, false>;
      return TilesOf<Dot, Lines, Shape::kHalfUnits, kTileRows>(args, num_rows);
    }
    default: return;
  }
}
template <class Dot, PanelPath kPath>
HWY_INLINE void TableTiles(const TileArgs& args, Shape shape, size_t num_rows) {
  using Lines = PackedLines<PanelCodes::kBits4, kPath, true>;
  if (shape == Shape::kHalfUnits)
    return TilesOf<Dot, Lines, Shape::kHalfUnits, kTileRows>(args, num_rows);
  TilesOf<Dot, Lines, Shape::kUnits, kTileRows>(args, num_rows);
}
#endif

HWY_INLINE void Tiles(const TileArgs& args, size_t num_rows) {
  switch (args.layout->path) {
    case PanelPath::kInt8:
      if (HasSmallBytes(*args.format))
        return AllTiles<SmallInt8Dot, StoredLines<PanelPath::kInt8>, kTileRows, kPlainRows>(
            args, num_rows);
      if (HasSignedBytes(*args.format, *args.layout))
        return AllTiles<SignedInt8Dot, StoredLines<PanelPath::kInt8>, kTileRows, kPlainRows>(
            args, num_rows);
      return AllTiles<Int8Dot, StoredLines<PanelPath::kInt8>, kTileRows, kPlainRows>(args,
                                                                                     num_rows);
    case PanelPath::kBF16:
#if HWY_NATIVE_DOT_BF16
      AllTiles<BF16Dot, StoredLines<PanelPath::kBF16>, kTileRows, kPlainRows>(args, num_rows);
#endif
      return;
    case PanelPath::kF32:
      return AllTiles<F32Dot, StoredLines<PanelPath::kF32>, kTileRows, kPlainRows>(args, num_rows);
  }
}

// Whether PackedTiles has the product.
bool TakesPacked(const PanelFormat& format, const PanelRowLayout& rows, size_t num_rows) {
  if (!SY_PANEL_PACKED || num_rows > kMaxPackedRows || rows.path == PanelPath::kF32) return false;
  if (rows.path == PanelPath::kBF16 && !SY_PANEL_LOOKUPS) return false;
  const Shape shape = ShapeOf(format, rows);
  switch (format.codes) {
    case PanelCodes::kBits4:
      if (format.values == PanelValues::kLinear)
        return shape == Shape::kUnits || shape == Shape::kLong;
      return (shape == Shape::kUnits || shape == Shape::kHalfUnits) &&
             (rows.path == PanelPath::kBF16 || HasSmallBytes(format) ||
              HasSignedBytes(format, rows));
    case PanelCodes::kBits5: return shape == Shape::kUnits;
    case PanelCodes::kBits6: return shape == Shape::kHalfUnits;
    case PanelCodes::kE4M3:
      return num_rows <= kMaxPackedE4M3 && rows.path == PanelPath::kBF16 &&
             (shape == Shape::kPlain || shape == Shape::kLong);
    default: return false;
  }
}

HWY_INLINE void PackedTiles([[maybe_unused]] const TileArgs& args,
                            [[maybe_unused]] size_t num_rows) {
#if SY_PANEL_PACKED
  const Shape shape = ShapeOf(*args.format, *args.layout);
  const bool is_linear = args.format->values == PanelValues::kLinear;
  if (args.layout->path == PanelPath::kInt8) {
    if (is_linear) return LinearTiles<SmallInt8Dot, PanelPath::kInt8>(args, shape, num_rows);
    if (HasSmallBytes(*args.format))
      return TableTiles<SmallInt8Dot, PanelPath::kInt8>(args, shape, num_rows);
    return TableTiles<SignedInt8Dot, PanelPath::kInt8>(args, shape, num_rows);
  }
#if SY_PANEL_LOOKUPS
  if (args.format->codes == PanelCodes::kE4M3) {
    if (shape == Shape::kPlain)
      return TilesOf<BF16Dot, PackedE4M3, Shape::kPlain, kTileRows>(args, num_rows);
    return TilesOf<BF16Dot, PackedE4M3, Shape::kLong, kTileRows>(args, num_rows);
  }
  if (is_linear) return LinearTiles<BF16Dot, PanelPath::kBF16>(args, shape, num_rows);
  TableTiles<BF16Dot, PanelPath::kBF16>(args, shape, num_rows);
#endif
#endif
}

HWY_INLINE void UnpackLines(const PanelFormat& format, PanelPath path, const uint8_t* unit,
                            size_t units, uint32_t* lines) {
  switch (path) {
    case PanelPath::kInt8: return UnpackAnyCodes<PanelPath::kInt8>(format, unit, units, lines);
    case PanelPath::kBF16:
#if HWY_NATIVE_DOT_BF16
      UnpackAnyCodes<PanelPath::kBF16>(format, unit, units, lines);
#endif
      return;
    case PanelPath::kF32: return UnpackAnyCodes<PanelPath::kF32>(format, unit, units, lines);
  }
}

HWY_INLINE VF SumsAt(const uint32_t* sums, size_t count, bool is_integer) {
  const DU32 du;
  const VU32 bits = count < hn::Lanes(du) ? hn::LoadN(du, sums, count) : hn::LoadU(du, sums);
  if (is_integer) return hn::ConvertTo(DF(), hn::BitCast(DI32(), bits));
  return hn::BitCast(DF(), bits);
}

// Sums to results: what is common to a row is applied last.
void Finish(const PanelProduct& product, bool has_groups, const uint32_t* sums) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const float factor = TableFactor(*product.format);
  const bool has_row_scale = !has_groups && product.format->scales == PanelScales::kRow;
  const bool is_integer = !has_groups && product.rows_layout->path == PanelPath::kInt8;
  const auto* header = reinterpret_cast<const float*>(product.panel);
  float scale[kPanelRows + hn::MaxLanes(DF())] = {};  // vectors read behind the last output
  for (size_t j = 0; j < product.count; ++j)
    scale[j] = has_row_scale ? header[product.first + j] * factor : 1.0f;
  for (size_t m = 0; m < product.num_rows; ++m) {
    const uint32_t* row = sums + m * kPanelRows + product.first;
    float* out = product.out + m * product.out_stride;
    const VF by = hn::Set(df, product.row_scale == nullptr ? 1.0f : product.row_scale[m]);
    for (size_t j = 0; j < product.count; j += lanes) {
      const size_t count = product.count - j;
      const VF value =
          hn::Mul(SumsAt(row + j, count, is_integer), hn::Mul(by, hn::LoadU(df, scale + j)));
      if (count < lanes) {
        hn::StoreN(value, df, out + j, count);
      } else {
        hn::StoreU(value, df, out + j);
      }
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

// How a product walks over a panel.
struct Plan {
  bool is_packed;  // PackedTiles
  bool unpacks;    // lines in scratch
  // Few rows, which wait for memory whatever they compute: slice by slice in the order of memory,
  // which the CPU brings by itself. More rows take the panel as a whole, the scales of all slices
  // first, and ask for the next one meanwhile.
  bool streams;
};
// Up to this many rows memory takes longer than what is computed, as measured.
size_t StreamRows(Shape shape, PanelPath path, bool is_packed, bool is_direct) {
  if (is_direct) return shape == Shape::kPlain ? kPlainRows : kTileRows - 1;
  if (!is_packed || path != PanelPath::kInt8) return 0;
  return shape == Shape::kLong ? 2 : 1;
}
Plan PlanOf(const PanelProduct& product) {
  const PanelFormat& format = *product.format;
  const PanelRowLayout& rows = *product.rows_layout;
  const bool is_packed = TakesPacked(format, rows, product.num_rows);
  const bool is_direct = IsDirect(format, rows.path);
  const size_t most = StreamRows(ShapeOf(format, rows), rows.path, is_packed, is_direct);
  return {is_packed, !is_packed && !is_direct, product.num_rows <= most};
}

// One product, its scratch taken apart.
struct Parts {
  const PanelProduct& product;
  const PanelFormat& format;
  const PanelLayout& layout;
  const PanelRowLayout& rows;
  Plan plan;
  bool has_groups;
  const uint8_t* panel;
  PanelScratch scratch;
  uint32_t* lines;
  float* scales;
  float* offsets;
  uint32_t* sums;
};
Parts PartsOf(const PanelProduct& product) {
  const PanelFormat& format = *product.format;
  const PanelLayout& layout = *product.layout;
  const PanelRowLayout& rows = *product.rows_layout;
  const PanelScratch scratch = ScratchOf(format, layout, rows.path, product.num_rows);
  const auto at = [&](size_t bytes) { return product.scratch + bytes; };
  return {product,
          format,
          layout,
          rows,
          PlanOf(product),
          ShapeOf(format, rows) != Shape::kPlain,
          reinterpret_cast<const uint8_t*>(product.panel),
          scratch,
          reinterpret_cast<uint32_t*>(product.scratch),
          reinterpret_cast<float*>(at(scratch.scales_at)),
          reinterpret_cast<float*>(at(scratch.offsets_at)),
          reinterpret_cast<uint32_t*>(at(scratch.sums_at))};
}

// Units of a panel, some of them in a row.
struct UnitRange {
  size_t first, count;
};

// Scales and offsets of whole slices, to the start of the scratch for them.
HWY_INLINE void UnpackSlices(const Parts& parts, UnitRange units) {
  const PanelLayout& layout = parts.layout;
  const size_t step = layout.slice_units();
  float* scales = parts.scales;
  float* offsets = parts.offsets;
  for (size_t u = 0; u < units.count; u += step) {
    const size_t cols = std::min(step, units.count - u) * kUnitCols;
    const size_t groups = cols / parts.rows.group();
    UnpackScales(parts.format, layout, parts.panel,
                 parts.panel + layout.SliceAt((units.first + u) / step), groups, {scales, offsets});
    scales += groups * kPanelRows;
    offsets += groups * kPanelRows;
  }
}

// Lines of units that may lie in several slices.
HWY_INLINE void UnpackRange(const Parts& parts, UnitRange units) {
  const PanelLayout& layout = parts.layout;
  const PanelPath path = parts.rows.path;
  uint32_t* lines = parts.lines;
  for (size_t u = 0; u < units.count;) {
    const size_t unit = units.first + u;
    const size_t left = layout.slice_units() - unit % layout.slice_units();
    const size_t count = std::min(left, units.count - u);
    UnpackLines(parts.format, path, parts.panel + layout.UnitAt(unit), count, lines);
    lines += count * WordsOfUnit(path) * kPanelRows;
    u += count;
  }
}

// Units whose scales are unpacked, from those of unit `scaled` on.
HWY_INLINE void MultiplyUnits(const Parts& parts, UnitRange units, size_t scaled) {
  const PanelLayout& layout = parts.layout;
  Chunk chunk;
  chunk.first_col = units.first * kUnitCols;
  chunk.num_units = units.count;
  chunk.run_units = layout.slice_units();
  chunk.gap_bytes = layout.units_at;
  chunk.units = parts.panel + layout.UnitAt(units.first);
  const size_t first = units.first * layout.panel_bytes / layout.num_units();
  chunk.fetch = parts.panel + layout.panel_bytes + first;
  if (!parts.plan.streams)
    chunk.fetch_bytes = (layout.panel_bytes / layout.num_units() + 63) / 64 * 64;
  if (parts.plan.unpacks) {
    UnpackRange(parts, units);
    chunk.units = reinterpret_cast<const uint8_t*>(parts.lines);
    chunk.run_units = units.count;
  }
  if (parts.has_groups) {
    const size_t group = (units.first - scaled) * kUnitCols / parts.rows.group();
    chunk.scales = parts.scales + group * kPanelRows;
    if (parts.format.offsets != PanelOffsets::kNone)
      chunk.offsets = parts.offsets + group * kPanelRows;
  }
  const TileArgs args{&parts.format, parts.product.rows, &parts.rows, &chunk, parts.sums};
  if (parts.plan.is_packed) {
    PackedTiles(args, parts.product.num_rows);
  } else {
    Tiles(args, parts.product.num_rows);
  }
}

void Multiply(const PanelProduct& product) {
  const Parts parts = PartsOf(product);
  const size_t num_units = parts.layout.num_units();
  const size_t span = parts.plan.streams ? parts.layout.slice_units() : num_units;
  const size_t step = parts.plan.unpacks ? parts.scratch.chunk_units : span;
  Start(product, parts.has_groups, parts.sums);
  for (size_t first = 0; first < num_units; first += span) {
    const size_t end = std::min(first + span, num_units);
    if (parts.has_groups) UnpackSlices(parts, {first, end - first});
    for (size_t u = first; u < end; u += step)
      MultiplyUnits(parts, {u, std::min(step, end - u)}, first);
  }
  Finish(product, parts.has_groups, parts.sums);
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
