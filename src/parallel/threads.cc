// Ranks as threads: mailboxes under a lock, nothing clever. What it gives for that is an exact
// answer to who is late, and an error where two ranks are in different collectives.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/group_base.h"
#include "switchyard/core/error.h"
#include "switchyard/core/memory.h"
#include "switchyard/parallel/run_ranks.h"

namespace switchyard {
namespace {

using parallel::Collective;
using parallel::CollectiveName;
using parallel::GroupBase;
using parallel::Operation;
using parallel::WindowMemory;

// What one rank sends to another within a collective. The bytes are a copy: a rank may throw and
// free its buffers at any time.
struct Message {
  uint64_t number;
  Collective collective;
  std::vector<std::byte> bytes;
};

// What the threads of one group share.
class Hub {
 public:
  Hub(std::shared_ptr<Hub> parent, size_t size)
      : parent_(std::move(parent)), size_(size), boxes_(size * size) {}

  void Send(size_t from, size_t to, Message message) {
    Box& box = BoxOf(from, to);
    const std::lock_guard lock(box.mutex);
    box.messages.push_back(std::move(message));
  }

  // The message of collective `number`, if it is there.
  std::optional<Message> Receive(size_t from, size_t to, uint64_t number) {
    Box& box = BoxOf(from, to);
    const std::lock_guard lock(box.mutex);
    const auto found = std::ranges::find(box.messages, number, &Message::number);
    if (found == box.messages.end()) return std::nullopt;
    Message message = std::move(*found);
    box.messages.erase(found);
    return message;
  }

  // True for the first failure, whose reason stays.
  bool SetFailure(std::string reason) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    failure_ = std::move(reason);
    failed_.store(true, std::memory_order_release);
    return true;
  }

  // Of this group or one that it came out of.
  std::optional<std::string> Failure() const {
    for (const Hub* hub = this; hub != nullptr; hub = hub->parent_.get()) {
      if (hub->failed_.load(std::memory_order_acquire)) return hub->failure_;
    }
    return std::nullopt;
  }

  // The same object for the `members` ranks that meet under `key`; whoever comes first makes it.
  template <typename T, typename Make>
  std::shared_ptr<T> Meet(std::pair<uint64_t, size_t> key, size_t members, const Make& make) {
    const std::lock_guard lock(mutex_);
    auto& [object, visitors] = meetings_[key];
    if (!object) object = make();
    auto result = std::static_pointer_cast<T>(object);
    if (++visitors == members) meetings_.erase(key);
    return result;
  }

 private:
  struct Box {
    std::mutex mutex;
    std::deque<Message> messages;
  };
  Box& BoxOf(size_t from, size_t to) { return boxes_[to * size_ + from]; }

  const std::shared_ptr<Hub> parent_;
  const size_t size_;
  std::vector<Box> boxes_;
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::string failure_;  // does not change once failed_ is set
  std::map<std::pair<uint64_t, size_t>, std::pair<std::shared_ptr<void>, size_t>> meetings_;
};

struct ThreadWindow final : WindowMemory {
  using Parts = std::vector<MappedMemory>;  // [group size]; alive as long as any rank's window
  std::shared_ptr<Parts> shared;
};

struct Arrived final : Operation::CarrierState {
  std::vector<bool> from;
};

class ThreadGroup final : public GroupBase {
 public:
  ThreadGroup(Membership membership, std::shared_ptr<Hub> hub)
      : GroupBase(std::move(membership)), hub_(std::move(hub)) {}

  static std::unique_ptr<ThreadGroup> MakeWorld(const RankOptions& options, size_t rank,
                                                std::shared_ptr<Hub> hub) {
    Membership membership{.name = "world", .rank = rank, .world_ranks = {}, .nodes = {}};
    for (size_t other = 0; other < options.num_ranks; ++other) {
      membership.world_ranks.push_back(other);
      membership.nodes.push_back(other / options.node_size);
    }
    return std::make_unique<ThreadGroup>(std::move(membership), std::move(hub));
  }

  std::string_view carrier() const override { return "threads"; }
  void Abort(std::string_view message) override { AbortFirst(message); }

  // Whether this was the first failure of the group.
  bool AbortFirst(std::string_view message) {
    return hub_->SetFailure(
        fmt::format("rank {} of group \"{}\" failed: {}", rank(), name(), message));
  }

 protected:
  void Start(Operation& operation) override {
    if (!operation.carrier) operation.carrier = std::make_unique<Arrived>();
    static_cast<Arrived&>(*operation.carrier).from.assign(size(), false);
    const parallel::RowLayout& layout = operation.send_layout;
    for (size_t to = 0; to < size(); ++to) {
      Message message{.number = operation.number, .collective = operation.collective, .bytes = {}};
      if (const size_t bytes = layout.rows[to] * operation.row_bytes; bytes != 0) {
        const std::byte* rows = operation.send + layout.starts[to] * operation.row_bytes;
        message.bytes.assign(rows, rows + bytes);
      }
      hub_->Send(rank(), to, std::move(message));
    }
  }

