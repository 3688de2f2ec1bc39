#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/matmul/matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>

#include "kernels/load-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Scores of one row -> exp(scale * score - max), zero outside [first, last), over the first
// `padded` places.
SoftmaxState SoftmaxRow(float* HWY_RESTRICT scores, size_t first, size_t last, size_t padded,
                        float scale) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  if (first >= last) {
    std::fill(scores, scores + padded, 0.0f);
    return {kMinusInfinity, 0.0f};
  }
  std::fill(scores, scores + first, kMinusInfinity);
  std::fill(scores + last, scores + padded, kMinusInfinity);
  const VF scale_v = hn::Set(df, scale);
  VF max_v = hn::Set(df, kMinusInfinity);
  for (size_t j = 0; j < padded; j += lanes) {
    const VF s = hn::Mul(hn::LoadU(df, scores + j), scale_v);
    hn::StoreU(s, df, scores + j);
    max_v = hn::Max(max_v, s);
  }
  const float max = hn::ReduceMax(df, max_v);
  const VF max_all = hn::Set(df, max);
  VF sum = hn::Zero(df);
  for (size_t j = 0; j < padded; j += lanes) {
    const VF p = hn::CallExp(df, hn::Sub(hn::LoadU(df, scores + j), max_all));
    hn::StoreU(p, df, scores + j);
    sum = hn::Add(sum, p);
  }
  return {max, hn::ReduceSum(df, sum)};
}

// sums[r][d] += sum over keys j0 <= j < j1 of p[r][j] * v[j][d], for kRows rows and kVectors
// vectors of d, keys in ascending order.
template <size_t kRows, size_t kVectors, class T>
HWY_INLINE void WeightedValues(const float* HWY_RESTRICT p, const void* const* v_blocks, size_t j0,
                               size_t j1, size_t dim, size_t stride, size_t d0,
                               float* HWY_RESTRICT sums) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  VF acc[kRows * kVectors];
  SY_UNROLL
  for (size_t r = 0; r < kRows; ++r) {
    SY_UNROLL
    for (size_t i = 0; i < kVectors; ++i) {
      acc[r * kVectors + i] = hn::LoadU(df, sums + r * dim + d0 + i * lanes);
    }
  }
  for (size_t j = j0; j < j1; ++j) {
    const T* HWY_RESTRICT v =
        static_cast<const T*>(v_blocks[j / kKvBlockTokens]) + j % kKvBlockTokens * stride + d0;
    VF values[kVectors];
    SY_UNROLL
    for (size_t i = 0; i < kVectors; ++i) values[i] = LoadF32(df, v + i * lanes);
    SY_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      const VF weight = hn::Set(df, p[r * kAttentionSpan + j]);
      SY_UNROLL
      for (size_t i = 0; i < kVectors; ++i) {
        acc[r * kVectors + i] = hn::MulAdd(weight, values[i], acc[r * kVectors + i]);
      }
    }
  }
  SY_UNROLL
  for (size_t r = 0; r < kRows; ++r) {
    SY_UNROLL
    for (size_t i = 0; i < kVectors; ++i) {
      hn::StoreU(acc[r * kVectors + i], df, sums + r * dim + d0 + i * lanes);
    }
  }
}

template <size_t kRows, class T>
HWY_INLINE void WeightedValueRows(const float* p, const void* const* v_blocks, size_t j0, size_t j1,
                                  size_t dim, size_t stride, float* sums) {
  if (j0 >= j1) return;
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t d = 0;
  for (; d + 4 * lanes <= dim; d += 4 * lanes) {
    WeightedValues<kRows, 4, T>(p, v_blocks, j0, j1, dim, stride, d, sums);
  }
  for (; d + lanes <= dim; d += lanes) {
    WeightedValues<kRows, 1, T>(p, v_blocks, j0, j1, dim, stride, d, sums);
  }
  for (; d < dim; ++d) {  // head sizes that are no multiple of the vector
    for (size_t r = 0; r < kRows; ++r) {
      float sum = sums[r * dim + d];
      for (size_t j = j0; j < j1; ++j) {
        const T* v =
            static_cast<const T*>(v_blocks[j / kKvBlockTokens]) + j % kKvBlockTokens * stride;
        sum += p[r * kAttentionSpan + j] * hwy::ConvertScalarTo<float>(v[d]);
      }
      sums[r * dim + d] = sum;
    }
  }
}

// The weighted values of four rows: the keys that all four see together, what only some see one row
// at a time before and after. A row never touches a key that it does not see: 0 * infinity is no 0.
template <class T>
HWY_INLINE void WeightedValuesOfFour(const AttentionSpanArgs& args, size_t r0) {
  size_t begin = 0;
  size_t end = kAttentionSpan;
  for (size_t r = r0; r < r0 + 4; ++r) {
    begin = std::max<size_t>(begin, args.first[r]);
    end = std::min<size_t>(end, args.last[r]);
  }
  end = std::max(begin, end);
  const auto one_row = [&](size_t r, size_t j0, size_t j1) HWY_ATTR {
    WeightedValueRows<1, T>(args.scores + r * kAttentionSpan, args.v, j0, j1, args.value_dim,
                            args.value_stride, args.sums + r * args.value_dim);
  };
  for (size_t r = r0; r < r0 + 4; ++r)
    one_row(r, args.first[r], std::min<size_t>(begin, args.last[r]));
  WeightedValueRows<4, T>(args.scores + r0 * kAttentionSpan, args.v, begin, end, args.value_dim,
                          args.value_stride, args.sums + r0 * args.value_dim);
  for (size_t r = r0; r < r0 + 4; ++r)
    one_row(r, std::max<size_t>(end, args.first[r]), args.last[r]);
}

