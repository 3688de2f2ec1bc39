// What every carrier of a ProcessGroup shares: checks of arguments, waiting, sums, errors. A
// carrier only moves bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/backoff.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::parallel {

enum class Collective { kBarrier, kAllGather, kAllToAll, kAllToAllV, kAllGatherV };
std::string_view CollectiveName(Collective collective);

// Where the rows for, or from, each rank are in one buffer.
struct RowLayout {
  std::vector<size_t> rows;
  std::vector<size_t> starts;

  // Copies; starts are those of rows one behind the other if `starts_in` is empty.
  void Assign(std::span<const size_t> rows_in, std::span<const size_t> starts_in);
  // The same block of `count` rows for each of `ranks`: at 0, or one behind the other.
  void AssignSame(size_t ranks, size_t count, bool packed);
  // Rows of the buffer up to the end of the last part.
  size_t Extent() const;
};

class GroupBase;

// One collective of one rank, from its start to its end. Every collective is an AllToAllV to a
// carrier that knows no better; `collective` tells one that does. Owned and reused by the group.
class Operation final : public internal::StartedExchange {
 public:
  // What a carrier keeps with an operation.
  struct CarrierState {
    virtual ~CarrierState() = default;
  };

  explicit Operation(GroupBase& group_in) : group(group_in) {}
  bool Test() override;
  void Wait(const Deadline& deadline) override;
  void Release() noexcept override;

  GroupBase& group;
  Collective collective = Collective::kBarrier;
  uint64_t number = 0;  // of the group's collectives, counted from 1: the same on all ranks
  size_t row_bytes = 0;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  RowLayout send_layout;
  RowLayout recv_layout;
  std::shared_ptr<const void> owner;
  bool in_use = false;
  bool complete = false;
  std::unique_ptr<CarrierState> carrier;
};

// The memory of a window, as a carrier made it.
struct WindowMemory {
  virtual ~WindowMemory() = default;
  // [group size] the part of each rank of this node, zeroed by its owner and aligned to 64 bytes;
  // null for the others.
  std::vector<std::byte*> parts;
};

class GroupBase : public ProcessGroup {
 public:
  size_t rank() const final { return rank_; }
  size_t size() const final { return world_ranks_.size(); }
  const std::string& name() const final { return name_; }
  size_t WorldRank(size_t rank) const final;
  size_t NodeOf(size_t rank) const final;
  std::span<const size_t> node_peers() const final { return node_peers_; }

  void Barrier(const Deadline& deadline) final;
  void AllGather(std::span<const std::byte> mine, std::span<std::byte> all,
                 const Deadline& deadline) final;
  void AllToAll(std::span<const uint32_t> send, std::span<uint32_t> recv,
                const Deadline& deadline) final;
  PendingExchange StartAllToAllV(const RowExchange& exchange) final;
  void AllToAllV(const RowExchange& exchange, const Deadline& deadline) final;
  void AllGatherV(size_t row_bytes, std::span<const std::byte> mine, std::span<const size_t> rows,
                  std::span<std::byte> all, const Deadline& deadline,
                  std::shared_ptr<const void> owner) final;
  void AllReduceSum(std::span<float> values, const Deadline& deadline) final;
  void ReduceScatterV(ConstRows partial, std::span<const size_t> rows, Rows mine,
                      const Deadline& deadline) final;
  std::unique_ptr<SharedWindow> MakeWindow(const WindowOptions& options,
                                           const Deadline& deadline) final;
  std::unique_ptr<ProcessGroup> Split(size_t color, size_t key, std::string_view name,
                                      const Deadline& deadline) final;
  std::unique_ptr<ProcessGroup> Duplicate(std::string_view name, const Deadline& deadline) final;
  void AgreeOnError(const Error* mine, const Deadline& deadline) final;

  // Waits for `operation`; its end is the caller's to look after.
  void WaitFor(Operation& operation, const Deadline& deadline);
  // Drives it once.
  bool TestNow(Operation& operation);
  // Ends it: back to the free ones, or the group is unusable if it is not complete.
  void Finish(Operation& operation) noexcept;

