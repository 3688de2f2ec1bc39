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

// Memory of one layer. Block b is at data + b * block_bytes, laid out as
//   keys [heads][kKvBlockSize tokens][key_dim], then values [heads][kKvBlockSize tokens][value_dim]
// of the model's KvShape.
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
