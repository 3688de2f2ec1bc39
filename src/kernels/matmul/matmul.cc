#include "kernels/matmul/matmul.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matmul/matmul.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// The register tile: kTileRows activation rows against 4 weight rows, one vector accumulator each,
// all walking along K.
//
//             k ->                      w0 w1 w2 w3
//   a0  [. . . . . . . .]          a0 [ +  +  +  + ]
//   a1  [. . . . . . . .]    x     a1 [ +  +  +  + ]     every + is a vector of partial sums; lane
//   l holds the
//   ..                             .. [ +  +  +  + ]     products of k = l, l + lanes, l + 2 lanes,
//   ...
//
// Both operands are read along K, so weights are used as they lie in the file. A tile costs (rows +
// 4) loads for rows * 4 multiply-adds, and one horizontal sum per output at the end. One
// accumulator per output fixes the order of its sum for every tile height, which is what makes
// results independent of the batch.
#if HWY_MAX_BYTES >= 64
constexpr size_t kTileRows = 6;  // 24 accumulators + 4 weights + 1 activation of 32 registers
#elif HWY_MAX_BYTES >= 32
constexpr size_t kTileRows = 2;  // 8 + 4 + 1 of 16; with 3 rows GCC 12 spills
#else
constexpr size_t kTileRows = 2;
#endif

// Activation rows kept in L2 while all weight rows of a call pass over them.
constexpr size_t kActivationBlockBytes = size_t{384} << 10;

// Whether bf16 pairs are multiplied by one instruction (vdpbf16ps), else they are widened to f32
// first.
template <class TA, class TW>
constexpr bool UsesPairDot() {
  return HWY_NATIVE_DOT_BF16 && hwy::IsSame<TA, hwy::bfloat16_t>() &&
         hwy::IsSame<TW, hwy::bfloat16_t>();
}

