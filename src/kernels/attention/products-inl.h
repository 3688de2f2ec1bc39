// Products of a few rows with a panel, from which attention makes its scores and its sums. Compiled
// once per instruction set.
#if defined(SWITCHYARD_KERNELS_ATTENTION_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_ATTENTION_PRODUCTS_INL_H_
#undef SWITCHYARD_KERNELS_ATTENTION_PRODUCTS_INL_H_
#else
#define SWITCHYARD_KERNELS_ATTENTION_PRODUCTS_INL_H_
#endif

#include <cstring>
#include <hwy/highway.h>

#include "kernels/load-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// out[r][c] (+)= sum over steps i of a[r][i] * b[i][c], in ascending order of i. Where kPairs, a
// word of a or b is two bf16 that meet in one pair product; else it is a float.
//
//            i ->               c -> lanes                      c ->
//   a  r  [ . . . . ]   x   i [ . . . . . . . . ]   +->  out  r [ + + + + + + + + ]
//
// A word of a is broadcast, so no sum is ever spread over lanes: each output is one chain along i,
// whatever the rows, columns or instruction set beside it.
struct ProductArgs {
  const float* a = nullptr;  // [num_rows, steps] words
  size_t a_stride = 0;
  size_t num_rows = 0;
  const void* b = nullptr;  // [steps, num_cols] words; or numbers of the cache, widened here
  size_t b_stride = 0;
  size_t steps = 0;
  float* out = nullptr;  // [num_rows, num_cols]
  size_t out_stride = 0;
  size_t num_cols = 0;
  bool add = false;  // to what is there, else to 0
};

// Rows of one register tile, four vectors wide.
#if HWY_MAX_BYTES >= 64
constexpr size_t kProductRows = 6;  // 24 sums + 4 of b + 1 of a, of 32 registers
#else
constexpr size_t kProductRows = 2;  // 8 + 4 + 1 of 16
#endif

template <bool kPairs>
HWY_INLINE VF AddProduct(DF df, VF a, VF b, VF sum) {
  if constexpr (kPairs) {
#if HWY_ARCH_X86 && HWY_NATIVE_DOT_BF16
    // Clang 16 does not come to an end with a broadcast that is cast to bf16.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(b.raw), "v"(a.raw));
    return sum;
#else
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    VF unused = hn::Zero(df);  // the pair instruction leaves the second sum alone
    return hn::ReorderWidenMulAccumulate(df, hn::BitCast(db, a), hn::BitCast(db, b), sum, unused);
#endif
  } else {
    return hn::MulAdd(a, b, sum);
  }
}

// kRows x (kVectors vectors) of outputs; with kVectors = 1 only the first num_cols of them.
template <bool kPairs, size_t kRows, size_t kVectors, class TB>
HWY_INLINE void ProductTile(const ProductArgs& args, size_t r0, size_t c0, size_t num_cols) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const float* HWY_RESTRICT a = args.a + r0 * args.a_stride;
  const TB* HWY_RESTRICT b = static_cast<const TB*>(args.b) + c0;
  float* HWY_RESTRICT out = args.out + r0 * args.out_stride + c0;
  VF sums[kRows * kVectors];
  SY_UNROLL
  for (size_t r = 0; r < kRows; ++r) {
    SY_UNROLL
    for (size_t v = 0; v < kVectors; ++v) {
      const float* from = out + r * args.out_stride + v * lanes;
      sums[r * kVectors + v] = !args.add       ? hn::Zero(df)
                               : kVectors == 1 ? hn::LoadN(df, from, num_cols)
                                               : hn::LoadU(df, from);
    }
  }
  for (size_t i = 0; i < args.steps; ++i) {
    VF bv[kVectors];
    SY_UNROLL
    for (size_t v = 0; v < kVectors; ++v) {
      const TB* HWY_RESTRICT from = b + i * args.b_stride + v * lanes;
      bv[v] = kVectors == 1 && num_cols < lanes ? LoadF32N(df, from, num_cols) : LoadF32(df, from);
    }
    SY_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      const VF av = hn::Set(df, a[r * args.a_stride + i]);
      SY_UNROLL
      for (size_t v = 0; v < kVectors; ++v)
        sums[r * kVectors + v] = AddProduct<kPairs>(df, av, bv[v], sums[r * kVectors + v]);
    }
  }
  SY_UNROLL
  for (size_t r = 0; r < kRows; ++r) {
    SY_UNROLL
    for (size_t v = 0; v < kVectors; ++v) {
      float* to = out + r * args.out_stride + v * lanes;
      if constexpr (kVectors == 1) {
        hn::StoreN(sums[r], df, to, num_cols);
      } else {
        hn::StoreU(sums[r * kVectors + v], df, to);
      }
    }
  }
}

// A tile of `rows` <= kRows rows: picks the instance with that height.
template <bool kPairs, size_t kRows, size_t kVectors, class TB>
HWY_INLINE void ProductTileOfHeight(const ProductArgs& args, size_t rows, size_t r0, size_t c0,
                                    size_t num_cols) {
  if (rows == kRows) return ProductTile<kPairs, kRows, kVectors, TB>(args, r0, c0, num_cols);
  if constexpr (kRows > 1)
    ProductTileOfHeight<kPairs, kRows - 1, kVectors, TB>(args, rows, r0, c0, num_cols);
}

// Columns outside, so that their part of b stays in a cache while all rows pass over it.
template <bool kPairs, class TB>
HWY_NOINLINE void MultiplySteps(const ProductArgs& args) {
  const size_t lanes = hn::Lanes(DF());
  const auto all_rows = [&](const auto& tile) HWY_ATTR {
    for (size_t r = 0; r < args.num_rows; r += kProductRows)
      tile(HWY_MIN(kProductRows, args.num_rows - r), r);
  };
  size_t c = 0;
  for (; c + 4 * lanes <= args.num_cols; c += 4 * lanes) {
    all_rows([&](size_t rows, size_t r) HWY_ATTR {
      ProductTileOfHeight<kPairs, kProductRows, 4, TB>(args, rows, r, c, 4 * lanes);
    });
  }
  for (; c < args.num_cols; c += lanes) {
    all_rows([&](size_t rows, size_t r) HWY_ATTR {
      ProductTileOfHeight<kPairs, kProductRows, 1, TB>(args, rows, r, c,
                                                       HWY_MIN(lanes, args.num_cols - c));
    });
  }
}

// Of many steps, some at a time: 4 vectors of b for each of them are half of a first-level cache.
template <bool kPairs, class TB = float>
HWY_INLINE void Multiply(ProductArgs args) {
  constexpr size_t kSteps = 64;
  while (args.steps > kSteps) {
    ProductArgs part = args;
    part.steps = kSteps;
    MultiplySteps<kPairs, TB>(part);
    args.a += kSteps;
    args.b = static_cast<const TB*>(args.b) + kSteps * args.b_stride;
    args.steps -= kSteps;
    args.add = true;
  }
  MultiplySteps<kPairs, TB>(args);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
