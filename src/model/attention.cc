#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_codes.h"
#include "kernels/convert/convert.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

using kernels::kAttentionSpan;
using kernels::kBlocksPerSpan;
static_assert(kernels::kKvBlockTokens == kKvBlockSize);

// Queries (times the heads that share a key head) that one task takes together: many, so that
// laying out a block of keys is little beside the products with it, but all of them in a core's
// cache.
constexpr size_t kMostRowsPerTile = 256;
constexpr size_t kFewestRowsPerTile = 32;

// As many as leave each thread a few tiles.
size_t RowsPerTile(size_t num_rows, size_t num_threads) {
  size_t rows = kMostRowsPerTile;
  while (rows > kFewestRowsPerTile && num_rows < 4 * num_threads * rows) rows /= 2;
  return rows;
}

std::byte* BlockAt(const KvLayerView& layer, uint32_t block) {
  return layer.data + block * layer.block_bytes;
}

// Some consecutive queries of one chunk against one key head.
struct Tile {
  const SequenceChunk* chunk;
  size_t first_row;  // row of the pass that holds the first query
  size_t position;   // of the first query
  size_t num_queries;
  size_t head;        // of the range
  size_t first_span;  // spans of keys that any of the queries sees
  size_t end_span;
};

// First key that a query sees.
size_t FirstKey(size_t position, size_t window) {
  return window != 0 && position + 1 > window ? position + 1 - window : 0;
}

