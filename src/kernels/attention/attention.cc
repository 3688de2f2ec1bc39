#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/attention/few_rows-inl.h"
#include "kernels/attention/panels-inl.h"
#include "kernels/attention/products-inl.h"
#include "kernels/load-inl.h"
#include "kernels/load_codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// One span, for all rows of the call at once:
//
//   block of keys   -- PackKeys --> panel --+-- Multiply --> columns of the scores
//                                     q ----+
//   scores          -- SoftmaxRow --> weights p, in their place
//   block of values -- PackValues -> panel -+-- Multiply --> sums
//                                     p ----+
//
// A block is laid out once and met by every row: all queries of the chunk, all heads of the group.
// Where rows are few, as the heads of one query are, its words meet them in the registers instead
// (few_rows-inl.h), which also asks for the next span at an even pace.

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

// exp(x) for x <= 0 (or a rounding error above), relative error 2e-7; 0 below -87, where f32 has
// subnormals only; NaN stays NaN. x = n ln 2 + f with |f| <= ln 2 / 2, and exp(f) is a polynomial:
// ours, through the Chebyshev nodes of f. Adding 1.5 * 2^23 rounds to the integer n and leaves it
// in the low bits, from where it is added to the exponent.
HWY_INLINE VF ExpOfNegative(DF df, VF x) {
  constexpr float kCoefficients[] = {0.0013941213255748153f,
                                     0.008375209756195545f,
                                     0.04166635125875473f,
                                     0.16666413843631744f,
                                     0.5f,
                                     1.0f,
                                     1.0f};
  const hn::RebindToSigned<DF> di;
  const VF shift = hn::Set(df, 12582912.0f);  // 1.5 * 2^23
  const VF shifted = hn::MulAdd(x, hn::Set(df, 1.44269504f), shift);
  const VF n = hn::Sub(shifted, shift);
  // ln 2 in two parts: n times the first is exact.
  const VF part = hn::NegMulAdd(n, hn::Set(df, 0.693145752f), x);
  const VF f = hn::NegMulAdd(n, hn::Set(df, 1.42860677e-6f), part);
  VF p = hn::Set(df, kCoefficients[0]);
  SY_UNROLL
  for (size_t i = 1; i < 7; ++i) p = hn::MulAdd(p, f, hn::Set(df, kCoefficients[i]));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  const VF scaled = hn::BitCast(df, hn::Add(hn::BitCast(di, p), exponent));
  const VF power = hn::IfThenZeroElse(hn::Lt(x, hn::Set(df, -87.0f)), scaled);
  return hn::IfThenElse(hn::IsNaN(x), x, power);
}

// Scores of one row -> exp(scale * score - max), zero outside [first, last), over the places from
// `begin` to `end`, multiples of the vector. The row must see a key.
SoftmaxState SoftmaxRow(float* HWY_RESTRICT scores, size_t first, size_t last, size_t begin,
                        size_t end, float scale) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  std::fill(scores + begin, scores + first, kMinusInfinity);
  std::fill(scores + last, scores + end, kMinusInfinity);
  const VF scale_v = hn::Set(df, scale);
  VF max_v = hn::Set(df, kMinusInfinity);
  for (size_t j = begin; j < end; j += lanes) max_v = hn::Max(max_v, hn::LoadU(df, scores + j));
  const float max = hn::ReduceMax(df, max_v) * scale;
  const VF max_all = hn::Set(df, max);
  VF sum = hn::Zero(df);
  for (size_t j = begin; j < end; j += lanes) {
    const VF below_max = hn::MulSub(hn::LoadU(df, scores + j), scale_v, max_all);
    const VF p = ExpOfNegative(df, below_max);
    hn::StoreU(p, df, scores + j);
    sum = hn::Add(sum, p);
  }
  return {max, hn::ReduceSum(df, sum)};
}

// Floats from `from` as bf16 from `to`, which may be the same place; n a multiple of two vectors.
HWY_INLINE void RoundToPairs(const float* from, size_t n, float* to) {
  const DF df;
  const hn::Repartition<hwy::bfloat16_t, DF> db;
  const size_t lanes = hn::Lanes(df);
  for (size_t i = 0; i < n; i += 2 * lanes) {
    const VF lower = hn::LoadU(df, from + i);
    const VF upper = hn::LoadU(df, from + i + lanes);
    hn::StoreU(hn::BitCast(df, hn::OrderedDemote2To(db, lower, upper)), df, to + i / 2);
  }
}

