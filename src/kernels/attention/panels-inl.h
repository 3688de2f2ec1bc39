// Keys and values of a block of the cache, laid out for the products of attention. Compiled once
// per instruction set.
#if defined(SWITCHYARD_KERNELS_ATTENTION_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_ATTENTION_PANELS_INL_H_
#undef SWITCHYARD_KERNELS_ATTENTION_PANELS_INL_H_
#else
#define SWITCHYARD_KERNELS_ATTENTION_PANELS_INL_H_
#endif

#include <cstddef>
#include <hwy/highway.h>

#include "kernels/attention/attention.h"
#include "kernels/attention/bf16_codes-inl.h"
#include "kernels/load-inl.h"
#include "kernels/load_codes-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// A word of a panel is an element widened to f32, or, where kPairs, two elements as bf16.
template <bool kPairs>
constexpr size_t kElementsPerWord = kPairs ? 2 : 1;

// A vector of words at p, of which n elements are there; zeros after them. Touches nothing else.
template <bool kPairs, class T>
HWY_INLINE VF LoadWords(DF df, const T* HWY_RESTRICT p, size_t n) {
  const size_t lanes = hn::Lanes(df);
  if constexpr (!kPairs) {
    return n >= lanes ? LoadF32(df, p) : LoadF32N(df, p, n);
  } else {
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    if constexpr (hwy::IsSame<T, hwy::bfloat16_t>()) {
      return hn::BitCast(df, n >= 2 * lanes ? hn::LoadU(db, p) : hn::LoadN(db, p, n));
    } else {  // codes, which bf16 holds exactly
      const VF lower = n >= lanes ? LoadF32(df, p) : LoadF32N(df, p, n);
      const VF upper = n >= 2 * lanes ? LoadF32(df, p + lanes)
                       : n > lanes    ? LoadF32N(df, p + lanes, n - lanes)
                                      : hn::Zero(df);
      return hn::BitCast(df, hn::OrderedDemote2To(db, lower, upper));
    }
  }
}

// As many vectors as a vector has words.
constexpr size_t kLanes = HWY_MAX_LANES_D(DF);
struct SquareOfWords {
  VF words[kLanes];
};