template <class T>
void AttendSpanT(const AttentionSpanArgs& args, MatmulFn dot_products) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  size_t end = 0;
  size_t begin = kAttentionSpan;
  for (size_t r = 0; r < args.num_rows; ++r) {
    if (args.first[r] >= args.last[r]) continue;
    end = std::max<size_t>(end, args.last[r]);
    begin = std::min<size_t>(begin, args.first[r]);
  }
  const size_t padded = hwy::RoundUpTo(end, lanes);
  for (size_t block = begin / kKvBlockTokens; block * kKvBlockTokens < end; ++block) {
    MatmulArgs product;
    product.a_rows = reinterpret_cast<const void* const*>(args.q);
    product.num_rows = args.num_rows;
    product.w = args.k[block];
    product.w_stride = args.key_dim;
    product.n = std::min(kKvBlockTokens, end - block * kKvBlockTokens);
    product.k = args.key_dim;
    product.out = args.scores + block * kKvBlockTokens;
    product.out_stride = kAttentionSpan;
    dot_products(product);
  }
  for (size_t r = 0; r < args.num_rows; ++r) {
    args.states[r] = SoftmaxRow(args.scores + r * kAttentionSpan, args.first[r], args.last[r],
                                padded, args.scale);
  }
  std::fill_n(args.sums, args.num_rows * args.value_dim, 0.0f);
  size_t r = 0;
  for (; r + 4 <= args.num_rows; r += 4) WeightedValuesOfFour<T>(args, r);
  for (; r < args.num_rows; ++r) {
    WeightedValueRows<1, T>(args.scores + r * kAttentionSpan, args.v, args.first[r], args.last[r],
                            args.value_dim, args.value_stride, args.sums + r * args.value_dim);
  }
}

void AttendF32(const AttentionSpanArgs& args, MatmulFn dot) { AttendSpanT<float>(args, dot); }
void AttendBF16(const AttentionSpanArgs& args, MatmulFn dot) {
  AttendSpanT<hwy::bfloat16_t>(args, dot);
}
void AttendF16(const AttentionSpanArgs& args, MatmulFn dot) {
  AttendSpanT<hwy::float16_t>(args, dot);
}

void ScaleAndAdd(const float* HWY_RESTRICT x, float x_scale, size_t n, float out_scale,
                 float* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const VF xs = hn::Set(df, x_scale);
  const VF os = hn::Set(df, out_scale);
  for (size_t i = 0; i < n; i += lanes) {
    const size_t m = HWY_MIN(lanes, n - i);
    const VF scaled = hn::Mul(hn::LoadN(df, out + i, m), os);
    hn::StoreN(hn::MulAdd(xs, hn::LoadN(df, x + i, m), scaled), df, out + i, m);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(AttendF32);
HWY_EXPORT(AttendBF16);
HWY_EXPORT(AttendF16);
HWY_EXPORT(ScaleAndAdd);

void AttendSpan(const AttentionSpanArgs& args) noexcept {
  const MatmulFn dot = FindMatmul(DType::kF32, args.kv_dtype)->run;
  switch (args.kv_dtype) {
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(AttendBF16)(args, dot);
    case DType::kF16: return HWY_DYNAMIC_DISPATCH(AttendF16)(args, dot);
    default: return HWY_DYNAMIC_DISPATCH(AttendF32)(args, dot);
  }
}

void MergeSpan(const SoftmaxState& span, const float* span_sums, size_t value_dim,
               SoftmaxState& state, float* sums) noexcept {
  if (span.denominator == 0.0f) return;
  const float max = std::max(state.max, span.max);
  const float keep = std::exp(state.max - max);
  const float add = std::exp(span.max - max);
  HWY_DYNAMIC_DISPATCH(ScaleAndAdd)(span_sums, add, value_dim, keep, sums);
  state.denominator = state.denominator * keep + span.denominator * add;
  state.max = max;
}

void MergeSink(float score, size_t value_dim, SoftmaxState& state, float* sums) noexcept {
  const float max = std::max(state.max, score);
  const float keep = std::exp(state.max - max);
  for (size_t i = 0; i < value_dim; ++i) sums[i] *= keep;
  state.denominator = state.denominator * keep + std::exp(score - max);
  state.max = max;
}

void FinishAttention(const SoftmaxState& state, const float* sums, size_t value_dim,
                     float* out) noexcept {
  const float scale = 1.0f / state.denominator;
  for (size_t i = 0; i < value_dim; ++i) out[i] = sums[i] * scale;
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