// Adds upper halves to lower halves until 4 lanes are left: the same tree for every tile.
template <class D>
HWY_INLINE hn::Vec128<float> FoldTo4([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (HWY_MAX_LANES_D(D) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return FoldTo4(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// {sum of v0, sum of v1, sum of v2, sum of v3}
HWY_INLINE hn::Vec128<float> Sum4(VF v0, VF v1, VF v2, VF v3) {
  const DF df;
  const hn::Full128<float> d4;
  const auto a = FoldTo4(df, v0);
  const auto b = FoldTo4(df, v1);
  const auto c = FoldTo4(df, v2);
  const auto d = FoldTo4(df, v3);
  const auto ac =
      hn::Add(hn::InterleaveLower(d4, a, c), hn::InterleaveUpper(d4, a, c));  // a02 c02 a13 c13
  const auto bd = hn::Add(hn::InterleaveLower(d4, b, d), hn::InterleaveUpper(d4, b, d));
  return hn::Add(hn::InterleaveLower(d4, ac, bd), hn::InterleaveUpper(d4, ac, bd));  // a b c d
}

// How a tile walks over its weight rows.
enum class Walk {
  kTogether,  // all 4 side by side: each activation is loaded once for 4 weights; for many rows,
              // bound by arithmetic
  kInTurn,    // one after another: memory sees one sequential stream, which alone reaches its full
              // bandwidth; for few rows
};

// acc[m * 4 + r] = vector of partial sums over all of K, for the weight rows kFirst <= r < kEnd.
template <size_t kRows, size_t kFirst, size_t kEnd, class TA, class TW>
HWY_INLINE void SumAlongK(const TA* const* a, const TW* HWY_RESTRICT w, size_t w_stride, size_t k,
                          VF* HWY_RESTRICT acc) {
  const DF df;
  constexpr size_t kWeights = kEnd - kFirst;
  size_t i = 0;
  if constexpr (UsesPairDot<TA, TW>()) {
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    using VB = hn::Vec<decltype(db)>;
    const size_t step = hn::Lanes(db);
    const auto dot = [&](VB av, VB wv, VF sum) HWY_ATTR {
      VF unused = hn::Zero(df);  // the pair instruction leaves the second sum alone
      return hn::ReorderWidenMulAccumulate(df, av, wv, sum, unused);
    };
    for (; i + step <= k; i += step) {
      VB wv[kWeights];
      SY_UNROLL
      for (size_t r = 0; r < kWeights; ++r) wv[r] = hn::LoadU(db, w + (kFirst + r) * w_stride + i);
      SY_UNROLL
      for (size_t m = 0; m < kRows; ++m) {
        const VB av = hn::LoadU(db, a[m] + i);
        SY_UNROLL
        for (size_t r = 0; r < kWeights; ++r)
          acc[m * 4 + kFirst + r] = dot(av, wv[r], acc[m * 4 + kFirst + r]);
      }
    }
    if (i < k) {
      for (size_t m = 0; m < kRows; ++m) {
        const VB av = hn::LoadN(db, a[m] + i, k - i);
        for (size_t r = kFirst; r < kEnd; ++r) {
          acc[m * 4 + r] = dot(av, hn::LoadN(db, w + r * w_stride + i, k - i), acc[m * 4 + r]);
        }
      }
    }
  } else {
    const size_t step = hn::Lanes(df);
    for (; i + step <= k; i += step) {
      VF wv[kWeights];
      SY_UNROLL
      for (size_t r = 0; r < kWeights; ++r) wv[r] = LoadF32(df, w + (kFirst + r) * w_stride + i);
      SY_UNROLL
      for (size_t m = 0; m < kRows; ++m) {
        const VF av = LoadF32(df, a[m] + i);
        SY_UNROLL
        for (size_t r = 0; r < kWeights; ++r) {
          acc[m * 4 + kFirst + r] = hn::MulAdd(av, wv[r], acc[m * 4 + kFirst + r]);
        }
      }
    }
    if (i < k) {
      for (size_t m = 0; m < kRows; ++m) {
        const VF av = LoadF32N(df, a[m] + i, k - i);
        for (size_t r = kFirst; r < kEnd; ++r) {
          acc[m * 4 + r] =
              hn::MulAdd(av, LoadF32N(df, w + r * w_stride + i, k - i), acc[m * 4 + r]);
        }
      }
    }
  }
}

// out[m][0 .. kWeights) for kRows activation rows and kWeights weight rows (4, or 1 for matrices
// with fewer).
template <size_t kRows, size_t kWeights, Walk kWalk, class TA, class TW>
HWY_INLINE void Tile(const TA* const* HWY_RESTRICT a_rows, const TW* HWY_RESTRICT w,
                     size_t w_stride, size_t k, float* HWY_RESTRICT out, size_t out_stride) {
  VF acc[kRows * 4];
  SY_UNROLL
  for (size_t i = 0; i < kRows * 4; ++i) acc[i] = hn::Zero(DF());
  const TA* a[kRows];
  SY_UNROLL
  for (size_t m = 0; m < kRows; ++m) a[m] = a_rows[m];

  if constexpr (kWeights == 4 && kWalk == Walk::kInTurn) {
    SumAlongK<kRows, 0, 1>(a, w, w_stride, k, acc);
    SumAlongK<kRows, 1, 2>(a, w, w_stride, k, acc);
    SumAlongK<kRows, 2, 3>(a, w, w_stride, k, acc);
    SumAlongK<kRows, 3, 4>(a, w, w_stride, k, acc);
  } else {
    SumAlongK<kRows, 0, kWeights>(a, w, w_stride, k, acc);
  }

  SY_UNROLL
  for (size_t m = 0; m < kRows; ++m) {
    const auto sums = Sum4(acc[m * 4], acc[m * 4 + 1], acc[m * 4 + 2], acc[m * 4 + 3]);
    hn::StoreN(sums, hn::Full128<float>(), out + m * out_stride, kWeights);
  }
}

// A tile of `rows` <= kRows activation rows: picks the instance with that height.
template <size_t kRows, Walk kWalk, class TA, class TW>
HWY_INLINE void TileOfHeight(size_t rows, const TA* const* a_rows, const TW* w, size_t w_stride,
                             size_t k, float* out, size_t out_stride) {
  if (rows == kRows) return Tile<kRows, 4, kWalk>(a_rows, w, w_stride, k, out, out_stride);
  if constexpr (kRows > 1)
    TileOfHeight<kRows - 1, kWalk>(rows, a_rows, w, w_stride, k, out, out_stride);
}

template <class TA, class TW>
HWY_NOINLINE void Matmul(const MatmulArgs& args) {
  const auto* a_rows = reinterpret_cast<const TA* const*>(args.a_rows);
  const auto* w = static_cast<const TW*>(args.w);
  if (args.num_rows == 0) return;
  if (args.n < kMatmulRowStep) {  // too few weight rows for a tile
    for (size_t m = 0; m < args.num_rows; ++m) {
      for (size_t n = 0; n < args.n; ++n) {
        Tile<1, 1, Walk::kTogether>(a_rows + m, w + n * args.w_stride, args.w_stride, args.k,
                                    args.out + m * args.out_stride + n, args.out_stride);
      }
    }
    return;
  }
  if (args.num_rows <= kTileRows) {
    for (size_t n0 = 0; n0 < args.n; n0 += kMatmulRowStep) {
      // The last tile moves back so that it is whole; the rows it computes again get the same bits.
      const size_t n = std::min(n0, args.n - kMatmulRowStep);
      TileOfHeight<kTileRows, Walk::kInTurn>(args.num_rows, a_rows, w + n * args.w_stride,
                                             args.w_stride, args.k, args.out + n, args.out_stride);
    }
    return;
  }
  const size_t rows_in_l2 = kActivationBlockBytes / std::max<size_t>(1, args.k * sizeof(TA));
  const size_t block = std::max(kTileRows, rows_in_l2 / kTileRows * kTileRows);
  for (size_t m0 = 0; m0 < args.num_rows; m0 += block) {
    const size_t m_end = std::min(args.num_rows, m0 + block);
    for (size_t n0 = 0; n0 < args.n; n0 += kMatmulRowStep) {
      const size_t n = std::min(n0, args.n - kMatmulRowStep);
      for (size_t m = m0; m < m_end; m += kTileRows) {
        TileOfHeight<kTileRows, Walk::kTogether>(
            std::min(kTileRows, m_end - m), a_rows + m, w + n * args.w_stride, args.w_stride,
            args.k, args.out + m * args.out_stride + n, args.out_stride);
      }
    }
  }
}

#define SY_MATMUL(name, a_dtype, a_type, w_dtype, w_type) \
  void name(const MatmulArgs& args) { Matmul<a_type, w_type>(args); }
#include "kernels/kernels.def"
#undef SY_MATMUL

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

// The dispatched entry of each row.
#define SY_MATMUL(name, a_dtype, a_type, w_dtype, w_type) \
  HWY_EXPORT(name);                                       \
  void Dispatch##name(const MatmulArgs& args) noexcept { HWY_DYNAMIC_DISPATCH(name)(args); }
#include "kernels/kernels.def"
#undef SY_MATMUL

constexpr MatmulKernel kMatmulKernels[] = {
#define SY_MATMUL(name, a_dtype, a_type, w_dtype, w_type) \
  {#name, DType::a_dtype, DType::w_dtype, &Dispatch##name},
#include "kernels/kernels.def"
#undef SY_MATMUL
};

}  // namespace

std::span<const MatmulKernel> AllMatmulKernels() { return kMatmulKernels; }

const MatmulKernel* FindMatmul(DType a_dtype, DType w_dtype) {
  for (const MatmulKernel& kernel : kMatmulKernels) {
    if (kernel.a_dtype == a_dtype && kernel.w_dtype == w_dtype) return &kernel;
  }
  return nullptr;
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
