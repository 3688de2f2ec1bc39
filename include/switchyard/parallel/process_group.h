// Ranks that work together: what they exchange, how they wait for each other, how they fail
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/core/rows.h"
#include "switchyard/parallel/deadline.h"
#include "switchyard/parallel/shared_window.h"

namespace switchyard {

// One rank's part of an AllToAllV: rows of row_bytes bytes for every rank, and room for those of
// every rank. All ranks of the group agree on row_bytes, and rank a's send_rows[b] equals rank b's
// recv_rows[a]; both may be 0. The two buffers do not overlap.
struct RowExchange {
  size_t row_bytes = 1;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::span<const size_t> send_rows;  // [size]
  std::span<const size_t> recv_rows;  // [size]
  // [size] the row of the buffer at which each rank's part starts; empty: one behind the other in
  // rank order.
  std::span<const size_t> send_starts;
  std::span<const size_t> recv_starts;
  // Keeps both buffers alive. A transport may go on reading and writing them after a wait has
  // failed; the group then holds on to the owner for as long as that is possible. Without an owner
  // the exchange goes through memory of the group, which costs a copy on each side.
  std::shared_ptr<const void> owner;
};

namespace internal {

// An exchange under way, as a PendingExchange sees it; the group owns it.
class StartedExchange {
 public:
  // As those of PendingExchange; Release says that nobody will look at it again.
  virtual bool Test() = 0;
  virtual void Wait(const Deadline& deadline) = 0;
  virtual void Release() noexcept = 0;

 protected:
  ~StartedExchange() = default;
};

}  // namespace internal

// An exchange that was started. Must not outlive its group. Destroying one that is not complete
// makes the group unusable on this rank, because its peers' data would arrive in the next one's
// place; so wait, also when what it brings is no longer wanted.
class PendingExchange {
 public:
  PendingExchange() = default;
  explicit PendingExchange(internal::StartedExchange* exchange) : exchange_(exchange) {}
  PendingExchange(PendingExchange&& other) noexcept
      : exchange_(std::exchange(other.exchange_, nullptr)) {}
  PendingExchange& operator=(PendingExchange&& other) noexcept {
    std::swap(exchange_, other.exchange_);
    return *this;
  }
  ~PendingExchange() {
    if (exchange_ != nullptr) exchange_->Release();
  }

  // Whether there is something to wait for.
  bool active() const { return exchange_ != nullptr; }
  // Drives the exchange and says whether it is complete, without waiting. Errors: as of Wait,
  // without the deadline.
  bool Test();
  // Returns when the rows of all ranks have arrived and the send buffer may be written again.
  // Errors: kUnavailable if the deadline passes (the exchange stays active: wait again, or give the
  //   group up) or the group has failed.
  void Wait(const Deadline& deadline);

 private:
  internal::StartedExchange* exchange_ = nullptr;
};

// A set of ranks with communicators, buffers and numbering of its own.
//
// Everything that takes a Deadline is collective: every rank of the group calls it, in the same
// order, with arguments that fit together. A group is used by one thread at a time; different
// groups of a rank need not agree on an order with each other, except that groups are made in the
// same order on all their ranks.
//
// Errors: every wait throws kUnavailable, naming group, operation, stage and the ranks it waited
//   for, when its deadline passes, and kUnavailable with the message of the rank that failed after
//   an Abort. A blocking call that has failed leaves the group unusable: each later call throws
//   kUnavailable with the first reason. kInvalidArgument if sizes contradict each other.
// Source: contract 1.7 and 3.0; the waiting rules are those of Mooncake's process group, except
//   that a wait has its limit from the first call on.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual size_t rank() const = 0;
  virtual size_t size() const = 0;
  virtual const std::string& name() const = 0;
  // What carries it: "threads" or "mpi".
  virtual std::string_view carrier() const = 0;
  // The rank's number in the world that the group was split from.
  virtual size_t WorldRank(size_t rank) const = 0;
  // The number of the node that `rank` runs on, counted over the world. Ranks of a node share
  // memory.
  virtual size_t NodeOf(size_t rank) const = 0;
  // The ranks of this group on this rank's node, ascending, this rank among them.
  virtual std::span<const size_t> node_peers() const = 0;

  // Returns when every rank has called it.
  virtual void Barrier(const Deadline& deadline) = 0;

  // all = the bytes of rank 0, 1, … one behind the other; all.size() == size() * mine.size(), the
  // same on all ranks.
  virtual void AllGather(std::span<const std::byte> mine, std::span<std::byte> all,
                         const Deadline& deadline) = 0;

