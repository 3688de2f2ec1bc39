#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/convert/convert.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

using kernels::kAttentionSpan;
using kernels::kBlocksPerSpan;
static_assert(kernels::kKvBlockTokens == kKvBlockSize);

// Queries (times the heads that share a key head) that one task takes together.
constexpr size_t kRowsPerTile = 32;

// Start of keys (side 0) or values (side 1) of a head in a block.
std::byte* HeadBlock(const KvLayerView& layer, const ModelConfig& config, DType dtype,
                     uint32_t block, size_t side, size_t kv_head) {
  const size_t head_bytes = kKvBlockSize * config.head_dim * DTypeBytes(dtype);
  return layer.data + block * layer.block_bytes +
         (side * config.num_kv_heads + kv_head) * head_bytes;
}

// Some consecutive queries of one chunk against one key head.
struct Tile {
  const SequenceChunk* chunk;
  size_t first_row;  // row of the pass that holds the first query
  size_t position;   // of the first query
  size_t num_queries;
  size_t kv_head;
  size_t first_span;  // spans of keys that any of the queries sees
  size_t end_span;
};

// First key that a query sees.
size_t FirstKey(size_t position, size_t window) {
  return window != 0 && position + 1 > window ? position + 1 - window : 0;
}

std::span<Tile> MakeTiles(ExecContext& context, const ModelConfig& config,
                          std::span<const SequenceChunk> chunks, size_t window, HeadRange heads) {
  const size_t group = config.num_heads / config.num_kv_heads;
  const size_t queries_per_tile = std::max<size_t>(1, kRowsPerTile / group);
  size_t count = 0;
  for (const SequenceChunk& chunk : chunks) {
    count += (chunk.tokens.size() + queries_per_tile - 1) / queries_per_tile * heads.count;
  }
  const std::span<Tile> tiles = context.arena.AllocateSpan<Tile>(count);
  size_t next = 0;
  size_t chunk_row = 0;
  for (const SequenceChunk& chunk : chunks) {
    // Later queries see more keys: start with them, so that the longest task is not the last one.
    for (size_t end = chunk.tokens.size(); end > 0;) {
      const size_t begin = (end - 1) / queries_per_tile * queries_per_tile;
      for (size_t kv_head = heads.first; kv_head < heads.first + heads.count; ++kv_head) {
        const size_t position = chunk.position + begin;
        tiles[next++] = {&chunk,
                         chunk_row + begin,
                         position,
                         end - begin,
                         kv_head,
                         FirstKey(position, window) / kAttentionSpan,
                         (chunk.position + end - 1) / kAttentionSpan + 1};
      }
      end = begin;
    }
    chunk_row += chunk.tokens.size();
  }
  return tiles;
}

// Results of one tile over one span, or over all of them.
struct Partial {
  float* sums;                    // [rows, D]
  kernels::SoftmaxState* states;  // [rows]
};

// One layer's attention, with what its tasks share.
class LayerAttention {
 public:
  LayerAttention(ExecContext& context, const ModelConfig& config, const KvView& cache, size_t layer,
                 ConstRows q, Rows out)
      : context_(context),
        config_(config),
        cache_(cache),
        layer_(cache.layers[layer]),
        window_(config.layers[layer].window),
        group_(config.num_heads / config.num_kv_heads),
        max_rows_(std::max(kRowsPerTile, group_)),
        q_(q),
        out_(out),
        scores_(context.arena
                    .AllocateSpan<float>(context.pool.num_threads() * max_rows_ * kAttentionSpan)
                    .data()) {}

  void Run(std::span<const SequenceChunk> chunks, HeadRange heads) {
    const std::span<Tile> tiles = MakeTiles(context_, config_, chunks, window_, heads);
    size_t max_spans = 0;
    for (const Tile& tile : tiles) max_spans = std::max(max_spans, tile.end_span - tile.first_span);
    if (tiles.size() < 2 * context_.pool.num_threads() && max_spans > 1) {
      RunSpansInParallel(tiles, max_spans);
    } else {
      RunTilesInParallel(tiles);
    }
  }

 private:
  Partial AllocatePartials(size_t count) {
    return {context_.arena.AllocateSpan<float>(count * max_rows_ * config_.head_dim).data(),
            context_.arena.AllocateSpan<kernels::SoftmaxState>(count * max_rows_).data()};
  }
  Partial PartialAt(const Partial& all, size_t index) const {
    return {all.sums + index * max_rows_ * config_.head_dim, all.states + index * max_rows_};
  }

