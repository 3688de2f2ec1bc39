// Rank 0 decides what all ranks compute next: a message for each pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard {

// Messages from rank 0 of a group to all others, in order. Inside a node through a shared window,
// with no call of the carrier: rank 0 writes into its part and posts, the others copy and answer,
// and rank 0 does not write again before all have. Across nodes by AllGatherV.
class StepFeed {
 public:
  struct Peers {
    std::function<bool(size_t rank)> is_dead;  // of the world; may be empty
    std::function<bool(size_t rank)> is_lost;  // goes on without it; may be empty
    std::chrono::milliseconds timeout{10000};
  };

  // Collective. A message has at most max_words words.
  StepFeed(ProcessGroup& group, size_t max_words, Peers peers);

  bool is_leader() const { return group_.rank() == 0; }

  // Rank 0. Errors: kUnavailable if a rank does not take the last message in time.
  void Send(std::span<const int32_t> words);
  // The others: waits for the next message as long as rank 0 lives. Valid until the next call.
  // Errors: kUnavailable if rank 0 is gone or the group has failed.
  std::span<const int32_t> Receive();

 private:
  void AwaitTaken();

  ProcessGroup& group_;
  size_t max_words_;
  Peers peers_;
  std::unique_ptr<SharedWindow> window_;  // null across nodes
  uint32_t epoch_ = 0;
  std::vector<int32_t> words_;
};

}  // namespace switchyard
