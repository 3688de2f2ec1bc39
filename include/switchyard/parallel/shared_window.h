// Memory that the ranks of a node share, with flags that say when it may be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "switchyard/parallel/deadline.h"

namespace switchyard {

// What a window is made of; the same on all ranks of the group.
struct WindowOptions {
  std::string name;           // for messages
  size_t bytes_per_rank = 0;  // of each rank's part
  size_t num_flags = 0;       // for each ordered pair of ranks
  std::string setting;        // the setting that decides the size, for the error that it is too big
};

// What a flag says: step `epoch` is there, with `count` of whatever the protocol counts.
struct Signal {
  uint32_t epoch = 0;
  uint32_t count = 0;
};

// One part of memory per rank of the node, readable and writable by all of them, and num_flags
// flags from every rank to every rank. Made by ProcessGroup::MakeWindow. Ranks are those of the
// group.
//
// A flag is 64 bits on a cache line of its own in the receiver's memory. Post is a release and
// Await an acquire: what a rank wrote before it posted is seen by the one that awaited. Epochs only
// grow and flags are never cleared, so no step needs a barrier; epochs are compared modulo 2^32 and
// may wrap, as long as no rank lags 2^31 behind.
// Thread-safe: every flag has one writer, its sender; apart from that as the group.
// Source: the window protocol of DeepEP's low-latency mode, with an epoch in place of cleared
//   signals.
class SharedWindow {
 public:
  class Impl;
  explicit SharedWindow(std::unique_ptr<Impl> impl);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  const std::string& name() const;
  size_t bytes_per_rank() const;
  size_t num_flags() const;

  // The part of `rank`, aligned to 64 bytes.
  // Errors: kInvalidArgument if the rank is on another node.
  std::span<std::byte> Part(size_t rank) const;

  // Sets the flag from this rank to rank `to`.
  // Errors: kInvalidArgument if the rank is on another node or there is no such flag.
  void Post(size_t to, size_t flag, Signal signal);
  // The flag from rank `from` to this rank as it is now; {0, 0} before the first Post.
  // Errors: as Post.
  Signal Peek(size_t from, size_t flag) const;
  // Waits until rank `from` has posted `epoch` or a later one, and returns what it posted last. A
  // wait that runs out leaves window and group usable. `look`, if given, is called about every 0.1
  // ms of the wait, and ends it by throwing.
  // Errors: as Post; kUnavailable naming window, rank and stage if the deadline passes or the group
  //   has failed.
  Signal Await(size_t from, size_t flag, uint32_t epoch, const Deadline& deadline,
               const std::function<void()>& look = {}) const;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard
