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
#include "kernels/load_codes-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

template <class T>
HWY_INLINE float ScalarF32(T value) {
  return hwy::ConvertScalarTo<float>(value);
}
HWY_INLINE float ScalarF32(E4M3Code code) { return ToKernelFloat(code); }

// Types of codes, which have scales, and what a code has to be multiplied by beside its scale.
template <class T>
constexpr bool kIsCode = hwy::IsSame<T, int8_t>() || hwy::IsSame<T, E4M3Code>();
template <class T>
constexpr float kUnit = hwy::IsSame<T, E4M3Code>() ? kE4M3Unit : 1.0f;

// Calls body(first element, count) for each vector of n elements.
template <class Body>
HWY_INLINE void ForEachLanes(size_t n, const Body& body) {
  const size_t lanes = hn::Lanes(DF());
  for (size_t i = 0; i < n; i += lanes) body(i, HWY_MIN(lanes, n - i));
}

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
    const VF below_max = hn::Sub(hn::LoadU(df, scores + j), max_all);
    // Highway's exponential of NaN is 0, which would hide a key that is not a number.
    const VF p = hn::IfThenElse(hn::IsNaN(below_max), below_max, hn::CallExp(df, below_max));
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
        sum += p[r * kAttentionSpan + j] * ScalarF32(v[d]);
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

// Products of the queries with keys of one block, into their columns of the scores.
HWY_INLINE void ScoreBlock(const AttentionSpanArgs& args, size_t block, size_t num_keys,
                           MatmulFn dot_products) {
  MatmulArgs product;
  product.a_rows = reinterpret_cast<const void* const*>(args.q);
  product.num_rows = args.num_rows;
  product.w = args.k[block];
  product.w_stride = args.key_dim;
  product.n = num_keys;
  product.k = args.key_dim;
  product.out = args.scores + block * kKvBlockTokens;
  product.out_stride = kAttentionSpan;
  dot_products(product);
}

// The same for codes: each part of the keys by its scales, summed.
template <class T>
HWY_INLINE void ScoreCodeBlock(const AttentionSpanArgs& args, size_t block, size_t num_keys,
                               MatmulFn dot_products) {
  constexpr size_t kRows = 32;
  const DF df;
  const VF unit = hn::Set(df, kUnit<T>);
  float products[kRows * kKvBlockTokens];
  for (size_t r0 = 0; r0 < args.num_rows; r0 += kRows) {
    const size_t rows = HWY_MIN(kRows, args.num_rows - r0);
    for (size_t part = 0; part < (args.key_split < args.key_dim ? 2u : 1u); ++part) {
      const size_t first = part * args.key_split;
      const float* q_rows[kRows];
      for (size_t r = 0; r < rows; ++r) q_rows[r] = args.q[r0 + r] + first;
      MatmulArgs product;
      product.a_rows = reinterpret_cast<const void* const*>(q_rows);
      product.num_rows = rows;
      product.w = static_cast<const T*>(args.k[block]) + first;
      product.w_stride = args.key_dim;
      product.n = num_keys;
      product.k = part == 0 ? args.key_split : args.key_dim - args.key_split;
      product.out = products;
      product.out_stride = kKvBlockTokens;
      dot_products(product);
      const float* HWY_RESTRICT scales = args.k_scales[block] + part * kKvBlockTokens;
      for (size_t r = 0; r < rows; ++r) {
        const float* HWY_RESTRICT from = products + r * kKvBlockTokens;
        float* HWY_RESTRICT to = args.scores + (r0 + r) * kAttentionSpan + block * kKvBlockTokens;
        ForEachLanes(num_keys, [&](size_t i, size_t n) HWY_ATTR {
          const VF scale = hn::Mul(hn::LoadN(df, scales + i, n), unit);
          const VF before = part == 0 ? hn::Zero(df) : hn::LoadN(df, to + i, n);
          hn::StoreN(hn::MulAdd(hn::LoadN(df, from + i, n), scale, before), df, to + i, n);
        });
      }
    }
  }
}

// The weights of the codes of all values: p times the scale of its value, where a row sees it.
template <class T>
HWY_INLINE void ScaleWeights(const AttentionSpanArgs& args) {
  const DF df;
  const VF unit = hn::Set(df, kUnit<T>);
  for (size_t r = 0; r < args.num_rows; ++r) {
    float* HWY_RESTRICT p = args.scores + r * kAttentionSpan;
    for (size_t j = args.first[r]; j < args.last[r];) {
      const size_t block = j / kKvBlockTokens;
      const size_t end = HWY_MIN(args.last[r], (block + 1) * kKvBlockTokens);
      const float* HWY_RESTRICT scales = args.v_scales[block] + j % kKvBlockTokens;
      ForEachLanes(end - j, [&](size_t i, size_t n) HWY_ATTR {
        const VF scale = hn::Mul(hn::LoadN(df, scales + i, n), unit);
        hn::StoreN(hn::Mul(hn::LoadN(df, p + j + i, n), scale), df, p + j + i, n);
      });
      j = end;
    }
  }
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
    const size_t num_keys = std::min(kKvBlockTokens, end - block * kKvBlockTokens);
    if constexpr (kIsCode<T>) {
      ScoreCodeBlock<T>(args, block, num_keys, dot_products);
    } else {
      ScoreBlock(args, block, num_keys, dot_products);
    }
  }
  for (size_t r = 0; r < args.num_rows; ++r) {
    args.states[r] = SoftmaxRow(args.scores + r * kAttentionSpan, args.first[r], args.last[r],
                                padded, args.scale);
  }
  if constexpr (kIsCode<T>) ScaleWeights<T>(args);
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
void AttendI8(const AttentionSpanArgs& args, MatmulFn dot) { AttendSpanT<int8_t>(args, dot); }
void AttendE4M3(const AttentionSpanArgs& args, MatmulFn dot) { AttendSpanT<E4M3Code>(args, dot); }

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
HWY_EXPORT(AttendI8);
HWY_EXPORT(AttendE4M3);
HWY_EXPORT(ScaleAndAdd);

void AttendSpan(const AttentionSpanArgs& args) noexcept {
  const bool is_code = args.kv_dtype == DType::kI8 || args.kv_dtype == DType::kF8E4M3;
  const MatmulFn dot =
      is_code ? CodeMatmul(args.kv_dtype) : FindMatmul(DType::kF32, args.kv_dtype)->run;
  switch (args.kv_dtype) {
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(AttendBF16)(args, dot);
    case DType::kF16: return HWY_DYNAMIC_DISPATCH(AttendF16)(args, dot);
    case DType::kI8: return HWY_DYNAMIC_DISPATCH(AttendI8)(args, dot);
    case DType::kF8E4M3: return HWY_DYNAMIC_DISPATCH(AttendE4M3)(args, dot);
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