  // A worker takes a tile through all of its spans.
  void RunTilesInParallel(std::span<const Tile> tiles) {
    const Partial of_span = AllocatePartials(context_.pool.num_threads());
    const Partial totals = AllocatePartials(context_.pool.num_threads());
    context_.pool.Run(tiles.size(), [&](size_t task, size_t worker) {
      const Tile& tile = tiles[task];
      const Partial total = PartialAt(totals, worker);
      Clear(tile, total);
      for (size_t span = tile.first_span; span < tile.end_span; ++span) {
        AttendSpan(tile, span, worker, PartialAt(of_span, worker));
        Merge(tile, PartialAt(of_span, worker), total);
      }
      Finish(tile, total);
    });
  }

  // Few tiles over long contexts: spans are spread over the workers, then merged in the same order
  // as above, which gives the same bits.
  void RunSpansInParallel(std::span<const Tile> tiles, size_t max_spans) {
    const Partial of_spans = AllocatePartials(tiles.size() * max_spans);
    const Partial totals = AllocatePartials(tiles.size());
    context_.pool.Run(tiles.size() * max_spans, [&](size_t task, size_t worker) {
      const Tile& tile = tiles[task / max_spans];
      const size_t span = tile.first_span + task % max_spans;
      if (span < tile.end_span) AttendSpan(tile, span, worker, PartialAt(of_spans, task));
    });
    context_.pool.Run(tiles.size(), [&](size_t index, size_t) {
      const Tile& tile = tiles[index];
      const Partial total = PartialAt(totals, index);
      Clear(tile, total);
      for (size_t span = tile.first_span; span < tile.end_span; ++span) {
        Merge(tile, PartialAt(of_spans, index * max_spans + span - tile.first_span), total);
      }
      Finish(tile, total);
    });
  }

  void AttendSpan(const Tile& tile, size_t span, size_t worker, const Partial& result) const {
    const size_t num_rows = tile.num_queries * group_;
    const size_t start = span * kAttentionSpan;
    const float* q_rows[512];
    uint32_t first[512];
    uint32_t last[512];
    SY_CHECK(num_rows <= 512);
    for (size_t i = 0; i < tile.num_queries; ++i) {
      const size_t position = tile.position + i;
      const auto clip = [&](size_t key) {
        return static_cast<uint32_t>(std::min(kAttentionSpan, key > start ? key - start : 0));
      };
      for (size_t h = 0; h < group_; ++h) {
        q_rows[i * group_ + h] =
            q_.Row(tile.first_row + i) + (tile.kv_head * group_ + h) * config_.head_dim;
        first[i * group_ + h] = clip(FirstKey(position, window_));
        last[i * group_ + h] = clip(position + 1);
      }
    }
    const BlockTable& table = tile.chunk->tables[layer_.group];
    const void* k[kBlocksPerSpan] = {};
    const void* v[kBlocksPerSpan] = {};
    for (size_t b = 0; b < kBlocksPerSpan; ++b) {
      const size_t block = span * kBlocksPerSpan + b;
      if (block < table.first_block || block - table.first_block >= table.blocks.size())
        continue;  // not visible
      const uint32_t id = table.blocks[block - table.first_block];
      k[b] = HeadBlock(layer_, config_, cache_.dtype, id, 0, tile.kv_head);
      v[b] = HeadBlock(layer_, config_, cache_.dtype, id, 1, tile.kv_head);
    }
    kernels::AttentionSpanArgs args;
    args.q = q_rows;
    args.num_rows = num_rows;
    args.first = first;
    args.last = last;
    args.k = k;
    args.v = v;
    args.kv_dtype = cache_.dtype;
    args.head_dim = config_.head_dim;
    args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
    args.scores = scores_ + worker * max_rows_ * kAttentionSpan;
    args.sums = result.sums;
    args.states = result.states;
    kernels::AttendSpan(args);
  }

