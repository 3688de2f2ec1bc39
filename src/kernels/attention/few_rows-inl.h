// Products of few rows, the heads of one query, with keys and values as they lie in the cache: each
// number of the cache is met by so few that laying it out in memory would not pay. The sums are
// those of Multiply with a panel, bit for bit. Compiled once per instruction set.
#if defined(SWITCHYARD_KERNELS_ATTENTION_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_ATTENTION_FEW_ROWS_INL_H_
#undef SWITCHYARD_KERNELS_ATTENTION_FEW_ROWS_INL_H_
#else
#define SWITCHYARD_KERNELS_ATTENTION_FEW_ROWS_INL_H_
#endif

#include <cstddef>
#include <hwy/highway.h>
#include <type_traits>

#include "kernels/attention/panels-inl.h"
#include "kernels/attention/products-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Rows that share the registers with a square of keys, or with two vectors of values.
#if HWY_MAX_BYTES >= 64
constexpr size_t kRowsBesideSquare = 8;
#else
constexpr size_t kRowsBesideSquare = 4;
#endif
// Calls of more rows than these lay blocks out.
constexpr size_t kFewRows = 2 * kRowsBesideSquare;

// Calls tile(first row, its height as a constant) for all rows, kRowsBesideSquare at a time.
template <size_t kRows = kRowsBesideSquare, class Tile>
HWY_INLINE void ForEachTileOfRows(size_t num_rows, const Tile& tile, size_t first = 0) {
  for (; first + kRows <= num_rows; first += kRows)
    tile(first, std::integral_constant<size_t, kRows>());
  if constexpr (kRows > 1) {
    if (first < num_rows) ForEachTileOfRows<kRows - 1>(num_rows, tile, first);
  }
}

// Elements of a key that go through a square of words.
template <bool kPairs, class T>
constexpr size_t kElementsOfSquare =
    kLanes * kElementsPerWord<kPairs || hwy::IsSame<T, hwy::bfloat16_t>()>;

// out[r][j] = sum over d of a[r][d] * keys[j][d], d < dim, for the first num_keys keys of b, and
// for those beyond, to whole vectors, the same as for the last one.
// Shapes: dim a multiple of kElementsOfSquare; next: keys that are read later, or null. Takes no
//   notice of num_cols, steps and add.
template <bool kPairs, class T>
HWY_NOINLINE void MultiplyKeys(const ProductArgs& args, size_t num_keys, size_t dim,
                               const T* next) {
  const DF df;
  const auto multiply = [&](size_t j0, size_t first_word, const SquareOfWords& square) HWY_ATTR {
    ForEachTileOfRows(args.num_rows, [&](size_t r0, auto height) HWY_ATTR {
      constexpr size_t kRows = decltype(height)::value;
      const float* HWY_RESTRICT a = args.a + r0 * args.a_stride + first_word;
      float* HWY_RESTRICT out = args.out + r0 * args.out_stride + j0;
      VF sums[kRows];
      SY_UNROLL
      for (size_t r = 0; r < kRows; ++r)
        sums[r] = first_word == 0 ? hn::Zero(df) : hn::LoadU(df, out + r * args.out_stride);
      SY_UNROLL
      for (size_t i = 0; i < kLanes; ++i) {
        SY_UNROLL
        for (size_t r = 0; r < kRows; ++r) {
          const VF word = hn::Set(df, a[r * args.a_stride + i]);
          sums[r] = AddProduct<kPairs>(df, word, square.words[i], sums[r]);
        }
      }
      SY_UNROLL
      for (size_t r = 0; r < kRows; ++r) hn::StoreU(sums[r], df, out + r * args.out_stride);
    });
  };
  ForEachSquare<kPairs>(static_cast<const T*>(args.b), args.b_stride, num_keys, dim, next,
                        multiply);
}

