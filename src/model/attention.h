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
// Shapes: k, v [T, kv_heads * D].
void StoreKeysAndValues(ExecContext& context, const ModelConfig& config,
                        std::span<const SequenceChunk> chunks, const KvView& cache, size_t layer,
                        ConstRows k, ConstRows v);

// Key heads [first, first + count).
struct HeadRange {
  size_t first = 0;
  size_t count = 0;
};

// out = softmax(q k^T / sqrt(D)) v with the causal mask and the layer's window, for the queries of
// some key heads; other columns of `out` stay as they are.
// Shapes: q, out [T, heads * D]; every head group of num_heads / num_kv_heads queries shares a key
//   head.
void Attend(ExecContext& context, const ModelConfig& config, std::span<const SequenceChunk> chunks,
            const KvView& cache, size_t layer, HeadRange heads, ConstRows q, Rows out);

}  // namespace switchyard
