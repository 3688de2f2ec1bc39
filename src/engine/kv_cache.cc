#include "switchyard/engine/kv_cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

size_t BlocksFor(size_t tokens) { return (tokens + kKvBlockSize - 1) / kKvBlockSize; }

// The first block that the token at `position` needs under a window.
size_t FirstNeededBlock(size_t position, size_t window) {
  return window != 0 && position + 1 > window ? (position + 1 - window) / kKvBlockSize : 0;
}

}  // namespace

KvCache::KvCache(const ModelConfig& config, DType dtype, size_t num_tokens)
    : dtype_(dtype), num_blocks_(BlocksFor(num_tokens)) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16 && !IsKvCode(dtype)) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("a KV cache of type {} is not supported; use f32, bf16, f16, fp8 or int8",
                    DTypeName(dtype)));
  }
  const size_t block_bytes = KvBlockLayout(config, dtype).bytes();
  size_t layer_bytes = 0;
  if (num_blocks_ > UINT32_MAX || __builtin_mul_overflow(num_blocks_, block_bytes, &layer_bytes)) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("a KV cache of {} tokens is too large", num_tokens));
  }
  layers_.resize(config.layers.size());
  for (const KvGroup& plan : PlanKvGroups(config)) {
    Group group{plan.window, {}};
    for (size_t block = num_blocks_; block > 0; --block)
      group.free.push_back(static_cast<uint32_t>(block - 1));
    for (size_t layer : plan.layers) {
      memory_.emplace_back(layer_bytes, "the KV cache");
      layers_[layer] = {memory_.back().data(), block_bytes, groups_.size()};
    }
    groups_.push_back(std::move(group));
  }
}

KvSequence KvCache::NewSequence() const {
  KvSequence sequence;
  sequence.groups_.resize(groups_.size());
  sequence.tables_.resize(groups_.size());
  return sequence;
}

void KvCache::Extend(KvSequence& sequence, size_t position, size_t count) {
  // First all checks, then all changes, so that a refusal leaves the sequence as it was.
  for (size_t g = 0; g < groups_.size(); ++g) {
    const KvSequence::Group& held = sequence.groups_[g];
    const size_t first = std::max(held.first_block, FirstNeededBlock(position, groups_[g].window));
    const size_t freed = std::min(first - held.first_block, held.blocks.size());
    const size_t end = held.first_block + held.blocks.size();
    const size_t wanted = std::max(BlocksFor(position + count), end) - std::max(end, first);
    if (wanted > groups_[g].free.size() + freed) {
      throw Error(
          ErrorCode::kResourceExhausted,
          fmt::format("the KV cache is full: {} more tokens do not fit, {} tokens are free of {}",
                      count, free_tokens(), capacity_tokens()));
    }
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    KvSequence::Group& held = sequence.groups_[g];
    const size_t first = std::max(held.first_block, FirstNeededBlock(position, groups_[g].window));
    const size_t freed = std::min(first - held.first_block, held.blocks.size());
    groups_[g].free.insert(groups_[g].free.end(), held.blocks.begin(),
                           held.blocks.begin() + static_cast<std::ptrdiff_t>(freed));
    held.blocks.erase(held.blocks.begin(),
                      held.blocks.begin() + static_cast<std::ptrdiff_t>(freed));
    held.first_block = first;
    while (held.first_block + held.blocks.size() < BlocksFor(position + count)) {
      held.blocks.push_back(groups_[g].free.back());
      groups_[g].free.pop_back();
    }
  }
  Publish(sequence);
}

void KvCache::Free(KvSequence& sequence) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    KvSequence::Group& held = sequence.groups_[g];
    groups_[g].free.insert(groups_[g].free.end(), held.blocks.begin(), held.blocks.end());
    held = {};
  }
  Publish(sequence);
}

void KvCache::Publish(KvSequence& sequence) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    sequence.tables_[g] = {sequence.groups_[g].first_block, sequence.groups_[g].blocks};
  }
}

size_t KvCache::free_tokens() const {
  size_t blocks = num_blocks_;
  for (const Group& group : groups_) blocks = std::min(blocks, group.free.size());
  return blocks * kKvBlockSize;
}

size_t KvCache::used_blocks() const {
  size_t used = 0;
  for (const Group& group : groups_) used += num_blocks_ - group.free.size();
  return used;
}

size_t KvCache::bytes_per_token() const {
  size_t bytes = 0;
  for (const KvLayerView& layer : layers_) bytes += layer.block_bytes / kKvBlockSize;
  return bytes;
}

}  // namespace switchyard