  void Clear(const Tile& tile, const Partial& total) const {
    const size_t num_rows = tile.num_queries * group_;
    std::fill_n(total.sums, num_rows * config_.head_dim, 0.0f);
    std::fill_n(total.states, num_rows,
                kernels::SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});
  }

  void Merge(const Tile& tile, const Partial& span, const Partial& total) const {
    for (size_t r = 0; r < tile.num_queries * group_; ++r) {
      kernels::MergeSpan(span.states[r], span.sums + r * config_.head_dim, config_.head_dim,
                         total.states[r], total.sums + r * config_.head_dim);
    }
  }

  void Finish(const Tile& tile, const Partial& total) const {
    for (size_t r = 0; r < tile.num_queries * group_; ++r) {
      float* out = out_.Row(tile.first_row + r / group_) +
                   (tile.kv_head * group_ + r % group_) * config_.head_dim;
      kernels::FinishAttention(total.states[r], total.sums + r * config_.head_dim, config_.head_dim,
                               out);
    }
  }

  ExecContext& context_;
  const ModelConfig& config_;
  const KvView& cache_;
  const KvLayerView& layer_;
  size_t window_;
  size_t group_;
  size_t max_rows_;
  ConstRows q_;
  Rows out_;
  float* scores_;
};

}  // namespace

RopeTable MakeRopeTable(ExecContext& context, const RopeConfig& config,
                        const std::vector<float>& fixed_frequencies,
                        std::span<const SequenceChunk> chunks, size_t num_tokens) {
  const size_t half = config.rotary_dim / 2;
  const RopeTable table{context.arena.AllocateRows(num_tokens, half),
                        context.arena.AllocateRows(num_tokens, half)};
  size_t row = 0;
  for (const SequenceChunk& chunk : chunks) {
    const bool own = FrequenciesDependOnSequence(config);
    const std::vector<float> own_frequencies =
        own ? InverseFrequencies(config, chunk.sequence_limit) : std::vector<float>();
    const std::vector<float>& frequencies = own ? own_frequencies : fixed_frequencies;
    constexpr size_t kTokensPerTask = 32;
    context.pool.Run(
        (chunk.tokens.size() + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task, size_t) {
          const size_t end = std::min(chunk.tokens.size(), (task + 1) * kTokensPerTask);
          for (size_t t = task * kTokensPerTask; t < end; ++t) {
            RopeAngles(config, frequencies, chunk.position + t, table.cos.Row(row + t),
                       table.sin.Row(row + t));
          }
        });
    row += chunk.tokens.size();
  }
  return table;
}

void StoreKeysAndValues(ExecContext& context, const ModelConfig& config,
                        std::span<const SequenceChunk> chunks, const KvView& cache, size_t layer,
                        ConstRows k, ConstRows v) {
  const KvLayerView& view = cache.layers[layer];
  const size_t row_bytes = config.head_dim * DTypeBytes(cache.dtype);
  size_t chunk_row = 0;
  for (const SequenceChunk& chunk : chunks) {
    const BlockTable& table = chunk.tables[view.group];
    constexpr size_t kTokensPerTask = 16;
    context.pool.Run(
        (chunk.tokens.size() + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task, size_t) {
          const size_t end = std::min(chunk.tokens.size(), (task + 1) * kTokensPerTask);
          for (size_t t = task * kTokensPerTask; t < end; ++t) {
            const size_t position = chunk.position + t;
            const uint32_t block = table.blocks[position / kKvBlockSize - table.first_block];
            for (size_t h = 0; h < config.num_kv_heads; ++h) {
              const size_t offset = position % kKvBlockSize * row_bytes;
              kernels::ConvertFromF32(k.Row(chunk_row + t) + h * config.head_dim, config.head_dim,
                                      cache.dtype,
                                      HeadBlock(view, config, cache.dtype, block, 0, h) + offset);
              kernels::ConvertFromF32(v.Row(chunk_row + t) + h * config.head_dim, config.head_dim,
                                      cache.dtype,
                                      HeadBlock(view, config, cache.dtype, block, 1, h) + offset);
            }
          }
        });
    chunk_row += chunk.tokens.size();
  }
}

void Attend(ExecContext& context, const ModelConfig& config, std::span<const SequenceChunk> chunks,
            const KvView& cache, size_t layer, HeadRange heads, ConstRows q, Rows out) {
  const ArenaScope scope(context.arena);
  LayerAttention(context, config, cache, layer, q, out).Run(chunks, heads);
}

}  // namespace switchyard
