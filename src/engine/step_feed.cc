#include "engine/step_feed.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

enum Flag : size_t { kMessage = 0, kTaken = 1, kNumFlags = 2 };

}  // namespace

StepFeed::StepFeed(ProcessGroup& group, size_t max_words, Peers peers)
    : group_(group), max_words_(max_words), peers_(std::move(peers)) {
  if (group.node_peers().size() != group.size()) return;
  WindowOptions window;
  window.name = "steps";
  window.bytes_per_rank = max_words * sizeof(int32_t);
  window.num_flags = kNumFlags;
  window.setting = "chunk";
  window_ = group.MakeWindow(window, Deadline::After(peers_.timeout, "make the step buffer"));
}

void StepFeed::AwaitTaken() {
  const Deadline deadline = Deadline::After(peers_.timeout, "begin of a step");
  for (size_t rank = 1; rank < group_.size(); ++rank) {
    if (peers_.is_lost && peers_.is_lost(rank)) continue;
    window_->Await(rank, kTaken, epoch_, deadline, [&] {
      if (peers_.is_dead && peers_.is_dead(group_.WorldRank(rank))) {
        throw Error(ErrorCode::kUnavailable,
                    fmt::format("rank {} has died before step {}", group_.WorldRank(rank), epoch_));
      }
    });
  }
}

void StepFeed::Send(std::span<const int32_t> words) {
  SY_CHECK(words.size() <= max_words_);
  if (window_ == nullptr) {
    const Deadline deadline = Deadline::After(peers_.timeout, "begin of a step");
    const auto sizes = AllGatherValue(group_, static_cast<uint64_t>(words.size()), deadline);
    std::vector<size_t> rows(group_.size(), 0);
    rows[0] = sizes[0];
    words_.resize(words.size());
    group_.AllGatherV(sizeof(int32_t), std::as_bytes(words), rows,
                      std::as_writable_bytes(std::span(words_)), deadline);
    return;
  }
  AwaitTaken();
  ++epoch_;
  std::memcpy(window_->Part(0).data(), words.data(), words.size() * sizeof(int32_t));
  for (size_t rank = 1; rank < group_.size(); ++rank)
    window_->Post(rank, kMessage, {epoch_, static_cast<uint32_t>(words.size())});
}

std::span<const int32_t> StepFeed::Receive() {
  const Deadline never = Deadline::Never("next step");
  if (window_ == nullptr) {
    const auto sizes = AllGatherValue(group_, uint64_t{0}, never);
    std::vector<size_t> rows(group_.size(), 0);
    rows[0] = sizes[0];
    words_.resize(sizes[0]);
    group_.AllGatherV(sizeof(int32_t), {}, rows, std::as_writable_bytes(std::span(words_)), never);
    return words_;
  }
  ++epoch_;
  const Signal signal = window_->Await(0, kMessage, epoch_, never, [&] {
    if (peers_.is_dead && peers_.is_dead(group_.WorldRank(0)))
      throw Error(ErrorCode::kUnavailable, fmt::format("rank 0 has died before step {}", epoch_));
  });
  words_.resize(signal.count);
  std::memcpy(words_.data(), window_->Part(0).data(), signal.count * sizeof(int32_t));
  window_->Post(0, kTaken, {epoch_, 0});
  return words_;
}

}  // namespace switchyard
