#include "moe/fuseep/window.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe::fuseep {
namespace {

constexpr size_t kLine = 64;
// Flags cost a cache line each, and a look; more blocks than this let nobody start earlier.
constexpr size_t kMostBlocks = 16;
// The count of a flag of a rank that has failed: of a block; of a done flag with the rank whose
// fault it is in the low bits.
constexpr uint32_t kAborted = 0xFFFFFFFFu;
constexpr uint32_t kAbortedBecauseOf = 0x80000000u;

// Sizes that fit the address space.
class Sizes {
 public:
  Sizes(const FusedMoeShape& shape, size_t max_tokens, size_t num_ranks)
      : shape_(shape), max_tokens_(max_tokens), num_ranks_(num_ranks) {}

  size_t Mul(size_t a, size_t b) const { return Check(a, b == 0 ? 0 : kMost / b) * b; }
  size_t Add(size_t a, size_t b) const { return Check(a, kMost - Check(b, kMost)) + b; }
  size_t Lines(size_t bytes) const { return Add(bytes, kLine - 1) / kLine * kLine; }

 private:
  static constexpr size_t kMost = std::numeric_limits<size_t>::max() / 2;

  size_t Check(size_t value, size_t most) const {
    if (value <= most) return value;
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("FuseEP: {} tokens of hidden size {} with top_k {} on each of {} ranks "
                            "with {} experts need more memory than can be addressed",
                            max_tokens_, shape_.hidden_size, shape_.top_k, num_ranks_,
                            shape_.num_local_experts));
  }

  const FusedMoeShape& shape_;
  size_t max_tokens_, num_ranks_;
};

void RequireSize(std::string_view name, size_t value, size_t most) {
  if (value >= 1 && value <= most) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("FuseEP: {} must be 1 to {}, found {}", name, most, value));
}

}  // namespace

Layout::Layout(const FusedMoeShape& shape_in, size_t max_tokens_in, size_t num_ranks_in)
    : shape(shape_in), max_tokens(max_tokens_in), num_ranks(num_ranks_in) {
  constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
  RequireSize("hidden_size", shape.hidden_size, kNoLimit);
  RequireSize("top_k", shape.top_k, kNoLimit);
  // Ids are i32, and routes are counted in 31 bits.
  RequireSize("num_local_experts", shape.num_local_experts, (size_t{1} << 31) / num_ranks);
  RequireSize("num-max-dispatch-tokens-per-rank", max_tokens,
              ((size_t{1} << 31) - 1) / shape.top_k);
  const Sizes sizes(shape, max_tokens, num_ranks);
  if (shape.row_bytes == 0) shape.row_bytes = sizes.Mul(shape.hidden_size, sizeof(float));
  experts_per_block = (shape.num_local_experts + kMostBlocks - 1) / kMostBlocks;
  num_blocks = (shape.num_local_experts + experts_per_block - 1) / experts_per_block;

  const size_t slots = sizes.Mul(max_tokens, shape.top_k);
  row_stride = sizes.Lines(shape.row_bytes);
  scales_at = sizes.Mul(max_tokens, row_stride);
  counts_at = sizes.Add(scales_at, sizes.Lines(sizes.Mul(max_tokens, sizeof(float))));
  routes_at =
      sizes.Add(counts_at, sizes.Lines(sizes.Mul(shape.num_local_experts, sizeof(uint32_t))));
  source_bytes = sizes.Add(routes_at, sizes.Lines(sizes.Mul(slots, sizeof(Route))));
  homes_at = sizes.Mul(num_ranks, source_bytes);
  const size_t home_bytes = sizes.Lines(sizes.Mul(shape.hidden_size, sizeof(float)));
  home_stride = home_bytes / sizeof(float);
  part_bytes = sizes.Add(homes_at, sizes.Mul(slots, home_bytes));
  flag_bytes = sizes.Mul(num_ranks, num_flags() * kLine);
  sizes.Add(part_bytes, flag_bytes);
}

Names::Names(size_t layer_id)
    : layer(fmt::format("layer {}: FuseEP", layer_id)),
      begin(fmt::format("layer {}, stage begin", layer_id)),
      dispatch(fmt::format("layer {}, stage dispatch", layer_id)),
      combine(fmt::format("layer {}, stage combine", layer_id)) {}