std::span<Tile> MakeTiles(ExecContext& context, std::span<const SequenceChunk> chunks,
                          size_t window, const QueryHeads& heads, size_t rows_per_tile) {
  const size_t queries_per_tile = std::max<size_t>(1, rows_per_tile / heads.group);
  size_t count = 0;
  for (const SequenceChunk& chunk : chunks)
    count += (chunk.tokens.size() + queries_per_tile - 1) / queries_per_tile * heads.count;
  const std::span<Tile> tiles = context.arena.AllocateSpan<Tile>(count);
  size_t next = 0;
  size_t chunk_row = 0;
  for (const SequenceChunk& chunk : chunks) {
    // Later queries see more keys: start with them, so that the longest task is not the last one.
    for (size_t end = chunk.tokens.size(); end > 0;) {
      const size_t begin = (end - 1) / queries_per_tile * queries_per_tile;
      for (size_t head = 0; head < heads.count; ++head) {
        const size_t position = chunk.position + begin;
        tiles[next++] = {&chunk,
                         chunk_row + begin,
                         position,
                         end - begin,
                         head,
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
  float* sums;                    // [rows, value width]
  kernels::SoftmaxState* states;  // [rows]
};

// One layer's attention, with what its tasks share.
class LayerAttention {
 public:
  LayerAttention(ExecContext& context, const ModelConfig& config, const KvView& cache, size_t layer,
                 DType act_dtype, const QueryHeads& heads, ConstRows q, Rows out)
      : context_(context),
        layout_(config, cache.dtype),
        layer_(cache.layers[layer]),
        window_(config.layers[layer].window),
        bf16_products_(act_dtype == DType::kBF16),
        heads_(heads),
        group_(heads.group),
        shape_(layout_.shape()),
        width_(heads.count == 0 ? 0 : out.cols / (heads.count * heads.group)),
        scale_(static_cast<float>(config.score_scale /
                                  std::sqrt(static_cast<double>(config.head_dim)))),
        rows_per_tile_(RowsPerTile(q.rows * heads.count * heads.group, context.pool.num_threads())),
        max_rows_(std::max(rows_per_tile_, group_)),
        q_(q),
        out_(out),
        scratch_floats_(kernels::AttentionScratch(max_rows_, shape_.key_dim, width_).floats),
        scratch_(context.arena.AllocateSpan<float>(context.pool.num_threads() * scratch_floats_)
                     .data()) {}

  void Run(std::span<const SequenceChunk> chunks) {
    const std::span<Tile> tiles = MakeTiles(context_, chunks, window_, heads_, rows_per_tile_);
    size_t max_spans = 0;
    for (const Tile& tile : tiles) max_spans = std::max(max_spans, tile.end_span - tile.first_span);
    if (tiles.size() < 4 * context_.pool.num_threads() && max_spans > 1) {
      RunSpansInParallel(tiles, max_spans);
    } else {
      RunTilesInParallel(tiles);
    }
  }

 private:
  Partial AllocatePartials(size_t count) {
    return {context_.arena.AllocateSpan<float>(count * max_rows_ * width_).data(),
            context_.arena.AllocateSpan<kernels::SoftmaxState>(count * max_rows_).data()};
  }
  Partial PartialAt(const Partial& all, size_t index) const {
    return {all.sums + index * max_rows_ * width_, all.states + index * max_rows_};
  }

  // A worker takes a tile through all of its spans.
  void RunTilesInParallel(std::span<const Tile> tiles) {
    const Partial of_span = AllocatePartials(context_.pool.num_threads());
    const Partial totals = AllocatePartials(context_.pool.num_threads());
    context_.pool.Run(tiles.size(), [&](size_t task, size_t worker) {
      const Tile& tile = tiles[task];
      const Partial total = PartialAt(totals, worker);
      Clear(tile, total);
      TileReader reader(*this, tile, worker);
      for (size_t span = tile.first_span; span < tile.end_span; ++span) {
        reader.Attend(span, span + 1 < tile.end_span, PartialAt(of_span, worker));
        Merge(tile, PartialAt(of_span, worker), total);
      }
      Finish(tile, total);
    });
  }

  // Few tiles over long contexts: runs of spans are spread over the workers, then merged in the
  // same order as above, which gives the same bits.
  void RunSpansInParallel(std::span<const Tile> tiles, size_t max_spans) {
    const size_t runs_wanted =
        std::max<size_t>(1, 4 * context_.pool.num_threads() / std::max<size_t>(1, tiles.size()));
    const size_t run = (max_spans + runs_wanted - 1) / runs_wanted;
    const size_t runs = (max_spans + run - 1) / run;
    const Partial of_spans = AllocatePartials(tiles.size() * max_spans);
    const Partial totals = AllocatePartials(tiles.size());
    context_.pool.Run(tiles.size() * runs, [&](size_t task, size_t worker) {
      const size_t tile = task / runs;
      const size_t first = tiles[tile].first_span + task % runs * run;
      TileReader reader(*this, tiles[tile], worker);
      for (size_t span = first; span < std::min(first + run, tiles[tile].end_span); ++span) {
        reader.Attend(span, span + 1 < first + run,
                      PartialAt(of_spans, tile * max_spans + span - tiles[tile].first_span));
      }
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

  // Where one span of a key head lies in the cache.
  struct SpanBlocks {
    const void* k[kBlocksPerSpan] = {};
    const void* v[kBlocksPerSpan] = {};
    const float* k_scales[kBlocksPerSpan] = {};
    const float* v_scales[kBlocksPerSpan] = {};
  };
  SpanBlocks FindBlocks(const Tile& tile, size_t span) const {
    const BlockTable& table = tile.chunk->tables[layer_.group];
    const size_t head = heads_.first + tile.head;
    SpanBlocks found;
    for (size_t b = 0; b < kBlocksPerSpan; ++b) {
      const size_t block = span * kBlocksPerSpan + b;
      if (block < table.first_block || block - table.first_block >= table.blocks.size())
        continue;  // not visible
      const std::byte* data = BlockAt(layer_, table.blocks[block - table.first_block]);
      found.k[b] = data + layout_.Keys(head);
      found.v[b] = data + layout_.Values(head);
      if (!IsKvCode(layout_.dtype())) continue;
      found.k_scales[b] = reinterpret_cast<const float*>(data + layout_.KeyScales(head));
      found.v_scales[b] = reinterpret_cast<const float*>(data + layout_.ValueScales(head));
    }
    return found;
  }

  // Takes one tile through some of its spans, on one worker.
  class TileReader {
   public:
    TileReader(const LayerAttention& layer, const Tile& tile, size_t worker)
        : layer_(layer), tile_(tile) {
      const size_t group = layer.group_;
      const size_t num_rows = tile.num_queries * group;
      SY_CHECK(num_rows <= kMostRows);
      for (size_t r = 0; r < num_rows; ++r) {
        q_[r] = layer.q_.Row(tile.first_row + r / group) +
                (tile.head * group + r % group) * layer.shape_.key_dim;
      }
      args_.q = q_;
      args_.num_rows = num_rows;
      args_.first = first_;
      args_.last = last_;
      args_.kv_dtype = layer.layout_.dtype();
      args_.key_dim = layer.shape_.key_dim;
      args_.value_dim = layer.width_;
      args_.value_stride =
          layer.shape_.value_dim == 0 ? layer.shape_.key_dim : layer.shape_.value_dim;
      args_.key_split = layer.layout_.key_split();
      args_.scale = layer.scale_;
      args_.bf16_products = layer.bf16_products_;
      args_.scratch = layer.scratch_ + worker * layer.scratch_floats_;
      kernels::LayOutQueries(args_);
    }

    // fetch_next: whether this worker goes on with the span behind.
    void Attend(size_t span, bool fetch_next, const Partial& result) {
      const size_t start = span * kAttentionSpan;
      const auto clip = [&](size_t key) {
        return static_cast<uint32_t>(std::min(kAttentionSpan, key > start ? key - start : 0));
      };
      for (size_t r = 0; r < args_.num_rows; ++r) {
        const size_t position = tile_.position + r / layer_.group_;
        first_[r] = clip(FirstKey(position, layer_.window_));
        last_[r] = clip(position + 1);
      }
      const SpanBlocks blocks = layer_.FindBlocks(tile_, span);
      const SpanBlocks next = fetch_next ? layer_.FindBlocks(tile_, span + 1) : SpanBlocks();
      args_.k = blocks.k;
      args_.v = blocks.v;
      args_.k_scales = blocks.k_scales;
      args_.v_scales = blocks.v_scales;
      args_.next_k = next.k;
      args_.next_v = layer_.shape_.value_dim == 0 ? nullptr : next.v;  // fetched with the keys
      args_.sums = result.sums;
      args_.states = result.states;
      kernels::AttendSpan(args_);
    }

   private:
    static constexpr size_t kMostRows = 512;
    const LayerAttention& layer_;
    const Tile& tile_;
    kernels::AttentionSpanArgs args_;
    const float* q_[kMostRows];
    uint32_t first_[kMostRows];
    uint32_t last_[kMostRows];
  };

  void Clear(const Tile& tile, const Partial& total) const {
    const size_t num_rows = tile.num_queries * group_;
    std::fill_n(total.sums, num_rows * width_, 0.0f);
    std::fill_n(total.states, num_rows,
                kernels::SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});
  }

  void Merge(const Tile& tile, const Partial& span, const Partial& total) const {
    for (size_t r = 0; r < tile.num_queries * group_; ++r) {
      kernels::MergeSpan(span.states[r], span.sums + r * width_, width_, total.states[r],
                         total.sums + r * width_);
    }
  }

  void Finish(const Tile& tile, const Partial& total) const {
    for (size_t r = 0; r < tile.num_queries * group_; ++r) {
      const size_t head = tile.head * group_ + r % group_;
      float* sums = total.sums + r * width_;
      if (heads_.sinks != nullptr)
        kernels::MergeSink(heads_.sinks[head], width_, total.states[r], sums);
      kernels::FinishAttention(total.states[r], sums, width_,
                               out_.Row(tile.first_row + r / group_) + head * width_);
    }
  }

  ExecContext& context_;
  KvBlockLayout layout_;
  const KvLayerView& layer_;
  size_t window_;
  bool bf16_products_;
  const QueryHeads& heads_;
  size_t group_;
  KvShape shape_;
  size_t width_;  // of a value
  float scale_;
  size_t rows_per_tile_;
  size_t max_rows_;
  ConstRows q_;
  Rows out_;
  size_t scratch_floats_;
  float* scratch_;
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

namespace {

// Writes rows into their places of a block.
class KvRowWriter {
 public:
  explicit KvRowWriter(const KvBlockLayout& layout)
      : layout_(layout), dtype_(layout.dtype()), shape_(layout.shape()) {}

  void WriteKey(const float* row, size_t head, size_t place, std::byte* block) const {
    std::byte* to = block + layout_.Keys(head) + place * BytesOf(dtype_, shape_.key_dim);
    if (!IsKvCode(dtype_)) return kernels::ConvertFromF32(row, shape_.key_dim, dtype_, to);
    const size_t split = layout_.key_split();
    std::byte* scale = block + layout_.KeyScales(head) + place * sizeof(float);
    Encode(row, split, to, scale);
    if (split == shape_.key_dim) return;
    Encode(row + split, shape_.key_dim - split, to + BytesOf(dtype_, split),
           scale + kKvBlockSize * sizeof(float));
  }

  void WriteValue(const float* row, size_t head, size_t place, std::byte* block) const {
    std::byte* to = block + layout_.Values(head) + place * BytesOf(dtype_, shape_.value_dim);
    if (!IsKvCode(dtype_)) return kernels::ConvertFromF32(row, shape_.value_dim, dtype_, to);
    Encode(row, shape_.value_dim, to, block + layout_.ValueScales(head) + place * sizeof(float));
  }

 private:
  void Encode(const float* row, size_t dim, std::byte* to, std::byte* scale_to) const {
    const float scale = kernels::EncodeKvRow(row, dim, dtype_, to);
    std::memcpy(scale_to, &scale, sizeof(scale));
  }

  const KvBlockLayout& layout_;
  DType dtype_;
  const KvShape& shape_;
};

}  // namespace

void StoreKeysAndValues(ExecContext& context, const ModelConfig& config,
                        std::span<const SequenceChunk> chunks, const KvView& cache, size_t layer,
                        ConstRows k, ConstRows v) {
  const KvLayerView& view = cache.layers[layer];
  const KvBlockLayout layout(config, cache.dtype);
  const KvShape& shape = layout.shape();
  const KvRowWriter writer(layout);
  size_t chunk_row = 0;
  for (const SequenceChunk& chunk : chunks) {
    const BlockTable& table = chunk.tables[view.group];
    constexpr size_t kTokensPerTask = 4;
    context.pool.Run((chunk.tokens.size() + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task,
                                                                                      size_t) {
      const size_t end = std::min(chunk.tokens.size(), (task + 1) * kTokensPerTask);
      for (size_t t = task * kTokensPerTask; t < end; ++t) {
        const size_t position = chunk.position + t;
        const size_t place = position % kKvBlockSize;
        std::byte* block = BlockAt(view, table.blocks[position / kKvBlockSize - table.first_block]);
        for (size_t h = 0; h < shape.heads; ++h) {
          writer.WriteKey(k.Row(chunk_row + t) + h * shape.key_dim, h, place, block);
          if (shape.value_dim != 0)
            writer.WriteValue(v.Row(chunk_row + t) + h * shape.value_dim, h, place, block);
        }
      }
    });
    chunk_row += chunk.tokens.size();
  }
}

void Attend(ExecContext& context, const ModelConfig& config, std::span<const SequenceChunk> chunks,
            const KvView& cache, size_t layer, DType act_dtype, const QueryHeads& heads,
            ConstRows q, Rows out) {
  const ArenaScope scope(context.arena);
  LayerAttention(context, config, cache, layer, act_dtype, heads, q, out).Run(chunks);
}

}  // namespace switchyard