// Transposes a square of words: each round interleaves the first half of the rows with the second,
// which turns one bit of the row number into one of the lane number.
HWY_INLINE void TransposeWords(SquareOfWords& square) {
  auto& rows = square.words;
  const DF df;
  SY_UNROLL
  for (size_t round = 1; round < kLanes; round *= 2) {
    VF mixed[kLanes];
    SY_UNROLL
    for (size_t i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = hn::InterleaveWholeLower(df, rows[i], rows[i + kLanes / 2]);
      mixed[2 * i + 1] = hn::InterleaveWholeUpper(df, rows[i], rows[i + kLanes / 2]);
    }
    SY_UNROLL
    for (size_t i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

// Pairs of bf16 from the given row on, half a square of them, as words of f32 in the same order.
HWY_INLINE SquareOfWords WidenPairs(const SquareOfWords& pairs, size_t first) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  SquareOfWords widened;
  SY_UNROLL
  for (size_t i = 0; i < kLanes / 2; ++i) {
    const auto pair = hn::BitCast(du, pairs.words[first + i]);
    widened.words[2 * i] = hn::BitCast(df, hn::ShiftLeft<16>(pair));
    widened.words[2 * i + 1] = hn::BitCast(df, hn::And(pair, hn::Set(du, 0xffff0000u)));
  }
  return widened;
}

// Asks for `bytes` at p, to be in the second-level cache when their turn comes: without it, memory
// would idle while the block before is multiplied.
HWY_INLINE void FetchAhead(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const std::byte*>(p) + i, /*rw=*/0, /*locality=*/2);
}

// Codes that become pairs go through a table.
template <bool kPairs, class T>
constexpr bool kLooksUp = kPairs && kHasCodeTables && sizeof(T) == 1;

// Words of four codes, in half a square from the given row on, as pairs in the same order.
template <class T>
HWY_INLINE SquareOfWords WidenCodes(const SquareOfWords& codes, size_t first) {
  const hn::Repartition<uint8_t, DF> du;
  SquareOfWords widened;
  SY_UNROLL
  for (size_t i = 0; i < kLanes / 2; ++i) {
    PairsOfCodes<T>(hn::BitCast(du, codes.words[first + i]), kLowerOfFour, kUpperOfFour,
                    widened.words[2 * i], widened.words[2 * i + 1]);
  }
  return widened;
}

// Calls body(first key, first word, words) for squares of keys, transposed: words along d, keys in
// the lanes. Keys from num_keys to whole vectors repeat the last one, words beyond dim are zeros.
// Shapes: keys [num_keys, stride] of which `dim` elements from the first are taken. next: keys as
//   many as these that are read later, or null.
template <bool kPairs, class T, class Body>
HWY_INLINE void ForEachSquare(const T* HWY_RESTRICT keys, size_t stride, size_t num_keys,
                              size_t dim, const T* next, const Body& body) {
  const DF df;
  // bf16 is transposed in pairs, whatever becomes of them.
  constexpr bool kMovesPairs = kPairs || hwy::IsSame<T, hwy::bfloat16_t>();
  constexpr size_t kElements = kElementsPerWord<kMovesPairs> * kLanes;
  for (size_t j0 = 0; j0 < num_keys; j0 += kLanes) {
    size_t d = 0;
    if constexpr (kLooksUp<kPairs, T>) {  // four to a word
      for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
        if (next != nullptr) FetchAhead(next + j0 * stride + d * kLanes, 4 * kLanes * kLanes);
        SquareOfWords rows;
        SY_UNROLL
        for (size_t j = 0; j < kLanes; ++j) {
          const T* HWY_RESTRICT key = keys + HWY_MIN(j0 + j, num_keys - 1) * stride;
          rows.words[j] = hn::BitCast(df, hn::LoadU(hn::Repartition<uint8_t, DF>(),
                                                    reinterpret_cast<const uint8_t*>(key + d)));
        }
        TransposeWords(rows);
        body(j0, d / 2, WidenCodes<T>(rows, 0));
        body(j0, d / 2 + kLanes, WidenCodes<T>(rows, kLanes / 2));
      }
    }
    for (; d < dim; d += kElements) {
      if (next != nullptr)  // in the order of addresses, whatever is read here
        FetchAhead(next + j0 * stride + d * kLanes, kLanes * kElements * sizeof(T));
      SquareOfWords rows;
      SY_UNROLL
      for (size_t j = 0; j < kLanes; ++j) {
        const T* HWY_RESTRICT key = keys + HWY_MIN(j0 + j, num_keys - 1) * stride;
        rows.words[j] = LoadWords<kMovesPairs>(df, key + d, dim - d);
      }
      TransposeWords(rows);
      if constexpr (kMovesPairs && !kPairs) {
        body(j0, d, WidenPairs(rows, 0));
        body(j0, d + kLanes, WidenPairs(rows, kLanes / 2));
      } else {
        body(j0, d / kElementsPerWord<kPairs>, rows);
      }
    }
  }
}

// The keys of a block, transposed: words along d, keys in the lanes.
//
//        d ->                            key ->
//   key [ 0 1 2 3 .. ]       word of d  [ . . . . .. 64 ]   of (d) or of the pair (2 d, 2 d + 1)
//       [ 0 1 2 3 .. ]   ->             [ . . . . .. 64 ]
//
// Shapes: keys [num_keys, stride] of which `dim` elements from the first are taken; panel [words,
//   kKvBlockTokens], words = RoundUp(dim / elements per word, lanes). Columns from num_keys to
//   whole vectors repeat the last key; those beyond are not written. next: keys as many as these
//   that are read later, or null.
template <bool kPairs, class T>
HWY_NOINLINE void PackKeys(const T* HWY_RESTRICT keys, size_t stride, size_t num_keys, size_t dim,
                           const T* next, float* HWY_RESTRICT panel) {
  const auto store = [&](size_t j0, size_t first_word, const SquareOfWords& square) HWY_ATTR {
    float* HWY_RESTRICT to = panel + first_word * kKvBlockTokens + j0;
    SY_UNROLL
    for (size_t i = 0; i < kLanes; ++i) hn::StoreU(square.words[i], DF(), to + i * kKvBlockTokens);
  };
  ForEachSquare<kPairs>(keys, stride, num_keys, dim, next, store);
}