// Keys of a span, relative to its start, or rows, or elements of a row.
struct Range {
  size_t begin;
  size_t end;
};

// One call: its arguments and where its scratch memory is.
template <class T, bool kPairs>
class SpanOfKeys {
 public:
  explicit SpanOfKeys(const AttentionSpanArgs& args)
      : args_(args),
        layout_(args.num_rows, args.key_dim, args.value_dim),
        scores_(args.scratch),
        q_(args.scratch + layout_.queries),
        products_(args.scratch + layout_.products),
        panel_(args.scratch + layout_.panel),
        key_split_(kIsCode<T> ? args.key_split : args.key_dim),
        second_part_(hwy::RoundUpTo(key_split_, kElements)),
        seen_{kAttentionSpan, 0} {
    for (size_t r = 0; r < args.num_rows; ++r) {
      if (args.first[r] >= args.last[r]) continue;
      seen_.begin = HWY_MIN(seen_.begin, args.first[r]);
      seen_.end = HWY_MAX(seen_.end, args.last[r]);
    }
  }

  void Run() {
    if (seen_.begin >= seen_.end) {
      std::fill_n(args_.sums, args_.num_rows * args_.value_dim, 0.0f);
      std::fill_n(args_.states, args_.num_rows,
                  SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});
      return;
    }
    ForEachBlock(seen_, [&](size_t block, const Range& keys) HWY_ATTR { Score(block, keys.end); });
    Weigh();
    // A weight of 0 hides a value from the rows that do not see it, unless it is infinite or no
    // number: then each row gets panels of its own, with the same sums.
    if (!SumValues({0, args_.num_rows}, seen_)) {
      for (size_t r = 0; r < args_.num_rows; ++r)
        SumValues({r, r + 1}, {args_.first[r], args_.last[r]});
    }
  }

  // The queries one after another, each part of them in whole words: as they lie, a stride of all
  // heads puts them into the same few sets of the cache.
  void LayOutQueries() {
    for (size_t r = 0; r < args_.num_rows; ++r) {
      float* to = q_ + r * layout_.padded_key;
      std::fill_n(to, layout_.padded_key, 0.0f);
      std::copy_n(args_.q[r], key_split_, to);
      std::copy_n(args_.q[r] + key_split_, args_.key_dim - key_split_, to + second_part_);
      if constexpr (kPairs) RoundToPairs(to, layout_.padded_key, to);
    }
  }

 private:
  static constexpr size_t kElements = kElementsPerWord<kPairs>;

  // Calls body(block, its keys in the range, relative to the block) for all blocks of a range.
  template <class Body>
  HWY_INLINE void ForEachBlock(const Range& range, const Body& body) {
    if (range.begin >= range.end) return;
    for (size_t block = range.begin / kKvBlockTokens; block * kKvBlockTokens < range.end; ++block) {
      const size_t start = block * kKvBlockTokens;
      body(block,
           Range{HWY_MAX(range.begin, start) - start, HWY_MIN(range.end - start, kKvBlockTokens)});
    }
  }

  // The rows that see keys of a block, and what lies between them.
  Range RowsOf(size_t block, const Range& rows) const {
    const size_t start = block * kKvBlockTokens;
    const auto sees = [&](size_t r) {
      return args_.first[r] < args_.last[r] && args_.last[r] > start &&
             args_.first[r] < start + kKvBlockTokens;
    };
    Range found = rows;
    while (found.begin < found.end && !sees(found.begin)) ++found.begin;
    while (found.begin < found.end && !sees(found.end - 1)) --found.end;
    return found;
  }

  // The scores of keys [0, num_keys) of a block.
  void Score(size_t block, size_t num_keys) {
    float* HWY_RESTRICT scores = scores_ + block * kKvBlockTokens;
    if constexpr (kIsCode<T>) {
      MultiplyPart(block, num_keys, {0, key_split_}, scores, kAttentionSpan);
      ScaleScores<false>(scores, kAttentionSpan, args_.k_scales[block], scores);
      if (key_split_ == args_.key_dim) return;
      MultiplyPart(block, num_keys, {key_split_, args_.key_dim}, products_, kKvBlockTokens);
      ScaleScores<true>(products_, kKvBlockTokens, args_.k_scales[block] + kKvBlockTokens, scores);
    } else {
      MultiplyPart(block, num_keys, {0, args_.key_dim}, scores, kAttentionSpan);
    }
  }

  // Products of the queries with the elements [part.begin, part.end) of the keys.
  void MultiplyPart(size_t block, size_t num_keys, const Range& part, float* out,
                    size_t out_stride) {
    const size_t dim = part.end - part.begin;
    const T* keys = static_cast<const T*>(args_.k[block]) + part.begin;
    const T* next = Next(args_.next_k, block);
    if (next != nullptr) next += part.begin;
    const Range rows = RowsOf(block, {0, args_.num_rows});
    ProductArgs product;
    product.a =
        q_ + rows.begin * layout_.padded_key + (part.begin == 0 ? 0 : second_part_) / kElements;
    product.a_stride = layout_.padded_key;
    product.num_rows = rows.end - rows.begin;
    product.out = out + rows.begin * out_stride;
    product.out_stride = out_stride;
    if (product.num_rows <= kFewRows && dim % kElementsOfSquare<kPairs, T> == 0) {
      product.b = keys;
      product.b_stride = args_.key_dim;
      return MultiplyKeys<kPairs, T>(product, num_keys, dim, next);
    }
    PackKeys<kPairs>(keys, args_.key_dim, num_keys, dim, next, panel_);
    product.b = panel_;
    product.b_stride = kKvBlockTokens;
    product.steps = (dim + kElements - 1) / kElements;
    product.num_cols = hwy::RoundUpTo(num_keys, hn::Lanes(DF()));
    Multiply<kPairs>(product);
  }

  static const T* Next(const void* const* blocks, size_t block) {
    return blocks == nullptr ? nullptr : static_cast<const T*>(blocks[block]);
  }

  // Scores of one block (+)= products with its codes, times the scales of its keys.
  template <bool kAdd>
  HWY_INLINE void ScaleScores(const float* products, size_t stride,
                              const float* HWY_RESTRICT scales, float* scores) {
    const DF df;
    const VF unit = hn::Set(df, kUnit<T>);
    for (size_t r = 0; r < args_.num_rows; ++r) {
      const float* from = products + r * stride;
      float* to = scores + r * kAttentionSpan;
      for (size_t i = 0; i < kKvBlockTokens; i += hn::Lanes(df)) {
        const VF scale = hn::Mul(hn::LoadU(df, scales + i), unit);
        const VF before = kAdd ? hn::LoadU(df, to + i) : hn::Zero(df);
        hn::StoreU(hn::MulAdd(hn::LoadU(df, from + i), scale, before), df, to + i);
      }
    }
  }

  // Scores -> weights, in their place: words of zeros for keys that a row does not see.
  void Weigh() {
    const Range all = WholeVectors(seen_);
    for (size_t r = 0; r < args_.num_rows; ++r) {
      float* HWY_RESTRICT p = scores_ + r * kAttentionSpan;
      const Range row{args_.first[r], args_.last[r]};
      Range weighed{all.begin, all.begin};
      args_.states[r] = {-std::numeric_limits<float>::infinity(), 0.0f};
      if (row.begin < row.end) {
        weighed = WholeVectors(row);
        args_.states[r] =
            SoftmaxRow(p, row.begin, row.end, weighed.begin, weighed.end, args_.scale);
        if constexpr (kIsCode<T>) ScaleWeights(row, p);
        if constexpr (kPairs)
          RoundToPairs(p + weighed.begin, weighed.end - weighed.begin, p + weighed.begin / 2);
      }
      std::fill(p + all.begin / kElements, p + weighed.begin / kElements, 0.0f);
      std::fill(p + weighed.end / kElements, p + all.end / kElements, 0.0f);
    }
  }

  // Whole pairs of vectors around some keys of a span.
  static Range WholeVectors(const Range& keys) {
    const size_t step = 2 * hn::Lanes(DF());
    return {keys.begin / step * step, hwy::RoundUpTo(keys.end, step)};
  }

  // The weights of codes: p times the scale of its value, where the row sees it.
  HWY_INLINE void ScaleWeights(const Range& row, float* HWY_RESTRICT p) {
    const DF df;
    const VF unit = hn::Set(df, kUnit<T>);
    ForEachBlock(row, [&](size_t block, const Range& keys) HWY_ATTR {
      float* HWY_RESTRICT weights = p + block * kKvBlockTokens + keys.begin;
      const float* HWY_RESTRICT scales = args_.v_scales[block] + keys.begin;
      ForEachLanes(keys.end - keys.begin, [&](size_t i, size_t n) HWY_ATTR {
        const VF scale = hn::Mul(hn::LoadN(df, scales + i, n), unit);
        hn::StoreN(hn::Mul(hn::LoadN(df, weights + i, n), scale), df, weights + i, n);
      });
    });
  }

  // The sums of some rows over the values of some keys; false if several rows meet a value that is
  // not finite, which leaves the sums undefined.
  bool SumValues(const Range& rows, const Range& range) {
    const size_t dim = args_.value_dim;
    std::fill(args_.sums + rows.begin * dim, args_.sums + rows.end * dim, 0.0f);
    bool is_right = true;
    ForEachBlock(range, [&](size_t block, const Range& keys) HWY_ATTR {
      if (!is_right) return;
      const Range seeing = RowsOf(block, rows);
      if (AreOneQuery(rows)) return AddValues(block, keys, rows);
      const bool finite = PackValues<kPairs>(
          static_cast<const T*>(args_.v[block]), args_.value_stride, keys.begin, keys.end, dim,
          Next(args_.next_v, block), panel_, layout_.padded_value);
      is_right = finite || seeing.end - seeing.begin <= 1;
      const size_t first = keys.begin / kElements;
      ProductArgs product;
      product.a =
          scores_ + seeing.begin * kAttentionSpan + block * kKvBlockTokens / kElements + first;
      product.a_stride = kAttentionSpan;
      product.num_rows = seeing.end - seeing.begin;
      product.b = panel_ + first * layout_.padded_value;
      product.b_stride = layout_.padded_value;
      product.steps = (keys.end + kElements - 1) / kElements - first;
      product.out = args_.sums + seeing.begin * dim;
      product.out_stride = dim;
      product.num_cols = dim;
      product.add = true;
      Multiply<kPairs>(product);
    });
    return is_right;
  }

  // Whether these are few rows that see the same keys, as the heads of one query do.
  bool AreOneQuery(const Range& rows) const {
    const auto differs = [&](size_t r) {
      return args_.first[r] != args_.first[rows.begin] || args_.last[r] != args_.last[rows.begin];
    };
    if (rows.end - rows.begin > kFewRows) return false;
    for (size_t r = rows.begin; r < rows.end; ++r) {
      if (differs(r)) return false;
    }
    return true;
  }

  // Adds values as they lie in the cache: a panel would not pay, and nothing has to be hidden.
  void AddValues(size_t block, const Range& keys, const Range& rows) {
    ProductArgs product;
    product.a = scores_ + rows.begin * kAttentionSpan + block * kKvBlockTokens / kElements;
    product.num_rows = rows.end - rows.begin;
    product.b = args_.v[block];
    product.b_stride = args_.value_stride;
    product.out = args_.sums + rows.begin * args_.value_dim;
    product.out_stride = args_.value_dim;
    product.num_cols = args_.value_dim;
    product.add = true;
    MultiplyValues<kPairs, T>(product, keys.begin, keys.end, Next(args_.next_v, block));
  }

  const AttentionSpanArgs& args_;
  const AttentionScratch layout_;
  float* const scores_;
  float* const q_;
  float* const products_;
  float* const panel_;
  const size_t key_split_;
  const size_t second_part_;  // of a query, where it is laid out
  Range seen_;                // by any row
};

