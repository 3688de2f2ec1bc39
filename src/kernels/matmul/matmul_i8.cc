#include "kernels/matmul/matmul_i8.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matmul/matmul_i8.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "switchyard/core/macros.h"

// How 8-bit operands reach the multiplier. x86 multiplies unsigned by signed bytes in one
// instruction from VNNI on (which does not saturate); older sets have only a form that saturates,
// so there the bytes are widened to 16 bits, whose pair products fit in i32.
#undef SY_I8_UNSIGNED_DOT
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define SY_I8_UNSIGNED_DOT 1
#else
#define SY_I8_UNSIGNED_DOT 0
#endif

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DI32 = hn::ScalableTag<int32_t>;
using VI32 = hn::Vec<DI32>;

#if SY_I8_UNSIGNED_DOT
// a + 128 is unsigned: sum of a w = sum of (a + 128) w - 128 * sum of w. Every step is exact modulo
// 2^32 and so is the result. Padding has w = 0 and adds nothing.
using DOperand = hn::ScalableTag<int8_t>;
using DUnsigned = hn::RebindToUnsigned<DOperand>;
HWY_INLINE hn::Vec<DOperand> LoadOperand(const int8_t* p) { return hn::LoadU(DOperand(), p); }
HWY_INLINE hn::Vec<DOperand> LoadOperandN(const int8_t* p, size_t n) {
  return hn::LoadN(DOperand(), p, n);
}
HWY_INLINE VI32 AddDot(hn::Vec<DOperand> a, hn::Vec<DOperand> w, VI32 sum) {
  const auto shifted = hn::Xor(hn::BitCast(DUnsigned(), a), hn::Set(DUnsigned(), 0x80));
  return hn::SumOfMulQuadAccumulate(DI32(), shifted, w, sum);
}
HWY_INLINE VI32 AddExcess(hn::Vec<DOperand> w, VI32 sum) {
  return hn::SumOfMulQuadAccumulate(DI32(), hn::Set(DUnsigned(), 0x80), w, sum);
}
#else
using DOperand = hn::ScalableTag<int16_t>;
using DStored = hn::Rebind<int8_t, DOperand>;
HWY_INLINE hn::Vec<DOperand> LoadOperand(const int8_t* p) {
  return hn::PromoteTo(DOperand(), hn::LoadU(DStored(), p));
}
HWY_INLINE hn::Vec<DOperand> LoadOperandN(const int8_t* p, size_t n) {
  return hn::PromoteTo(DOperand(), hn::LoadN(DStored(), p, n));
}
HWY_INLINE VI32 AddDot(hn::Vec<DOperand> a, hn::Vec<DOperand> w, VI32 sum) {
  return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), a, w));
}
HWY_INLINE VI32 AddExcess(hn::Vec<DOperand>, VI32 sum) { return sum; }
#endif

#if HWY_MAX_BYTES >= 64
constexpr size_t kTileRows = 4;  // 16 accumulators + 4 of the excess + 4 weights of 32 registers
#else
constexpr size_t kTileRows = 2;
#endif
constexpr size_t kTileWeights = 4;

// Activation rows kept in L2 while all weight rows of a call pass over them.
constexpr size_t kActivationBlockBytes = size_t{384} << 10;

