#include "switchyard/engine/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>

#include "engine/step_feed.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"

namespace switchyard {
namespace {

// Words of a message: what rank 0 tells the others.
//
//   kStop
//   kFail      rank 0 ends with an error
//   kForward, phase, opened n, n x (sequence, limit, owner), closed n, n x sequence,
//     chunks n, n x (sequence, tokens, logits), tokens of all chunks
enum Command : int32_t { kStop = 0, kFail = 1, kForward = 2 };

// Reads words one after the other.
class Words {
 public:
  explicit Words(std::span<const int32_t> words) : words_(words) {}
  int32_t Next() {
    const int32_t word = words_.front();
    words_ = words_.subspan(1);
    return word;
  }
  size_t Count() { return static_cast<size_t>(Next()); }
  std::span<const int32_t> Take(size_t count) {
    const auto taken = words_.first(count);
    words_ = words_.subspan(count);
    return taken;
  }

 private:
  std::span<const int32_t> words_;
};

size_t RowsWanted(const ExecutorChunk& chunk) {
  if (chunk.tokens.empty() || chunk.logits == LogitsWanted::kNone) return 0;
  return chunk.logits == LogitsWanted::kAll ? chunk.tokens.size() : 1;
}

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
      context_{pool, arena_},
      ep_(options.ep),
      max_pass_tokens_(options.max_pass_tokens) {
  if (ep_ == nullptr || ep_->groups().tp().size() == 1) return;
  StepFeed::Peers peers;
  peers.is_dead = options.is_dead;
  peers.is_lost = [this](size_t rank) {
    return rank < ep_->active_ranks().size() && ep_->active_ranks()[rank] == 0;
  };
  peers.timeout = ep_->options().timeout;
  // Every sequence may open, close and take part in one pass.
  const size_t words = 16 + 8 * (options.max_sequences + 1) + max_pass_tokens_;
  feed_ = std::make_unique<StepFeed>(ep_->groups().tp(), 4 * words, std::move(peers));
}

Executor::~Executor() {
  if (!is_shared() || !feed_->is_leader()) return;
  try {
    // Ranks that leave in order free what they share together; those that fail do not wait.
    const int32_t last = std::uncaught_exceptions() == 0 ? kStop : kFail;
    feed_->Send({&last, 1});
  } catch (const Error&) {  // they have ended already, and why was told
  }
}

size_t Executor::ClampPass(size_t wanted) const {
  if (!is_shared()) return wanted;
  const size_t ranks = ep_->options().tokens_are_replicated ? ep_->groups().tp().size() : 1;
  const size_t most = model_.max_tokens_per_rank() * ranks;
  return std::max<size_t>(1, std::min({wanted, max_pass_tokens_, most}));
}

// --- Sequences ----------------------------------------------------------------------------------

bool Executor::IsMine(const State& state) const {
  return !is_shared() || ep_->options().tokens_are_replicated ||
         state.owner == ep_->groups().tp().rank();
}

void Executor::Open(SequenceId sequence, size_t limit, size_t owner) {
  sequences_.emplace(sequence, State{cache_.NewSequence(), 0, limit, owner});
}

SequenceId Executor::Start(size_t limit) {
  if (limit > context_length_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a sequence of {} tokens does not fit into the context of {}", limit,
                            context_length_));
  }
  const SequenceId sequence = next_id_++;
  size_t owner = 0;
  if (is_shared() && !model_.is_elastic()) owner = (sequence - 1) % ep_->groups().tp().size();
  Open(sequence, limit, owner);
  if (is_shared()) {
    for (size_t word : {static_cast<size_t>(sequence), limit, owner})
      opened_.push_back(static_cast<int32_t>(word));
  }
  return sequence;
}

Executor::State& Executor::Find(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end())
    throw Error(ErrorCode::kNotFound, fmt::format("there is no sequence {}", sequence));
  return found->second;
}

void Executor::Close(SequenceId sequence) {
  State& state = Find(sequence);
  if (IsMine(state)) cache_.Free(state.blocks);
  sequences_.erase(sequence);
}

void Executor::End(SequenceId sequence) {
  Close(sequence);
  if (is_shared()) closed_.push_back(static_cast<int32_t>(sequence));
}

size_t Executor::Length(SequenceId sequence) const {
  return const_cast<Executor*>(this)->Find(sequence).length;
}

// --- A pass -------------------------------------------------------------------------------------