  // send = as many numbers for each rank, in rank order; recv = those that each rank sent here.
  virtual void AllToAll(std::span<const uint32_t> send, std::span<uint32_t> recv,
                        const Deadline& deadline) = 0;

  // Moves rows from every rank to every rank. Exchanges that were started may be waited for in any
  // order; several may be under way. `exchange` is not needed after the call, its buffers are until
  // the wait returns.
  // Errors: kInvalidArgument if a list has not size() entries or a number of rows exceeds what the
  //   carrier can count (2^31 - 1 rows).
  virtual PendingExchange StartAllToAllV(const RowExchange& exchange) = 0;
  virtual void AllToAllV(const RowExchange& exchange, const Deadline& deadline) = 0;

  // all = the rows of every rank in rank order, rank r's being rows[r] of row_bytes bytes; `mine`
  // holds rows[rank()] of them. `owner` as in RowExchange, of both buffers.
  virtual void AllGatherV(size_t row_bytes, std::span<const std::byte> mine,
                          std::span<const size_t> rows, std::span<std::byte> all,
                          const Deadline& deadline,
                          std::shared_ptr<const void> owner = nullptr) = 0;

  // values = the sum over ranks, element by element, the same bits on all of them.
  // Deterministic: ((x0 + x1) + x2) + …, in rank order; no reduction of the carrier is used, whose
  //   order would depend on sizes and timing.
  virtual void AllReduceSum(std::span<float> values, const Deadline& deadline) = 0;

  // mine = this rank's rows of the sum over ranks of `partial`, whose rows are those of rank 0, 1,
  // … one behind the other.
  // Shapes: partial [sum of rows, C], rows [size], mine [rows[rank], C].
  // Deterministic: as AllReduceSum.
  virtual void ReduceScatterV(ConstRows partial, std::span<const size_t> rows, Rows mine,
                              const Deadline& deadline) = 0;

  // Memory that the ranks of a node share, each rank's part zeroed by itself. Destroy it on all
  // ranks alike, and before the group; a rank that leaves by an exception or from a group that has
  // failed does not wait for the others.
  // Errors: kResourceExhausted on all ranks, naming the window, options.setting, the bytes needed
  //   and found, if a node has too little shared memory; kInvalidArgument if ranks ask for
  //   different sizes.
  virtual std::unique_ptr<SharedWindow> MakeWindow(const WindowOptions& options,
                                                   const Deadline& deadline) = 0;

  // A color for Split that stands for: not in any of the new groups.
  static constexpr size_t kNoGroup = SIZE_MAX;
  // The group of all ranks that give the same color, ordered by (key, rank); null for kNoGroup.
  virtual std::unique_ptr<ProcessGroup> Split(size_t color, size_t key, std::string_view name,
                                              const Deadline& deadline) = 0;
  // The same ranks with resources of their own: what happens in one group neither delays nor fails
  // the other.
  virtual std::unique_ptr<ProcessGroup> Duplicate(std::string_view name,
                                                  const Deadline& deadline) = 0;

  // Not collective: makes this group, and every group that came out of it, fail on all ranks with
  // `message`, at once if they wait, else at their next wait. The first message wins. Groups that
  // this one came out of stay usable.
  virtual void Abort(std::string_view message) = 0;

  // Not collective: this rank will not wait for `rank` any more when groups, windows and the
  // program end. For ranks whose process is gone; collectives of this group stay impossible.
  virtual void MarkLost(size_t /*rank*/) {}

  // Every rank says whether it has failed (`mine`, null if all is well). If any has, the error of
  // the lowest such rank is thrown on all of them, its message preceded by "rank 2: " on the
  // others.
  virtual void AgreeOnError(const Error* mine, const Deadline& deadline) = 0;
};

// Runs body on every rank and then makes sure that it succeeded on all of them (AgreeOnError): for
// steps that may fail on one rank only, before the next exchange relies on them.
template <typename Body>
void RunTogether(ProcessGroup& group, const Deadline& deadline, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    group.AgreeOnError(&error, deadline);
  } catch (const std::exception& exception) {
    const Error error(ErrorCode::kInternal, exception.what());
    group.AgreeOnError(&error, deadline);
  }
  group.AgreeOnError(nullptr, deadline);
}

// One value of every rank, in rank order.
template <typename T>
  requires std::is_trivially_copyable_v<T>
std::vector<T> AllGatherValue(ProcessGroup& group, const T& mine, const Deadline& deadline) {
  std::vector<T> all(group.size());
  group.AllGather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                  deadline);
  return all;
}

// A text of every rank, in rank order; collective as all of these.
std::vector<std::string> AllGatherText(ProcessGroup& group, std::string_view mine,
                                       const Deadline& deadline);

}  // namespace switchyard
