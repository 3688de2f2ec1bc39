#include "bench_raw.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "switchyard/core/macros.h"

namespace switchyard::cli {
namespace {

Deadline Limit() { return Deadline::After(std::chrono::minutes(2), "bench"); }

size_t Sum(const std::vector<size_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), size_t{0});
}

}  // namespace

void ReadAll(const std::byte* data, size_t bytes) {
  [[maybe_unused]] static volatile uint64_t sink;  // so that the reads are not left out
  uint64_t sums[8] = {};
  for (size_t at = 0; at + sizeof(sums) <= bytes; at += sizeof(sums)) {
    uint64_t words[8];
    std::memcpy(words, data + at, sizeof(words));
    for (size_t i = 0; i < 8; ++i) sums[i] += words[i];
  }
  sink = std::accumulate(std::begin(sums), std::end(sums), uint64_t{0});
}

size_t Leg::num_source_rows() const {
  size_t rows = 0;
  for (const std::vector<uint32_t>& to_rank : send) {
    for (uint32_t row : to_rank) rows = std::max<size_t>(rows, row + 1);
  }
  return rows;
}

std::vector<size_t> MovedRows(const Leg& leg, size_t me) {
  std::vector<size_t> rows = leg.recv;
  if (leg.own_in_place) rows[me] = 0;
  return rows;
}

RawExchange::RawExchange(ProcessGroup& group, std::vector<Leg> legs)
    : group_(group), legs_(std::move(legs)) {
  for (const Leg& leg : legs_) {
    SY_CHECK(leg.row_bytes % 64 == 0 && leg.send.size() == group.size());
    sources_.emplace_back(leg.num_source_rows() * leg.row_bytes, std::byte{1});
  }
}

void RawExchange::Run() {
  const size_t me = group_.rank();
  for (size_t leg = 0; leg < legs_.size(); ++leg) {
    RunLeg(leg);
    if (!legs_[leg].own_in_place) continue;
    for (size_t i = 0; i < legs_[leg].send[me].size(); ++i)
      ReadAll(SourceRow(leg, me, i), legs_[leg].row_bytes);
  }
}

void RawExchange::Pack(size_t leg, size_t rank, std::byte* to) const {
  const size_t row_bytes = legs_[leg].row_bytes;
  for (size_t i = 0; i < legs_[leg].send[rank].size(); ++i)
    std::memcpy(to + i * row_bytes, SourceRow(leg, rank, i), row_bytes);
}

// --- Through shared memory ----------------------------------------------------------------------

size_t WindowCopy::RowsBefore(size_t leg, size_t source) const {
  const auto& recv = legs_[leg].recv;
  return std::accumulate(recv.begin(), recv.begin() + static_cast<std::ptrdiff_t>(source),
                         size_t{0});
}

WindowCopy::WindowCopy(ProcessGroup& group, std::vector<Leg> legs)
    : RawExchange(group, std::move(legs)) {
  size_t bytes = 0;
  for (const Leg& leg : legs_) {
    leg_at_.push_back(bytes);
    bytes += Sum(leg.recv) * leg.row_bytes;
  }
  // Parts are of one size everywhere.
  for (size_t needed : AllGatherValue(group_, bytes, Limit())) bytes = std::max(bytes, needed);
  window_ = group_.MakeWindow({.name = "raw exchange",
                               .bytes_per_rank = std::max<size_t>(bytes, 64),
                               .num_flags = legs_.size(),
                               .setting = "--tokens"},
                              Limit());
  for (size_t leg = 0; leg < legs_.size(); ++leg) {
    // Where the rows of each source begin is the receiver's to say.
    std::vector<uint32_t> mine(group_.size()), theirs(group_.size());
    for (size_t source = 0; source < group_.size(); ++source)
      mine[source] = static_cast<uint32_t>(RowsBefore(leg, source));
    group_.AllToAll(mine, theirs, Limit());
    const std::vector<size_t> at = AllGatherValue(group_, leg_at_[leg], Limit());
    std::vector<size_t> first_byte;
    for (size_t rank = 0; rank < group_.size(); ++rank)
      first_byte.push_back(at[rank] + theirs[rank] * legs_[leg].row_bytes);
    first_byte_.push_back(first_byte);
  }
}