// store(m, r, sum) for kRows activation rows and kWeights weight rows.
template <size_t kRows, size_t kWeights, class Store>
HWY_INLINE void Tile(const int8_t* const* HWY_RESTRICT a_rows, const int8_t* HWY_RESTRICT w,
                     size_t w_stride, size_t k, const Store& store) {
  const DI32 di;
  VI32 acc[kRows * kWeights];
  VI32 excess[kWeights];
  SY_UNROLL
  for (size_t i = 0; i < kRows * kWeights; ++i) acc[i] = hn::Zero(di);
  SY_UNROLL
  for (size_t r = 0; r < kWeights; ++r) excess[r] = hn::Zero(di);
  const size_t step = hn::Lanes(DOperand());
  size_t i = 0;
  for (; i + step <= k; i += step) {
    hn::Vec<DOperand> wv[kWeights];
    SY_UNROLL
    for (size_t r = 0; r < kWeights; ++r) {
      wv[r] = LoadOperand(w + r * w_stride + i);
      excess[r] = AddExcess(wv[r], excess[r]);
    }
    SY_UNROLL
    for (size_t m = 0; m < kRows; ++m) {
      const auto av = LoadOperand(a_rows[m] + i);
      SY_UNROLL
      for (size_t r = 0; r < kWeights; ++r)
        acc[m * kWeights + r] = AddDot(av, wv[r], acc[m * kWeights + r]);
    }
  }
  if (i < k) {
    for (size_t r = 0; r < kWeights; ++r) {
      const auto wv = LoadOperandN(w + r * w_stride + i, k - i);
      excess[r] = AddExcess(wv, excess[r]);
      for (size_t m = 0; m < kRows; ++m) {
        acc[m * kWeights + r] =
            AddDot(LoadOperandN(a_rows[m] + i, k - i), wv, acc[m * kWeights + r]);
      }
    }
  }
  SY_UNROLL
  for (size_t m = 0; m < kRows; ++m) {
    SY_UNROLL
    for (size_t r = 0; r < kWeights; ++r)
      store(m, r, hn::ReduceSum(di, hn::Sub(acc[m * kWeights + r], excess[r])));
  }
}

template <size_t kRows, class Store>
HWY_INLINE void TileOfHeight(size_t rows, const int8_t* const* a_rows, const int8_t* w,
                             size_t w_stride, size_t k, const Store& store) {
  if (rows == kRows) return Tile<kRows, kTileWeights>(a_rows, w, w_stride, k, store);
  if constexpr (kRows > 1) TileOfHeight<kRows - 1>(rows, a_rows, w, w_stride, k, store);
}

// Calls store(m, n, sum) for every product; for some of them twice.
template <class Store>
HWY_INLINE void ForEachSum(const MatmulI8Args& args, const Store& store) {
  if (args.n < kTileWeights) {
    for (size_t m = 0; m < args.num_rows; ++m) {
      for (size_t n = 0; n < args.n; ++n) {
        Tile<1, 1>(args.a_rows + m, args.w + n * args.w_stride, args.w_stride, args.k,
                   [&](size_t, size_t, int32_t sum) { store(m, n, sum); });
      }
    }
    return;
  }
  const size_t rows_in_l2 = kActivationBlockBytes / std::max<size_t>(1, args.k);
  const size_t block = std::max(kTileRows, rows_in_l2 / kTileRows * kTileRows);
  for (size_t m0 = 0; m0 < args.num_rows; m0 += block) {
    const size_t m_end = std::min(args.num_rows, m0 + block);
    for (size_t n0 = 0; n0 < args.n; n0 += kTileWeights) {
      // The last tile moves back so that it is whole.
      const size_t n = std::min(n0, args.n - kTileWeights);
      for (size_t m = m0; m < m_end; m += kTileRows) {
        TileOfHeight<kTileRows>(
            std::min(kTileRows, m_end - m), args.a_rows + m, args.w + n * args.w_stride,
            args.w_stride, args.k,
            [&](size_t dm, size_t dn, int32_t sum) { store(m + dm, n + dn, sum); });
      }
    }
  }
}

void I8Sums(const MatmulI8Args& args, int32_t* out) {
  ForEachSum(args, [&](size_t m, size_t n, int32_t sum) { out[m * args.out_stride + n] = sum; });
}

void I8Scaled(const MatmulI8Args& args, const float* a_scale, const float* w_scale, float* out) {
  ForEachSum(args, [&](size_t m, size_t n, int32_t sum) {
    out[m * args.out_stride + n] = static_cast<float>(sum) * (a_scale[m] * w_scale[n]);
  });
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(I8Sums);
HWY_EXPORT(I8Scaled);

void MatmulI8I8(const MatmulI8Args& args, int32_t* out) noexcept {
  HWY_DYNAMIC_DISPATCH(I8Sums)(args, out);
}
void MatmulI8I8Scaled(const MatmulI8Args& args, const float* a_scale, const float* w_scale,
                      float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(I8Scaled)(args, a_scale, w_scale, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
