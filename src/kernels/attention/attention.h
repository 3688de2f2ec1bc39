// Softmax attention of a few queries over one span of keys, and the merging of spans.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// Keys of one block of the KV cache: rows of key_dim elements, back to back.
inline constexpr size_t kKvBlockTokens = 64;

// Keys that one call covers. Spans start at multiples of this position in every sequence, so the
// order in which a query's keys are summed depends on the query's position alone: not on the chunk,
// the batch or the threads.
inline constexpr size_t kAttentionSpan = 256;
inline constexpr size_t kBlocksPerSpan = kAttentionSpan / kKvBlockTokens;

// Partial softmax of one query over some keys: sum of exp(s - max) * v, its denominator and the
// max.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
struct SoftmaxState {
  float max;
  float denominator;
};

// Scratch memory of one call. Offsets and sizes in floats:
//
//   scores, then weights            queries          products of codes   panel of a block
//   [num_rows, kAttentionSpan] | [.., padded_key] | [.., kKvBlockTokens] | ... |
struct AttentionScratch {
  AttentionScratch(size_t num_rows, size_t key_dim, size_t value_dim);
  size_t padded_key, padded_value;  // whole vectors
  size_t queries, products, panel;
  size_t floats;  // in all
};

// Shapes: q: num_rows pointers to key_dim f32; k: kBlocksPerSpan pointers to blocks of
//   kKvBlockTokens rows [key_dim] of kv_dtype (kF32, kBF16, kF16, kI8, kF8E4M3), v: the same of
//   rows of value_dim elements, value_stride apart (values may be the beginning of the keys), of
//   which only rows up to the last visible key are read; scratch: AttentionScratch floats of its
//   own for each call at a time; sums [num_rows, value_dim] and states [num_rows] are written.
// Codes (kI8, kF8E4M3) have scales: k_scales: kBlocksPerSpan pointers to [kKvBlockTokens] for the
//   elements [0, key_split) of the keys, then [kKvBlockTokens] for the others unless key_split =
//   key_dim; v_scales: pointers to [kKvBlockTokens]. What was not a number in a row shows in the
//   scale, so a code is never NaN. Scores and weights are scaled, not the codes.
// With bf16_products, where the CPU multiplies bf16 pairs and the cache holds no more than bf16
// does (kBF16 and codes), queries and weights are rounded to bf16, which doubles the arithmetic
// rate; products, sums and the softmax stay f32. Row r sees keys first[r] <= j < last[r] of the
// span (j relative to its start); first >= last means none, and gives max = -infinity, denominator
// 0 and sums 0.
struct AttentionSpanArgs {
  const float* const* q = nullptr;
  size_t num_rows = 0;
  const uint32_t* first = nullptr;
  const uint32_t* last = nullptr;
  const void* const* k = nullptr;
  const void* const* v = nullptr;
  DType kv_dtype = DType::kF32;
  size_t key_dim = 0;
  size_t value_dim = 0;
  size_t value_stride = 0;
  const float* const* k_scales = nullptr;
  const float* const* v_scales = nullptr;
  size_t key_split = 0;
  // Blocks that the caller reads next, fetched from memory meanwhile; null, or some of them null.
  const void* const* next_k = nullptr;
  const void* const* next_v = nullptr;
  float scale = 1.0f;  // of the dot products, > 0
  bool bf16_products = false;
  float* scratch = nullptr;
  float* sums = nullptr;
  SoftmaxState* states = nullptr;
};
// Puts the queries into the scratch memory, for all spans that follow with the same queries: before
// the first AttendSpan. Reads q, num_rows, the type and the sizes of the keys.
void LayOutQueries(const AttentionSpanArgs& args) noexcept;
void AttendSpan(const AttentionSpanArgs& args) noexcept;

// Adds a span's result to what earlier spans gave: sums = sums * a + span_sums * b. Start from max
// = -infinity, denominator 0 and sums 0.
void MergeSpan(const SoftmaxState& span, const float* span_sums, size_t value_dim,
               SoftmaxState& state, float* sums) noexcept;

// A key without a value that every query sees with this score (attention sink): it takes its share
// of the softmax.
void MergeSink(float score, size_t value_dim, SoftmaxState& state, float* sums) noexcept;

// out = sums / denominator.
void FinishAttention(const SoftmaxState& state, const float* sums, size_t value_dim,
                     float* out) noexcept;

// The scalar reference of a whole query, in f64, over rows of a float dtype that lie back to back.
// Shapes: q [key_dim]; k [keys, key_dim]; v: rows of value_dim elements, value_stride apart.
struct PlainAttention {
  const float* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  DType kv_dtype = DType::kF32;
  size_t key_dim = 0;
  size_t value_dim = 0;
  size_t value_stride = 0;
  double scale = 1.0;
};
// Shapes: out [value_dim] of the keys first <= j < last.
void AttentionReference(const PlainAttention& args, size_t first, size_t last, float* out);

}  // namespace switchyard::kernels