  // Loops until done() holds. `what` waits (an operation, a window); `operation` may be null.
  // Throws kUnavailable if the group has failed, and with the text of late() when the deadline
  // passes.
  template <typename Done, typename Late>
  void WaitUntil(const Done& done, const Deadline& deadline, std::string_view what,
                 const Operation* operation, const Late& late,
                 const std::function<void()>& look = {}) {
    Backoff backoff;
    while (!done()) {
      if (!backoff.Pause()) continue;
      Poll(operation, backoff.waited());
      if (look) look();
      // What had come before the group failed is still taken: a collective that every rank has
      // entered does not fail because one of them failed right after it.
      const bool failed = Failure().has_value();
      if (!failed && !deadline.Passed()) continue;
      if (done()) return;
      if (failed) ThrowIfFailed(what, deadline.stage());
      ThrowLate(what, deadline, late());
    }
  }

  // The reason why the group cannot be used any more, if there is one.
  std::optional<std::string> Failure();

 protected:
  // What a new group starts from: its members by their world ranks, in its own order, and the node
  // of each.
  struct Membership {
    std::string name;
    size_t rank = 0;
    std::vector<size_t> world_ranks;
    std::vector<size_t> nodes;
  };
  explicit GroupBase(Membership membership);

  // --- The carrier ---
  // Starts to move what `operation` describes; it stays in place until it is complete. May throw.
  virtual void Start(Operation& operation) = 0;
  // Goes on with it; true once all has arrived and everything may be reused. May throw.
  virtual bool Progress(Operation& operation) = 0;
  // Takes over the state of an operation that nobody waits for any more.
  virtual void Abandon(Operation& operation) noexcept = 0;
  // The ranks that have not come to this operation yet, as far as this one can know.
  virtual std::vector<size_t> LateRanks(const Operation& operation) = 0;
  // Called every 0.1 ms or so while this rank waits, for news of the other ranks; `operation` as in
  // WaitUntil, `waited` since the start of the wait.
  virtual void Poll(const Operation* operation, Backoff::Clock::duration waited) = 0;
  // Why the other ranks think that the group cannot be used.
  virtual std::optional<std::string> FailureOfOthers() = 0;
  // Makes the group with these members, which has the number `index` among the groups that this
  // Split makes. Called on all ranks once all have come.
  virtual std::unique_ptr<ProcessGroup> MakeChild(Membership membership, size_t index) = 0;
  // The part of the ranks that are in no new group, while the others are in MakeChild.
  virtual void NoChild() = 0;
  // Throws if the node cannot give `bytes` to each of its ranks; may do so on some ranks only.
  virtual void CheckWindow(const WindowOptions& options, size_t bytes) = 0;
  // Makes the parts of a window. Called on all ranks after all have passed the check.
  virtual std::unique_ptr<WindowMemory> MakeWindowMemory(const WindowOptions& options, size_t bytes,
                                                         const Deadline& deadline) = 0;

  // "rank 2", "ranks 0, 3 and 4", …, with world ranks where they differ.
  std::string RankList(std::span<const size_t> ranks) const;

 private:
  // Memory for sums, kept between calls and handed to the carrier as the owner of its buffers.
  struct Scratch {
    std::vector<float> send;
    std::vector<float> recv;
    std::vector<size_t> stretches;  // how many values each rank sums
    std::vector<size_t> from_each;
  };

  Operation& NewOperation(Collective collective, size_t row_bytes, const std::byte* send,
                          std::byte* recv);
  void Begin(Operation& operation, std::string_view stage);
  // Waits and ends it. If the wait throws, the group becomes unusable with that message.
  void Complete(Operation& operation, const Deadline& deadline);
  void ThrowIfFailed(std::string_view what, std::string_view stage);
  [[noreturn]] void ThrowLate(std::string_view what, const Deadline& deadline,
                              const std::string& late) const;
  void Fail(std::string_view reason) noexcept;
  Operation& PrepareAllToAllV(const RowExchange& exchange);
  // scratch_->send, rows for every rank, becomes scratch_->recv, as many rows from every rank.
  void ExchangeForSum(size_t row_floats, std::span<const size_t> rows, const Deadline& deadline);

  const std::string name_;
  const size_t rank_;
  const std::vector<size_t> world_ranks_;
  const std::vector<size_t> nodes_;
  std::vector<size_t> node_peers_;
  std::vector<std::unique_ptr<Operation>> operations_;
  uint64_t num_started_ = 0;
  std::string failure_;  // of this rank; empty: none
  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
};

// SWITCHYARD_FAKE_NODE_SIZE, or 0 if it is not set. Errors: kInvalidArgument if it is not a number
// above 0.
size_t FakeNodeSize();

}  // namespace switchyard::parallel