// What would fail on some ranks only is refused before anybody computes.
void Executor::CheckTokens(std::span<const ExecutorChunk> chunks) {
  size_t total = 0;
  for (const ExecutorChunk& chunk : chunks) {
    const State& state = Find(chunk.sequence);
    total += chunk.tokens.size();
    if (state.length + chunk.tokens.size() > state.limit) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("a sequence of {} tokens was started, {} more after {} do not fit",
                              state.limit, chunk.tokens.size(), state.length));
    }
    for (size_t t = 0; is_shared() && t < chunk.tokens.size(); ++t)
      model_.CheckToken(chunk.tokens[t], state.length + t);
  }
  if (!is_shared()) return;
  if (total > max_pass_tokens_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} tokens in one pass, with ranks at most {} are possible", total,
                            max_pass_tokens_));
  }
  const size_t most = MostTokensOfARank(chunks);
  if (most <= model_.max_tokens_per_rank()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{} tokens of one rank in one pass: the exchange takes {} "
                  "(num-max-dispatch-tokens-per-rank, at most 1024); use fewer sequences at "
                  "once, or another --moe-a2a",
                  most, model_.max_tokens_per_rank()));
}

size_t Executor::MostTokensOfARank(std::span<const ExecutorChunk> chunks) {
  const size_t ranks = ep_->groups().tp().size();
  std::vector<size_t> tokens(ranks, 0);
  size_t total = 0;
  for (const ExecutorChunk& chunk : chunks) {
    tokens[Find(chunk.sequence).owner] += chunk.tokens.size();
    total += chunk.tokens.size();
  }
  if (ep_->options().tokens_are_replicated) return (total + ranks - 1) / ranks;
  return *std::max_element(tokens.begin(), tokens.end());
}

// Blocks and the model's view of the chunks that this rank computes.
void Executor::Extend(std::span<const ExecutorChunk> chunks) {
  chunks_.clear();
  for (const ExecutorChunk& chunk : chunks) {
    State& state = Find(chunk.sequence);
    if (!IsMine(state)) continue;
    cache_.Extend(state.blocks, state.length, chunk.tokens.size());
    chunks_.push_back(
        {chunk.tokens, state.length, state.limit, state.blocks.tables(), chunk.logits});
  }
}

// Decode: one token of each sequence, none of them its first, and few enough for the low-latency
// exchange on every rank (contract 3.6).
moe::ForwardPhase Executor::PhaseOf(std::span<const ExecutorChunk> chunks) {
  if (!is_shared()) return moe::ForwardPhase::kPrefill;
  bool decode = true;
  for (const ExecutorChunk& chunk : chunks)
    decode = decode && chunk.tokens.size() == 1 && Find(chunk.sequence).length != 0;
  decode = decode && MostTokensOfARank(chunks) <= ep_->options().num_max_dispatch_tokens_per_rank;
  return decode ? moe::ForwardPhase::kDecode : moe::ForwardPhase::kPrefill;
}

void Executor::Tell(std::span<const ExecutorChunk> chunks, moe::ForwardPhase phase) {
  const auto add = [&](size_t word) { message_.push_back(static_cast<int32_t>(word)); };
  message_.assign({kForward, static_cast<int32_t>(phase)});
  add(opened_.size() / 3);
  message_.insert(message_.end(), opened_.begin(), opened_.end());
  add(closed_.size());
  message_.insert(message_.end(), closed_.begin(), closed_.end());
  add(chunks.size());
  for (const ExecutorChunk& chunk : chunks) {
    add(chunk.sequence);
    add(chunk.tokens.size());
    add(static_cast<size_t>(chunk.logits));
  }
  for (const ExecutorChunk& chunk : chunks)
    message_.insert(message_.end(), chunk.tokens.begin(), chunk.tokens.end());
  feed_->Send(message_);
  opened_.clear();
  closed_.clear();
}

Rows Executor::Compute(std::span<const ExecutorChunk> chunks, moe::ForwardPhase phase,
                       ForwardObserver* observer) {
  if (ep_ != nullptr) ep_->BeginPass(phase);
  Rows logits = model_.Forward(context_, chunks_, cache_.view(), observer);
  if (is_shared() && !ep_->options().tokens_are_replicated) logits = CollectLogits(chunks, logits);
  return logits;
}