  bool Progress(Operation& operation) override {
    auto& arrived = static_cast<Arrived&>(*operation.carrier).from;
    bool all = true;
    for (size_t from = 0; from < size(); ++from) {
      if (arrived[from]) continue;
      if (const auto message = hub_->Receive(from, rank(), operation.number)) {
        Unpack(operation, from, *message);
        arrived[from] = true;
      } else {
        all = false;
      }
    }
    return all;
  }

  // Nothing of the operation is read or written by others.
  void Abandon(Operation&) noexcept override {}

  std::vector<size_t> LateRanks(const Operation& operation) override {
    const auto& arrived = static_cast<const Arrived&>(*operation.carrier).from;
    std::vector<size_t> late;
    for (size_t from = 0; from < size(); ++from) {
      if (!arrived[from]) late.push_back(from);
    }
    return late;
  }

  void Poll(const Operation*, parallel::Backoff::Clock::duration) override {}
  std::optional<std::string> FailureOfOthers() override { return hub_->Failure(); }

  std::unique_ptr<ProcessGroup> MakeChild(Membership membership, size_t index) override {
    const size_t members = membership.world_ranks.size();
    auto hub = hub_->Meet<Hub>({++num_meetings_, index}, members,
                               [&] { return std::make_shared<Hub>(hub_, members); });
    return std::make_unique<ThreadGroup>(std::move(membership), std::move(hub));
  }
  void NoChild() override { ++num_meetings_; }

  // What does not fit throws where it is made.
  void CheckWindow(const WindowOptions&, size_t) override {}

  std::unique_ptr<WindowMemory> MakeWindowMemory(const WindowOptions& options, size_t bytes,
                                                 const Deadline& deadline) override {
    auto window = std::make_unique<ThreadWindow>();
    window->shared = hub_->Meet<ThreadWindow::Parts>({++num_meetings_, 0}, size(), [&] {
      return std::make_shared<ThreadWindow::Parts>(size());
    });
    ThreadWindow::Parts& parts = *window->shared;
    RunTogether(*this, deadline, [&] {
      parts[rank()] = MappedMemory(std::max<size_t>(bytes, 1), options.name.c_str());
    });
    window->parts.resize(size());
    for (size_t peer : node_peers()) window->parts[peer] = parts[peer].data();
    return window;
  }

 private:
  void Unpack(Operation& operation, size_t from, const Message& message) {
    if (message.collective != operation.collective) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("group \"{}\": collective number {} is {} on rank {} and {} on rank "
                              "{}",
                              name(), operation.number, CollectiveName(operation.collective),
                              rank(), CollectiveName(message.collective), from));
    }
    const size_t expected = operation.recv_layout.rows[from] * operation.row_bytes;
    if (message.bytes.size() != expected) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("group \"{}\": {} number {}: rank {} expects {} bytes from rank {}, "
                              "which sends {}",
                              name(), CollectiveName(operation.collective), operation.number,
                              rank(), expected, from, message.bytes.size()));
    }
    if (expected != 0) {
      std::memcpy(operation.recv + operation.recv_layout.starts[from] * operation.row_bytes,
                  message.bytes.data(), expected);
    }
  }

  const std::shared_ptr<Hub> hub_;
  uint64_t num_meetings_ = 0;  // the same on all ranks, because they meet in the same order
};

std::string TextOf(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void RunRanks(const RankOptions& options_in, const std::function<void(ProcessGroup&)>& body) {
  RankOptions options = options_in;
  if (options.num_ranks == 0)
    throw Error(ErrorCode::kInvalidArgument, "the number of ranks must be at least 1, found 0");
  if (options.node_size == 0) options.node_size = parallel::FakeNodeSize();
  if (options.node_size == 0) options.node_size = options.num_ranks;

  const auto hub = std::make_shared<Hub>(nullptr, options.num_ranks);
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](size_t rank) {
    const auto world = ThreadGroup::MakeWorld(options, rank, hub);
    try {
      body(*world);
    } catch (...) {
      const std::exception_ptr mine = std::current_exception();
      const std::lock_guard lock(mutex);
      // What the others throw because of it comes later, or is no cause.
      if (world->AbortFirst(TextOf(mine)) || !first) first = mine;
    }
  };
  try {
    std::vector<std::jthread> threads;  // its destructor waits for all
    try {
      for (size_t rank = 1; rank < options.num_ranks; ++rank) threads.emplace_back(run, rank);
    } catch (const std::system_error&) {
      hub->SetFailure("the system gives no more threads");
      throw;
    }
    run(0);
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kResourceExhausted, fmt::format("cannot start {} threads for ranks: {}",
                                                           options.num_ranks, error.what()));
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace switchyard
