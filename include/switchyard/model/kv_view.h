// The KV cache as a forward pass sees it. The engine owns the memory and hands out the blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/model/config.h"

namespace switchyard {

// Tokens of one block of the cache.
inline constexpr size_t kKvBlockSize = 64;

// Layers that see the same keys share one block table: all full layers, and all layers of one
// window. A window's blocks can be freed behind it, so its memory stops growing.
struct KvGroup {
  size_t window = 0;           // 0 = all keys
  std::vector<size_t> layers;  // layer indices, ascending
};
// The groups of a model, in the order of their first layers.
std::vector<KvGroup> PlanKvGroups(const ModelConfig& config);

// Types of codes: each row has scales beside it, and is code * scale. All others are plain floats.
constexpr bool IsKvCode(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8E4M3; }

// Where the rows of a block lie. H heads, K key_dim and V value_dim of the model's KvShape:
//
//   0            keys             values           key scales       value scales      bytes()
//   | head 0 | head 1 | .. | head 0 | head 1 | .. | head 0 | .. | head 0 | .. |
//      64 rows of K           64 rows of V           P x 64          64
//   |<-------- elements of the cache's type ----->|<---- f32, codes only ----->|
//
// The scale of a row is that of its token and head alone: the largest magnitude / 127 (kI8) or
// / 448 (kF8E4M3). A latent row [c ; r] has P = 2 scales, one for the part c that is normalised and
// one for the rotated part r, which is not; other keys have P = 1. With value_dim = 0 the values
// are the beginning of the keys, and so are their scales.
class KvBlockLayout {
 public:
  KvBlockLayout(const ModelConfig& config, DType dtype);

  const KvShape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  // Keys are [0, key_split) and [key_split, key_dim), each with its scale; the second may be empty.
  size_t key_split() const { return key_split_; }
  size_t num_key_parts() const { return key_split_ < shape_.key_dim ? 2 : 1; }

  size_t bytes() const { return bytes_; }
  // Offsets of what a head has in a block.
  size_t Keys(size_t head) const { return head * RowsBytes(shape_.key_dim); }
  size_t Values(size_t head) const;
  size_t KeyScales(size_t head) const { return scales_ + head * num_key_parts() * kScalesBytes; }
  size_t ValueScales(size_t head) const;

 private:
  static constexpr size_t kScalesBytes = kKvBlockSize * sizeof(float);
  size_t RowsBytes(size_t dim) const { return kKvBlockSize * dim * DTypeBytes(dtype_); }

  KvShape shape_;
  DType dtype_;
  size_t key_split_;
  size_t scales_;  // offset of the first scale
  size_t bytes_;
};

// Memory of one layer. Block b is at data + b * block_bytes, as KvBlockLayout says.
struct KvLayerView {
  std::byte* data = nullptr;
  size_t block_bytes = 0;
  size_t group = 0;  // index into the groups and into SequenceChunk::tables
};

// The whole cache; views are valid as long as it lives.
struct KvView {
  DType dtype = DType::kF32;
  std::span<const KvLayerView> layers;  // one per model layer
};

// The blocks of one sequence in one group: tokens [64 b, 64 b + 64) are in block blocks[b -
// first_block].
struct BlockTable {
  size_t first_block = 0;
  std::span<const uint32_t> blocks;
};

}  // namespace switchyard