// The logits of all chunks on rank 0, in their order.
Rows Executor::CollectLogits(std::span<const ExecutorChunk> chunks, const Rows& mine) {
  ProcessGroup& group = ep_->groups().tp();
  const size_t row_bytes = model_.config().vocab_size * sizeof(float);
  std::vector<size_t> wanted(group.size(), 0);
  size_t total = 0;
  for (const ExecutorChunk& chunk : chunks) {
    wanted[Find(chunk.sequence).owner] += RowsWanted(chunk);
    total += RowsWanted(chunk);
  }
  if (total == wanted[0]) return mine;  // nobody else has any
  const bool leads = group.rank() == 0;
  const Rows from_others =
      context_.arena.AllocateRows(leads ? total - wanted[0] : 0, model_.config().vocab_size);
  std::vector<size_t> send(group.size(), 0), recv(group.size(), 0);
  if (leads) recv = wanted;
  recv[0] = 0;
  if (!leads) send[0] = mine.rows;
  RowExchange exchange;
  exchange.row_bytes = row_bytes;
  exchange.send = reinterpret_cast<const std::byte*>(mine.data);
  exchange.recv = reinterpret_cast<std::byte*>(from_others.data);
  exchange.send_rows = send;
  exchange.recv_rows = recv;
  group.AllToAllV(exchange, Deadline::After(ep_->options().timeout, "logits"));
  if (!leads) return mine;
  // Where the next row of each rank is.
  std::vector<size_t> next(group.size(), 0);
  std::partial_sum(recv.begin(), recv.end() - 1, next.begin() + 1);
  const Rows all = context_.arena.AllocateRows(total, model_.config().vocab_size);
  size_t row = 0;
  for (const ExecutorChunk& chunk : chunks) {
    const size_t owner = Find(chunk.sequence).owner;
    const Rows& from = owner == 0 ? mine : from_others;
    for (size_t i = 0; i < RowsWanted(chunk); ++i)
      std::memcpy(all.Row(row++), from.Row(next[owner]++), row_bytes);
  }
  return all;
}

Rows Executor::Forward(std::span<const ExecutorChunk> chunks, ForwardObserver* observer) {
  arena_.Reset();
  CheckTokens(chunks);
  Extend(chunks);
  const moe::ForwardPhase phase = PhaseOf(chunks);
  if (is_shared()) Tell(chunks, phase);
  const size_t alive = NumAlive();
  const Rows logits = Compute(chunks, phase, observer);
  if (NumAlive() == alive) return Advance(chunks, logits);
  // A rank was lost on the way, and some terms with it. Its experts may have copies elsewhere, so
  // the pass is done again: keys and values are written over.
  Log(LogLevel::kInfo, "the pass is repeated without the lost rank");
  return Forward(chunks, observer);
}

// Ranks that take part; with elastic protocols they may become fewer.
size_t Executor::NumAlive() const {
  if (ep_ == nullptr) return 1;
  const std::span<const int32_t> active = ep_->active_ranks();
  return active.size() - static_cast<size_t>(std::count(active.begin(), active.end(), 0));
}

Rows Executor::Advance(std::span<const ExecutorChunk> chunks, const Rows& logits) {
  for (const ExecutorChunk& chunk : chunks) Find(chunk.sequence).length += chunk.tokens.size();
  return logits;
}

void Executor::Follow() {
  while (true) {
    Words words(feed_->Receive());
    const int32_t command = words.Next();
    if (command == kStop) return;
    if (command == kFail)
      throw Error(ErrorCode::kUnavailable, "rank 0 has ended with an error of its own");
    const auto phase = static_cast<moe::ForwardPhase>(words.Next());
    for (size_t left = words.Count(); left > 0; --left) {
      const auto opened = words.Take(3);
      Open(static_cast<SequenceId>(opened[0]), static_cast<size_t>(opened[1]),
           static_cast<size_t>(opened[2]));
    }
    for (size_t left = words.Count(); left > 0; --left)
      Close(static_cast<SequenceId>(words.Next()));
    std::vector<ExecutorChunk> chunks(words.Count());
    std::vector<size_t> sizes;
    for (ExecutorChunk& chunk : chunks) {
      chunk.sequence = static_cast<SequenceId>(words.Next());
      sizes.push_back(words.Count());
      chunk.logits = static_cast<LogitsWanted>(words.Next());
      // Rank 0 reads them; it may have them alone.
      if (ep_->options().tokens_are_replicated && !model_.is_shared())
        chunk.logits = LogitsWanted::kNone;
    }
    for (size_t i = 0; i < chunks.size(); ++i) chunks[i].tokens = words.Take(sizes[i]);
    arena_.Reset();
    Extend(chunks);
    Advance(chunks, Compute(chunks, phase, nullptr));
  }
}

}  // namespace switchyard
