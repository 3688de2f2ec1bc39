// The inside of a SharedWindow: where parts and flags are.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "parallel/group_base.h"
#include "switchyard/parallel/shared_window.h"

namespace switchyard {

// A part is laid out as [flags of sender 0, of sender 1, … | data], senders being the ranks of the
// node in ascending order, each flag on a cache line of its own.
class SharedWindow::Impl {
 public:
  static constexpr size_t kLine = 64;
  // Bytes of a part. Errors: kResourceExhausted if that overflows.
  static size_t PartBytes(const WindowOptions& options, size_t node_size);

  Impl(parallel::GroupBase& group, WindowOptions options,
       std::unique_ptr<parallel::WindowMemory> memory);

  // The flag from `sender` in the memory of `receiver`, one of them this rank.
  uint64_t& FlagWord(size_t receiver, size_t sender, size_t flag) const;
  // The beginning of the rank's part. Errors: kInvalidArgument if it is on another node.
  std::byte* PartOf(size_t rank) const;

  parallel::GroupBase& group;
  const WindowOptions options;

 private:
  std::vector<size_t> node_index_;  // [group size], of the ranks of this node
  std::unique_ptr<parallel::WindowMemory> memory_;
};

}  // namespace switchyard
