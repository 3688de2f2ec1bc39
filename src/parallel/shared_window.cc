#include "switchyard/parallel/shared_window.h"

#include <fmt/format.h>

#include <atomic>
#include <limits>
#include <utility>

#include "parallel/window_impl.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

using Flag = std::atomic_ref<uint64_t>;
static_assert(Flag::is_always_lock_free, "flags are shared between processes");

uint64_t Pack(Signal signal) { return uint64_t{signal.epoch} << 32 | signal.count; }
Signal Unpack(uint64_t word) {
  return {.epoch = static_cast<uint32_t>(word >> 32), .count = static_cast<uint32_t>(word)};
}

// Whether `epoch` has come, also when the count of epochs has wrapped around.
bool Reached(uint32_t now, uint32_t epoch) { return static_cast<int32_t>(now - epoch) >= 0; }

}  // namespace

size_t SharedWindow::Impl::PartBytes(const WindowOptions& options, size_t node_size) {
  // Far from overflow in every sum and product of a whole node.
  constexpr size_t kMost = std::numeric_limits<size_t>::max() / 4;
  if (options.num_flags > kMost / kLine / node_size / node_size ||
      options.bytes_per_rank > kMost / node_size) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("window \"{}\": {} bytes and {} flags for each of {} ranks are more "
                            "than can be addressed (setting {})",
                            options.name, options.bytes_per_rank, options.num_flags, node_size,
                            options.setting));
  }
  const size_t data = (options.bytes_per_rank + kLine - 1) / kLine * kLine;
  return options.num_flags * node_size * kLine + data;
}

SharedWindow::Impl::Impl(parallel::GroupBase& group_in, WindowOptions options_in,
                         std::unique_ptr<parallel::WindowMemory> memory)
    : group(group_in),
      options(std::move(options_in)),
      node_index_(group_in.size()),
      memory_(std::move(memory)) {
  size_t index = 0;
  for (size_t rank : group.node_peers()) {
    SY_CHECK(reinterpret_cast<uintptr_t>(memory_->parts[rank]) % kLine == 0);
    node_index_[rank] = index++;
  }
}

std::byte* SharedWindow::Impl::PartOf(size_t rank) const {
  if (rank >= memory_->parts.size() || memory_->parts[rank] == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("window \"{}\" of group \"{}\": rank {} is not on the node of rank {}",
                            options.name, group.name(), rank, group.rank()));
  }
  return memory_->parts[rank];
}

uint64_t& SharedWindow::Impl::FlagWord(size_t receiver, size_t sender, size_t flag) const {
  std::byte* part = PartOf(receiver);
  PartOf(sender);
  if (flag >= options.num_flags) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("window \"{}\" of group \"{}\" has {} flags, found number {}",
                            options.name, group.name(), options.num_flags, flag));
  }
  const size_t line = node_index_[sender] * options.num_flags + flag;
  return *reinterpret_cast<uint64_t*>(part + line * kLine);
}

SharedWindow::SharedWindow(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedWindow::~SharedWindow() = default;

const std::string& SharedWindow::name() const { return impl_->options.name; }
size_t SharedWindow::bytes_per_rank() const { return impl_->options.bytes_per_rank; }
size_t SharedWindow::num_flags() const { return impl_->options.num_flags; }

std::span<std::byte> SharedWindow::Part(size_t rank) const {
  const size_t flags = num_flags() * impl_->group.node_peers().size();
  return {impl_->PartOf(rank) + flags * Impl::kLine, bytes_per_rank()};
}

void SharedWindow::Post(size_t to, size_t flag, Signal signal) {
  Flag(impl_->FlagWord(to, impl_->group.rank(), flag))
      .store(Pack(signal), std::memory_order_release);
}

Signal SharedWindow::Peek(size_t from, size_t flag) const {
  return Unpack(
      Flag(impl_->FlagWord(impl_->group.rank(), from, flag)).load(std::memory_order_acquire));
}

Signal SharedWindow::Await(size_t from, size_t flag, uint32_t epoch, const Deadline& deadline,
                           const std::function<void()>& look) const {
  const Flag word(impl_->FlagWord(impl_->group.rank(), from, flag));
  Signal found;
  const auto done = [&] {
    found = Unpack(word.load(std::memory_order_acquire));
    return Reached(found.epoch, epoch);
  };
  if (done()) return found;
  const auto late = [&] {
    return fmt::format("rank {} has not posted flag {} of epoch {}; its last epoch is {}",
                       impl_->group.WorldRank(from), flag, epoch, found.epoch);
  };
  impl_->group.WaitUntil(done, deadline, name(), nullptr, late, look);
  return found;
}

}  // namespace switchyard
