// A model with a KV cache and threads: runs pieces of sequences. What schedulers, evaluation and
// tests are built on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "switchyard/core/arena.h"
#include "switchyard/engine/kv_cache.h"
#include "switchyard/model/model.h"
#include "switchyard/moe/ep/expert_parallel.h"

namespace switchyard {

class StepFeed;

// Sizes and type of the cache.
struct ExecutorOptions {
  size_t context_length = 0;  // longest sequence; 0 = the model's own limit
  size_t max_sequences = 1;   // sequences whose full length must fit into the cache at once
  DType kv_dtype = DType::kF32;
  // The ranks that share the model, as it was loaded; null for one. The executor of rank 0 is used
  // as if it were alone; those of the others Follow it.
  moe::ExpertParallel* ep = nullptr;
  size_t max_pass_tokens = 4096;  // most tokens of one pass, with ep
  std::function<bool(size_t rank)> is_dead =
      {};  // whether the process of a rank of the world has ended
};

using SequenceId = uint64_t;

// One sequence's next tokens.
struct ExecutorChunk {
  SequenceId sequence = 0;
  std::span<const int32_t> tokens;
  LogitsWanted logits = LogitsWanted::kLast;
};

// Not thread-safe. After a call that threw, the sequences are as before it.
//
// With replicated attention every rank holds all sequences and computes the same; with attention of
// its own each holds some (those of an elastic protocol: rank 0 all), and their logits come to
// rank 0.
class Executor {
 public:
  // Collective with options.ep. Errors: kInvalidArgument if the context is longer than the model's;
  //   those of KvCache.
  Executor(Model& model, ThreadPool& pool, const ExecutorOptions& options);
  // On rank 0: the others end to Follow.
  ~Executor();

  // On every rank but 0: computes what rank 0 asks for, until its executor is destroyed.
  // Errors: kUnavailable if rank 0 or another rank is gone; those of Forward.
  void Follow();
  // The most tokens of one pass that the exchange between ranks takes, at most `wanted`.
  size_t ClampPass(size_t wanted) const;

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

  // Where the time of later passes goes, on this rank; null: nowhere. It must outlive them.
  void set_profile(Profile* profile) { context_.profile = profile; }

  Model& model() { return model_; }
  const KvCache& cache() const { return cache_; }
  const Arena& arena() const { return arena_; }
  size_t context_length() const { return context_length_; }

 private:
  struct State {
    KvSequence blocks;  // of sequences of this rank
    size_t length = 0;
    size_t limit = 0;
    size_t owner = 0;  // rank that holds it; with replicated attention each counts as its own
  };
  State& Find(SequenceId sequence);
  void Open(SequenceId sequence, size_t limit, size_t owner);
  void Close(SequenceId sequence);
  bool IsMine(const State& state) const;
  bool is_shared() const { return feed_ != nullptr; }
  size_t MostTokensOfARank(std::span<const ExecutorChunk> chunks);
  void CheckTokens(std::span<const ExecutorChunk> chunks);
  void Extend(std::span<const ExecutorChunk> chunks);
  moe::ForwardPhase PhaseOf(std::span<const ExecutorChunk> chunks);
  void Tell(std::span<const ExecutorChunk> chunks, moe::ForwardPhase phase);
  Rows Compute(std::span<const ExecutorChunk> chunks, moe::ForwardPhase phase,
               ForwardObserver* observer);
  size_t NumAlive() const;
  Rows Advance(std::span<const ExecutorChunk> chunks, const Rows& logits);
  Rows CollectLogits(std::span<const ExecutorChunk> chunks, const Rows& mine);

  Model& model_;
  size_t context_length_;
  KvCache cache_;
  Arena arena_;
  ExecContext context_;
  std::unordered_map<SequenceId, State> sequences_;
  SequenceId next_id_ = 1;
  std::vector<SequenceChunk> chunks_;  // reused by every pass

  moe::ExpertParallel* ep_;
  size_t max_pass_tokens_;
  std::unique_ptr<StepFeed> feed_;  // null for one rank
  std::vector<int32_t> message_;
  std::vector<int32_t> opened_, closed_;  // not told yet: (sequence, limit, owner); sequence
};

}  // namespace switchyard