// Remembers the largest magnitude among the words of a panel, by their bits without the sign.
template <bool kPairs>
class LargestMagnitude {
 public:
  HWY_INLINE LargestMagnitude() { largest_ = hn::Zero(kTag); }
  HWY_INLINE void Add(VF words) {
    largest_ =
        hn::Max(largest_, hn::And(hn::BitCast(kTag, words), hn::Set(kTag, kInfinity | kFraction)));
  }
  HWY_INLINE bool IsFinite() const {
    return hn::AllTrue(kTag, hn::Lt(largest_, hn::Set(kTag, kInfinity)));
  }

 private:
  using Bits = hwy::If<kPairs, uint16_t, uint32_t>;
  static constexpr Bits kInfinity = static_cast<Bits>(kPairs ? 0x7f80u : 0x7f800000u);
  static constexpr Bits kFraction = static_cast<Bits>(kPairs ? 0x7fu : 0x7fffffu);
  static constexpr hn::Repartition<Bits, DF> kTag{};
  hn::Vec<hn::Repartition<Bits, DF>> largest_;
};

// The values of a block: words along the keys, d in the lanes. Where kPairs, words are pairs of
// values (2 j, 2 j + 1). Keys outside [begin, end) are zeros or are not written.
//
// Shapes: values [kKvBlockTokens, stride], of which the rows from begin to end are read; panel
//   [kKvBlockTokens / elements per word, panel_stride], panel_stride a multiple of 2 vectors. next:
//   the same rows of a block that is read later, or null.
// Returns whether all values of the range are finite: 0 * x is 0 for these only.
template <bool kPairs, class T>
HWY_NOINLINE bool PackValues(const T* HWY_RESTRICT values, size_t stride, size_t begin, size_t end,
                             size_t dim, const T* next, float* HWY_RESTRICT panel,
                             size_t panel_stride) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  LargestMagnitude<kPairs> largest;
  const auto load = [&](size_t j, size_t d) HWY_ATTR {
    const bool is_there = j >= begin && j < end;
    const VF words =
        is_there ? LoadWords<kPairs>(df, values + j * stride + d, dim - d) : hn::Zero(df);
    largest.Add(words);
    return words;
  };
  if constexpr (kPairs) {
    const hn::Repartition<uint16_t, DF> d16;
    for (size_t j = begin / 2 * 2; j < end; j += 2) {
      if (next != nullptr) FetchAhead(next + j * stride, 2 * dim * sizeof(T));
      for (size_t d = 0; d < dim; d += 2 * lanes) {
        const auto even = hn::BitCast(d16, load(j, d));
        const auto odd = hn::BitCast(d16, load(j + 1, d));
        float* HWY_RESTRICT to = panel + j / 2 * panel_stride + d;
        hn::StoreU(hn::BitCast(df, hn::InterleaveWholeLower(d16, even, odd)), df, to);
        hn::StoreU(hn::BitCast(df, hn::InterleaveWholeUpper(d16, even, odd)), df, to + lanes);
      }
    }
  } else {
    for (size_t j = begin; j < end; ++j) {
      if (next != nullptr) FetchAhead(next + j * stride, dim * sizeof(T));
      for (size_t d = 0; d < dim; d += lanes)
        hn::StoreU(load(j, d), df, panel + j * panel_stride + d);
    }
  }
  return largest.IsFinite();
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