void WindowCopy::RunLeg(size_t leg) {
  const Leg& rows = legs_[leg];
  const size_t me = group_.rank();
  if (leg == 0) ++epoch_;
  // Peers first: they wait.
  for (size_t i = 1; i <= group_.size(); ++i) {
    const size_t to = (me + i) % group_.size();
    if (to != me || !rows.own_in_place)
      Pack(leg, to, window_->Part(to).data() + first_byte_[leg][to]);
    window_->Post(to, leg, {epoch_, static_cast<uint32_t>(rows.send[to].size())});
  }
  const std::byte* from = window_->Part(me).data() + leg_at_[leg];
  for (size_t source = 0; source < group_.size(); ++source) {
    window_->Await(source, leg, epoch_, Limit());
    const size_t bytes = rows.recv[source] * rows.row_bytes;
    if (source != me || !rows.own_in_place) ReadAll(from, bytes);
    from += bytes;
  }
}

// --- Through the carrier ------------------------------------------------------------------------

CarrierExchange::CarrierExchange(ProcessGroup& group, std::vector<Leg> legs)
    : RawExchange(group, std::move(legs)), send_counts_(group.size()), recv_counts_(group.size()) {
  for (const Leg& leg : legs_) {
    auto buffers = std::make_shared<Buffers>();
    for (size_t rank = 0; rank < group.size(); ++rank) {
      const bool stays = leg.own_in_place && rank == group.rank();
      buffers->send_rows.push_back(stays ? 0 : leg.send[rank].size());
    }
    buffers->recv_rows = MovedRows(leg, group.rank());
    buffers->send.resize(Sum(buffers->send_rows) * leg.row_bytes);
    buffers->recv.resize(Sum(buffers->recv_rows) * leg.row_bytes);
    buffers_.push_back(std::move(buffers));
  }
}

void CarrierExchange::RunLeg(size_t leg) {
  Buffers& buffers = *buffers_[leg];
  const Leg& rows = legs_[leg];
  std::byte* to = buffers.send.data();
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    if (buffers.send_rows[rank] != 0) Pack(leg, rank, to);
    to += buffers.send_rows[rank] * rows.row_bytes;
    send_counts_[rank] = static_cast<uint32_t>(buffers.send_rows[rank]);
  }
  if (rows.needs_counts) group_.AllToAll(send_counts_, recv_counts_, Limit());
  RowExchange exchange;
  exchange.row_bytes = rows.row_bytes;
  exchange.send = buffers.send.data();
  exchange.recv = buffers.recv.data();
  exchange.send_rows = buffers.send_rows;
  exchange.recv_rows = buffers.recv_rows;
  exchange.owner = buffers_[leg];
  group_.AllToAllV(exchange, Limit());
  ReadAll(buffers.recv.data(), buffers.recv.size());
}

// --- Alone --------------------------------------------------------------------------------------

LocalCopy::LocalCopy(ProcessGroup& group, std::vector<Leg> legs)
    : RawExchange(group, std::move(legs)) {
  for (const Leg& leg : legs_)
    copies_.emplace_back(Sum(MovedRows(leg, group.rank())) * leg.row_bytes);
}

// As many rows as arrive, whichever they are.
void LocalCopy::RunLeg(size_t leg) {
  const size_t row_bytes = legs_[leg].row_bytes;
  std::vector<std::byte>& copy = copies_[leg];
  std::byte* to = copy.data();
  std::byte* const end = to + copy.size();
  while (to != end) {
    const std::byte* const before = to;
    for (size_t rank = 0; rank < group_.size(); ++rank) {
      for (size_t i = 0; i < legs_[leg].send[rank].size() && to != end; ++i, to += row_bytes)
        std::memcpy(to, SourceRow(leg, rank, i), row_bytes);
    }
    if (to == before) break;  // nothing of its own to copy
  }
  ReadAll(copy.data(), copy.size());
}

}  // namespace switchyard::cli