Window::Window(ProcessGroup& group, const Layout& layout, const FusedMoeOptions& options)
    : group_(group),
      group_base_(dynamic_cast<parallel::GroupBase&>(group)),
      is_dead_(options.is_dead),
      layout_(layout),
      epoch_(options.first_epoch),
      done_posted_(layout.num_ranks) {
  const Deadline deadline = Deadline::After(options.timeout, "make the buffer");
  window_ = group.MakeWindow({.name = "fuseep",
                              .bytes_per_rank = layout.part_bytes,
                              .num_flags = layout.num_flags(),
                              .setting = "moe-fused-buffer-mb"},
                             deadline);
  for (size_t to = 0; to < num_ranks(); ++to) {
    parts_.push_back(window_->Part(to).data());
    // As if epochs had come to first_epoch in steps: no flag holds a number that is still to come.
    for (size_t block = 0; block < layout_.num_blocks; ++block)
      window_->Post(to, block, {.epoch = epoch_, .count = 0});
    for (uint32_t back : {0u, 1u})
      window_->Post(to, DoneFlag(epoch_ - back), {.epoch = epoch_ - back, .count = 0});
  }
  group.Barrier(deadline);
}

void Window::Begin(const Names& names, std::chrono::milliseconds timeout) {
  size_t next = 0;
  const auto all_left = [&] {
    while (next < num_ranks() && IsHere(DoneSignal(next, epoch_))) ++next;
    return next == num_ranks();
  };
  Wait(all_left, timeout, names.begin, [&] {
    std::vector<size_t> late;
    for (size_t from = 0; from < num_ranks(); ++from) {
      if (!IsHere(DoneSignal(from, epoch_))) late.push_back(from);
    }
    return fmt::format("{} still in the step before", RankList(late));
  });
  ++epoch_;
  names_ = &names;
  blocks_posted_ = 0;
  std::fill(done_posted_.begin(), done_posted_.end(), false);
  culprit_ = rank();
}

void Window::PostBlock(std::span<const uint32_t> counts) {
  SY_CHECK(counts.size() == num_ranks() && blocks_posted_ < layout_.num_blocks);
  // Peers first: they may be waiting.
  for (size_t i = 1; i <= num_ranks(); ++i) {
    const size_t to = (rank() + i) % num_ranks();
    window_->Post(to, blocks_posted_, {.epoch = epoch_, .count = counts[to]});
  }
  ++blocks_posted_;
}

void Window::PostDone(size_t to, uint32_t count) {
  window_->Post(to, DoneFlag(epoch_), {.epoch = epoch_, .count = count});
  done_posted_[to] = true;
}

void Window::Abandon() noexcept {
  for (; blocks_posted_ < layout_.num_blocks; ++blocks_posted_) {
    for (size_t to = 0; to < num_ranks(); ++to)
      window_->Post(to, blocks_posted_, {.epoch = epoch_, .count = kAborted});
  }
  for (size_t to = 0; to < num_ranks(); ++to) {
    if (!done_posted_[to]) PostDone(to, kAbortedBecauseOf | static_cast<uint32_t>(culprit_));
  }
}

std::optional<uint32_t> Window::BlockFrom(size_t from, size_t block) {
  const Signal signal = BlockSignal(from, block);
  if (!IsHere(signal)) return std::nullopt;
  if (signal.count == kAborted) ThrowPeerFailed(from);
  return signal.count;
}

bool Window::DoneFrom(size_t from) {
  const Signal signal = DoneSignal(from, epoch_);
  if (!IsHere(signal)) return false;
  if ((signal.count & kAbortedBecauseOf) != 0) ThrowPeerFailed(signal.count & ~kAbortedBecauseOf);
  return true;
}

// A process that has ended is noticed long before the deadline.
void Window::RequireAlive() const {
  for (size_t peer = 0; is_dead_ && peer < num_ranks(); ++peer) {
    if (peer != rank() && is_dead_(peer))
      throw Error(ErrorCode::kUnavailable, fmt::format("rank {} has died", group_.WorldRank(peer)));
  }
}

void Window::ThrowPeerFailed(size_t peer) {
  culprit_ = peer;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: rank {} of group \"{}\" failed in this step; its own error says why",
                          names_->layer, peer, group_.name()));
}

std::string RankList(std::span<const size_t> ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace switchyard::moe::fuseep
