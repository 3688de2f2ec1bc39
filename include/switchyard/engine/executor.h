// A model with a KV cache and threads: runs pieces of sequences. What schedulers, evaluation and
// tests are built on.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "switchyard/core/arena.h"
#include "switchyard/engine/kv_cache.h"
#include "switchyard/model/model.h"

namespace switchyard {

// Sizes and type of the cache.
struct ExecutorOptions {
  size_t context_length = 0;  // longest sequence; 0 = the model's own limit
  size_t max_sequences = 1;   // sequences whose full length must fit into the cache at once
  DType kv_dtype = DType::kF32;
};

using SequenceId = uint64_t;

// One sequence's next tokens.
struct ExecutorChunk {
  SequenceId sequence = 0;
  std::span<const int32_t> tokens;
  LogitsWanted logits = LogitsWanted::kLast;
};

// Not thread-safe. After a call that threw, the sequences are as before it.
class Executor {
 public:
  // Errors: kInvalidArgument if the context is longer than the model's; those of KvCache.
  Executor(Model& model, ThreadPool& pool, const ExecutorOptions& options);

  // A sequence that will never hold more than `limit` tokens (at most context_length).
  // Errors: kInvalidArgument naming both counts.
  SequenceId Start(size_t limit);
  // Frees its blocks. Ids are never reused.
  void End(SequenceId sequence);
  // Tokens that it holds.
  size_t Length(SequenceId sequence) const;

  // Appends the tokens of all chunks and returns the logits that were asked for, in order.
  // Shapes: [rows wanted, V]; valid until the next call. Each sequence may appear once.
  // Errors: kInvalidArgument if a sequence would exceed its limit; kResourceExhausted if the cache
  //   is full; those of Model::Forward.
  Rows Forward(std::span<const ExecutorChunk> chunks, ForwardObserver* observer = nullptr);

  Model& model() { return model_; }
  const KvCache& cache() const { return cache_; }
  const Arena& arena() const { return arena_; }
  size_t context_length() const { return context_length_; }

 private:
  struct State {
    KvSequence blocks;
    size_t length = 0;
    size_t limit = 0;
  };
  State& Find(SequenceId sequence);

  Model& model_;
  size_t context_length_;
  KvCache cache_;
  Arena arena_;
  ExecContext context_;
  std::unordered_map<SequenceId, State> sequences_;
  SequenceId next_id_ = 1;
  std::vector<SequenceChunk> chunks_;  // reused by every pass
};

}  // namespace switchyard
