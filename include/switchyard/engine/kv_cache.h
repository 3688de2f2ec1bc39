// Memory of keys and values, in blocks that sequences borrow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/core/memory.h"
#include "switchyard/model/config.h"
#include "switchyard/model/kv_view.h"

namespace switchyard {

// The blocks of one sequence, per KV group. Made and changed by KvCache only.
class KvSequence {
 public:
  // Tables for SequenceChunk::tables; valid until the sequence changes.
  std::span<const BlockTable> tables() const { return tables_; }

 private:
  friend class KvCache;
  struct Group {
    size_t first_block = 0;
    std::vector<uint32_t> blocks;
  };
  std::vector<Group> groups_;
  std::vector<BlockTable> tables_;
};

// Allocates address space once; memory is taken when a block is first written, and blocks are
// reused. Not thread-safe.
class KvCache {
 public:
  // Room for `num_tokens` tokens of full attention in all sequences together. Window layers get as
  // much, but no sequence holds more than its window and one pass of them.
  // Errors: kUnsupported unless dtype is kF32, kF16, kBF16, kF8E4M3 or kI8; kResourceExhausted
  //   naming the bytes.
  KvCache(const ModelConfig& config, DType dtype, size_t num_tokens);

  KvView view() const { return {dtype_, layers_}; }

  // A sequence without blocks.
  KvSequence NewSequence() const;

  // Makes sure that tokens [position, position + count) have blocks, and frees blocks that lie
  // wholly before what the token at `position` sees. Errors: kResourceExhausted naming tokens asked
  // for and free; the sequence is then unchanged.
  void Extend(KvSequence& sequence, size_t position, size_t count);

  // Gives all blocks back.
  void Free(KvSequence& sequence);

  // Tokens of full attention that fit: in all, and now.
  size_t capacity_tokens() const { return num_blocks_ * kKvBlockSize; }
  size_t free_tokens() const;
  // Blocks in use over all groups.
  size_t used_blocks() const;
  // Bytes that one token of a full layer set takes, scales included.
  size_t bytes_per_token() const;

 private:
  struct Group {
    size_t window = 0;
    std::vector<uint32_t> free;  // block ids, the next one last
  };
  void Publish(KvSequence& sequence) const;

  DType dtype_;
  size_t num_blocks_;
  std::vector<Group> groups_;
  std::vector<MappedMemory> memory_;  // one per layer
  std::vector<KvLayerView> layers_;
};

}  // namespace switchyard
