#include "switchyard/engine/executor.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

size_t ResolveContext(const ModelConfig& config, size_t asked) {
  if (asked == 0) return config.max_positions;
  if (asked > config.max_positions) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--ctx {}: the model's context is {} tokens (max_position_embeddings)",
                            asked, config.max_positions));
  }
  return asked;
}

}  // namespace

Executor::Executor(Model& model, ThreadPool& pool, const ExecutorOptions& options)
    : model_(model),
      context_length_(ResolveContext(model.config(), options.context_length)),
      // A block more for each sequence, because every sequence may leave one half used.
      cache_(model.config(), options.kv_dtype,
             options.max_sequences * (context_length_ + kKvBlockSize)),
      context_{pool, arena_} {}

SequenceId Executor::Start(size_t limit) {
  if (limit > context_length_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a sequence of {} tokens does not fit into the context of {}", limit,
                            context_length_));
  }
  sequences_.emplace(next_id_, State{cache_.NewSequence(), 0, limit});
  return next_id_++;
}

Executor::State& Executor::Find(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end())
    throw Error(ErrorCode::kNotFound, fmt::format("there is no sequence {}", sequence));
  return found->second;
}

void Executor::End(SequenceId sequence) {
  cache_.Free(Find(sequence).blocks);
  sequences_.erase(sequence);
}

size_t Executor::Length(SequenceId sequence) const {
  return const_cast<Executor*>(this)->Find(sequence).length;
}

Rows Executor::Forward(std::span<const ExecutorChunk> chunks, ForwardObserver* observer) {
  arena_.Reset();
  chunks_.clear();
  for (const ExecutorChunk& chunk : chunks) {
    State& state = Find(chunk.sequence);
    if (state.length + chunk.tokens.size() > state.limit) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("a sequence of {} tokens was started, {} more after {} do not fit",
                              state.limit, chunk.tokens.size(), state.length));
    }
    cache_.Extend(state.blocks, state.length, chunk.tokens.size());
    chunks_.push_back(
        {chunk.tokens, state.length, state.limit, state.blocks.tables(), chunk.logits});
  }
  const Rows logits = model_.Forward(context_, chunks_, cache_.view(), observer);
  for (const ExecutorChunk& chunk : chunks) Find(chunk.sequence).length += chunk.tokens.size();
  return logits;
}

}  // namespace switchyard