#if HWY_NATIVE_DOT_BF16
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// Calls body(SpanOfKeys) of the type of the cache and the kind of products.
template <class T, bool kMayUsePairs, class Body>
HWY_INLINE void WithProducts(const AttentionSpanArgs& args, const Body& body) {
  if constexpr (kMayUsePairs && kHasPairs) {
    if (args.bf16_products) return body(SpanOfKeys<T, true>(args));
  }
  body(SpanOfKeys<T, false>(args));
}

template <class Body>
HWY_INLINE void WithType(const AttentionSpanArgs& args, const Body& body) {
  switch (args.kv_dtype) {
    case DType::kBF16: return WithProducts<hwy::bfloat16_t, true>(args, body);
    case DType::kF16: return WithProducts<hwy::float16_t, false>(args, body);
    case DType::kI8: return WithProducts<int8_t, true>(args, body);
    case DType::kF8E4M3: return WithProducts<E4M3Code, true>(args, body);
    default: return WithProducts<float, false>(args, body);
  }
}

void Attend(const AttentionSpanArgs& args) {
  WithType(args, [](auto span) HWY_ATTR { span.Run(); });
}

void LayOut(const AttentionSpanArgs& args) {
  WithType(args, [](auto span) HWY_ATTR { span.LayOutQueries(); });
}

