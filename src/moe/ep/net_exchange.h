// Rows and results between nodes: what a row channel asks of the way that they take.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moe/ep/exchange.h"

namespace switchyard::moe {

class NetExchange {
 public:
  virtual ~NetExchange() = default;

  // Sends the tokens that have to go to other nodes.
  // Shapes: topk [T, K]; neither is needed after the call.
  virtual void StartDispatch(ExecContext& context, const PackedTokens& tokens,
                             const TopKOutput& topk) = 0;
  // Adds the rows that this rank gets from each rank of other nodes, by token.
  using RowsOfSources = std::vector<std::vector<const std::byte*>>;  // [R]
  virtual void FinishDispatch(ExecContext& context, RowsOfSources& rows) = 0;

  // Sends the results of other nodes' tokens home. `results` stay until FinishCombine.
  virtual void StartCombine(ExecContext& context, const ComputedResults& results,
                            const RowPacker& packer) = 0;
  // Does what other nodes wait for and needs the ranks of this one.
  virtual void Relay(ExecContext&) {}
  // Those of the own tokens that were computed on other nodes. Shapes: rows [T * NumSlots()].
  virtual void CollectResults(std::span<const std::byte*> rows) = 0;

  // The group has been aborted: forgets what is under way.
  virtual void Drop() noexcept = 0;
};

// Rows to and from all ranks of a group: AllToAllV with buffers that grow and stay.
class NetLeg {
 public:
  NetLeg(ProcessGroup& group, size_t row_bytes);

  // How many rows for and from each rank. Set before Send and Start.
  std::span<size_t> send_rows() { return buffers_->send_rows; }
  std::span<size_t> recv_rows() { return buffers_->recv_rows; }
  size_t NumSent() const;
  // Asks every rank how many it sends.
  void ExchangeCounts(const Deadline& deadline);
  // Room for row i of all that are sent, by receiving rank.
  std::byte* SendRoom();
  void Start();
  void Wait(const Exchange& exchange, std::string_view stage);
  // Row i of all that have come, by sending rank.
  const std::byte* Row(size_t i) const { return buffers_->recv.data() + i * row_bytes_; }
  void Drop() noexcept { pending_ = {}; }

 private:
  // The group may hold on to them after a failure.
  struct Buffers {
    std::vector<std::byte> send, recv;
    std::vector<size_t> send_rows, recv_rows;
  };

  ProcessGroup& group_;
  const size_t row_bytes_;
  std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
  std::vector<uint32_t> send_counts_, recv_counts_;
  PendingExchange pending_;
};

// Rows straight from rank to rank, over all of the group or a copy of it.
std::unique_ptr<NetExchange> MakeFlatExchange(Exchange& exchange, ProcessGroup& net);

}  // namespace switchyard::moe
