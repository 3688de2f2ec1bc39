#include <algorithm>
#include <numeric>

#include "moe/ep/net_exchange.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

void Grow(std::vector<std::byte>& buffer, std::span<const size_t> rows, size_t row_bytes) {
  const size_t bytes = std::accumulate(rows.begin(), rows.end(), size_t{0}) * row_bytes;
  if (buffer.size() < bytes) buffer.resize(bytes);
}

}  // namespace

NetLeg::NetLeg(ProcessGroup& group, size_t row_bytes) : group_(group), row_bytes_(row_bytes) {
  buffers_->send_rows.resize(group.size());
  buffers_->recv_rows.resize(group.size());
  send_counts_.resize(group.size());
  recv_counts_.resize(group.size());
}

size_t NetLeg::NumSent() const {
  return std::accumulate(buffers_->send_rows.begin(), buffers_->send_rows.end(), size_t{0});
}

void NetLeg::ExchangeCounts(const Deadline& deadline) {
  std::transform(send_rows().begin(), send_rows().end(), send_counts_.begin(),
                 [](size_t rows) { return static_cast<uint32_t>(rows); });
  group_.AllToAll(send_counts_, recv_counts_, deadline);
  std::copy(recv_counts_.begin(), recv_counts_.end(), recv_rows().begin());
}

std::byte* NetLeg::SendRoom() {
  Grow(buffers_->send, send_rows(), row_bytes_);
  return buffers_->send.data();
}

void NetLeg::Start() {
  Grow(buffers_->recv, recv_rows(), row_bytes_);
  RowExchange exchange;
  exchange.row_bytes = row_bytes_;
  exchange.send = buffers_->send.data();
  exchange.recv = buffers_->recv.data();
  exchange.send_rows = send_rows();
  exchange.recv_rows = recv_rows();
  exchange.owner = buffers_;
  pending_ = group_.StartAllToAllV(exchange);
}

void NetLeg::Wait(const Exchange& exchange, std::string_view stage) {
  if (!pending_.active()) return;
  try {
    pending_.Wait(exchange.Limit(stage));
  } catch (const Error& error) {
    exchange.Rethrow(stage, error);
  }
  pending_ = {};
}

}  // namespace switchyard::moe