void ScaleAndAdd(const float* HWY_RESTRICT x, float x_scale, size_t n, float out_scale,
                 float* HWY_RESTRICT out) {
  const DF df;
  const VF xs = hn::Set(df, x_scale);
  const VF os = hn::Set(df, out_scale);
  ForEachLanes(n, [&](size_t i, size_t m) HWY_ATTR {
    const VF scaled = hn::Mul(hn::LoadN(df, out + i, m), os);
    hn::StoreN(hn::MulAdd(xs, hn::LoadN(df, x + i, m), scaled), df, out + i, m);
  });
}

// x and out may be the same.
void ScaleRow(const float* x, float scale, size_t n, float* out) {
  const DF df;
  ForEachLanes(n, [&](size_t i, size_t m) HWY_ATTR {
    hn::StoreN(hn::Mul(hn::LoadN(df, x + i, m), hn::Set(df, scale)), df, out + i, m);
  });
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
HWY_EXPORT(Attend);
HWY_EXPORT(LayOut);
HWY_EXPORT(ScaleAndAdd);
HWY_EXPORT(ScaleRow);

AttentionScratch::AttentionScratch(size_t num_rows, size_t key_dim, size_t value_dim) {
  constexpr size_t kStep = 32;  // two vectors of every instruction set, and whole lines
  padded_key = hwy::RoundUpTo(key_dim + 1, kStep);  // both parts of a key in pairs
  padded_value = hwy::RoundUpTo(value_dim, kStep);
  queries = num_rows * kAttentionSpan;
  products = queries + num_rows * padded_key;
  panel = products + num_rows * kKvBlockTokens;
  floats = panel + kKvBlockTokens * std::max(padded_key, padded_value);
}

void LayOutQueries(const AttentionSpanArgs& args) noexcept { HWY_DYNAMIC_DISPATCH(LayOut)(args); }

void AttendSpan(const AttentionSpanArgs& args) noexcept { HWY_DYNAMIC_DISPATCH(Attend)(args); }

void MergeSpan(const SoftmaxState& span, const float* span_sums, size_t value_dim,
               SoftmaxState& state, float* sums) noexcept {
  if (span.denominator == 0.0f) return;
  const float max = std::max(state.max, span.max);
  // Most often one of them is the maximum, whose factor is 1.
  const float keep = state.max == max ? 1.0f : std::exp(state.max - max);
  const float add = span.max == max ? 1.0f : std::exp(span.max - max);
  HWY_DYNAMIC_DISPATCH(ScaleAndAdd)(span_sums, add, value_dim, keep, sums);
  state.denominator = state.denominator * keep + span.denominator * add;
  state.max = max;
}

void MergeSink(float score, size_t value_dim, SoftmaxState& state, float* sums) noexcept {
  const float max = std::max(state.max, score);
  const float keep = std::exp(state.max - max);
  HWY_DYNAMIC_DISPATCH(ScaleRow)(sums, keep, value_dim, sums);
  state.denominator = state.denominator * keep + std::exp(score - max);
  state.max = max;
}

void FinishAttention(const SoftmaxState& state, const float* sums, size_t value_dim,
                     float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(ScaleRow)(sums, 1.0f / state.denominator, value_dim, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
