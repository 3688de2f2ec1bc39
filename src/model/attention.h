// Attention of one layer over the paged cache, for all chunks of a forward pass.
#pragma once

#include <span>

#include "model/rope.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/model/model.h"

namespace switchyard {

// Cosines and sines of every token of a pass. Shapes: [T, rotary_dim / 2] each, in the arena.
struct RopeTable {
  Rows cos, sin;
};
RopeTable MakeRopeTable(ExecContext& context, const RopeConfig& config,
                        const std::vector<float>& fixed_frequencies,
                        std::span<const SequenceChunk> chunks, size_t num_tokens);

// Writes keys and values of the pass into the layer's cache, rounded to its type.
// Shapes: k [T, heads * key_dim], v [T, heads * value_dim] of config.kv_shape().
void StoreKeysAndValues(ExecContext& context, const ModelConfig& config,
                        std::span<const SequenceChunk> chunks, const KvView& cache, size_t layer,
                        ConstRows k, ConstRows v);

// Queries of key heads [first, first + count), `group` for each of them.
struct QueryHeads {
  size_t first = 0;
  size_t count = 0;
  size_t group = 1;  // 1 to 512
  const float* sinks =
      nullptr;  // [count * group] a score of each query head without a key, or null
};

// out = softmax(scale * q k^T) v with the causal mask and the layer's window.
// With act_dtype kBF16, queries and weights are rounded to bf16 where that doubles the rate: see
// kernels::AttentionSpanArgs.
// Shapes: q [T, count * group * key_dim], out [T, count * group * D] of config.kv_shape(), D the
//   width of values: the columns of these heads alone.
void Attend(ExecContext& context, const ModelConfig& config, std::span<const SequenceChunk> chunks,
            const KvView& cache, size_t layer, DType act_dtype, const QueryHeads& heads,
            ConstRows q, Rows out);

}  // namespace switchyard
