// The least that an exchange of rows between ranks could cost: the same rows, moved by nothing but
// the carrier. What `bench --ep` holds the dispatchers against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard::cli {

// Rows of one size from every rank to every rank, as one rank sees them.
struct Leg {
  size_t row_bytes = 0;
  // The ranks do not know how many rows come.
  bool needs_counts = false;
  // The rows of this rank to itself stay where they are; else they are moved like all others.
  bool own_in_place = false;
  std::vector<std::vector<uint32_t>> send;  // [R] rows of the source buffer that go to each rank
  std::vector<size_t> recv;                 // [R] rows that come from each rank

  size_t num_source_rows() const;
};

// Rows that come from each rank, the own ones left out if they stay in place.
std::vector<size_t> MovedRows(const Leg& leg, size_t me);

// Moves the rows of some legs, one leg after the other, and reads once what has arrived.
// Collective.
class RawExchange {
 public:
  RawExchange(ProcessGroup& group, std::vector<Leg> legs);
  virtual ~RawExchange() = default;

  void Run();

 protected:
  virtual void RunLeg(size_t leg) = 0;
  // Row i of those that go to `rank`.
  const std::byte* SourceRow(size_t leg, size_t rank, size_t i) const {
    return sources_[leg].data() + legs_[leg].send[rank][i] * legs_[leg].row_bytes;
  }
  // Copies the rows that go to `rank` to `to`, one behind the other.
  void Pack(size_t leg, size_t rank, std::byte* to) const;

  ProcessGroup& group_;
  const std::vector<Leg> legs_;

 private:
  std::vector<std::vector<std::byte>> sources_;  // of each leg
};

// Stores into the memory of the receiver and a flag. Ranks of one node; between two Runs all ranks
// meet, because the one copy of the memory is written again.
class WindowCopy : public RawExchange {
 public:
  WindowCopy(ProcessGroup& group, std::vector<Leg> legs);

 protected:
  void RunLeg(size_t leg) override;

 private:
  size_t RowsBefore(size_t leg, size_t source) const;

  std::unique_ptr<SharedWindow> window_;
  std::vector<size_t> leg_at_;                   // bytes into a part
  std::vector<std::vector<size_t>> first_byte_;  // [leg, R] into the receiver's part
  uint32_t epoch_ = 0;
};

// AllToAll of counts where a leg needs them, then AllToAllV.
class CarrierExchange : public RawExchange {
 public:
  CarrierExchange(ProcessGroup& group, std::vector<Leg> legs);

 protected:
  void RunLeg(size_t leg) override;

 private:
  struct Buffers {
    std::vector<std::byte> send, recv;
    std::vector<size_t> send_rows, recv_rows;
  };
  std::vector<std::shared_ptr<Buffers>> buffers_;  // of each leg
  std::vector<uint32_t> send_counts_, recv_counts_;
};

// No other rank: a copy and a read of as many bytes in memory of this rank.
class LocalCopy : public RawExchange {
 public:
  LocalCopy(ProcessGroup& group, std::vector<Leg> legs);

 protected:
  void RunLeg(size_t leg) override;

 private:
  std::vector<std::vector<std::byte>> copies_;
};

// Reads every byte once.
void ReadAll(const std::byte* data, size_t bytes);

}  // namespace switchyard::cli