// Two vectors of words of the values j and, where kPairs, j + 1, of columns [0, 2 lanes), of which
// `cols` are there; values outside [begin, end) are zeros.
template <bool kPairs, class T>
HWY_INLINE void LoadValues(const T* HWY_RESTRICT values, size_t stride, size_t j, size_t begin,
                           size_t end, size_t cols, VF& lower, VF& upper) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const T* HWY_RESTRICT row = values + j * stride;
  if constexpr (kLooksUp<kPairs, T>) {
    if (cols == 2 * lanes && j >= begin && j + 1 < end) {
      const hn::Repartition<uint8_t, DF> du;
      const hn::Half<decltype(du)> dh;
      const auto* HWY_RESTRICT even = reinterpret_cast<const uint8_t*>(row);
      const auto codes = hn::Combine(du, hn::LoadU(dh, even + stride), hn::LoadU(dh, even));
      return PairsOfCodes<T>(codes, kLowerOfRows, kUpperOfRows, lower, upper);
    }
  }
  if constexpr (kPairs) {
    const hn::Repartition<uint16_t, DF> d16;
    const VF zero = hn::Zero(df);
    const auto even = hn::BitCast(d16, j >= begin ? LoadWords<true>(df, row, cols) : zero);
    const auto odd = hn::BitCast(d16, j + 1 < end ? LoadWords<true>(df, row + stride, cols) : zero);
    lower = hn::BitCast(df, hn::InterleaveWholeLower(d16, even, odd));
    upper = hn::BitCast(df, hn::InterleaveWholeUpper(d16, even, odd));
  } else {
    lower = LoadWords<false>(df, row, cols);
    upper = cols > lanes ? LoadWords<false>(df, row + lanes, cols - lanes) : hn::Zero(df);
  }
}

// out[r][c] += sum over j of a[r][j] * values[j][c], begin <= j < end, c < num_cols. Rows of a
// are kAttentionSpan words apart, which makes their offsets constants, and begin with the key 0.
// Shapes: next: values as many as these that are read later, or null. Takes no notice of steps and
//   a_stride.
template <bool kPairs, class T>
HWY_NOINLINE void MultiplyValues(const ProductArgs& args, size_t begin, size_t end, const T* next) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  constexpr size_t kStep = kElementsPerWord<kPairs>;
  const T* HWY_RESTRICT values = static_cast<const T*>(args.b);
  const size_t fetched_per_step = kStep * 2 * lanes;
  if (next != nullptr) next += begin * args.b_stride;
  for (size_t c = 0; c < args.num_cols; c += 2 * lanes) {
    const size_t cols = HWY_MIN(2 * lanes, args.num_cols - c);
    const size_t lower_cols = HWY_MIN(lanes, cols);
    ForEachTileOfRows(args.num_rows, [&](size_t r0, auto height) HWY_ATTR {
      constexpr size_t kRows = decltype(height)::value;
      const float* HWY_RESTRICT a = args.a + r0 * kAttentionSpan;
      float* HWY_RESTRICT out = args.out + r0 * args.out_stride + c;
      VF lower_sums[kRows];
      VF upper_sums[kRows];
      SY_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        lower_sums[r] = hn::LoadN(df, out + r * args.out_stride, lower_cols);
        upper_sums[r] = hn::LoadN(df, out + r * args.out_stride + lower_cols, cols - lower_cols);
      }
      for (size_t j = begin / kStep * kStep; j < end; j += kStep) {
        if (next != nullptr && r0 == 0) {
          FetchAhead(next, fetched_per_step * sizeof(T));
          next += fetched_per_step;
        }
        VF lower;
        VF upper;
        LoadValues<kPairs>(values + c, args.b_stride, j, begin, end, cols, lower, upper);
        SY_UNROLL
        for (size_t r = 0; r < kRows; ++r) {
          const VF word = hn::Set(df, a[r * kAttentionSpan + j / kStep]);
          lower_sums[r] = AddProduct<kPairs>(df, word, lower, lower_sums[r]);
          upper_sums[r] = AddProduct<kPairs>(df, word, upper, upper_sums[r]);
        }
      }
      SY_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        hn::StoreN(lower_sums[r], df, out + r * args.out_stride, lower_cols);
        hn::StoreN(upper_sums[r], df, out + r * args.out_stride + lower_cols, cols - lower_cols);
      }
    });
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
