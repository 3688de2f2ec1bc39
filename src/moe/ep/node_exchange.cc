#include "moe/ep/node_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "quant/act_quant.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

// Counts of flags: what says that a rank has given up, and that rows are published, not pushed.
constexpr uint32_t kGivenUp = UINT32_MAX;
constexpr uint32_t kPublished = 0x80000000;

}  // namespace

NodeExchange::NodeExchange(Exchange& exchange)
    : exchange_(exchange),
      row_bytes_(exchange.options.wire.row_bytes()),
      push_rows_(std::min(exchange.ep.options().push_rows, exchange.options.max_tokens)) {
  const RowChannelOptions& options = exchange.options;
  const size_t node_size = exchange.nodes.LargestNode();  // parts are of one size everywhere
  if (options.dispatches) {
    published_at_ = node_size * push_rows_ * row_bytes_;
    lists_at_ = published_at_;
    if (options.max_tokens > push_rows_) lists_at_ += options.max_tokens * row_bytes_;
    results_at_ = lists_at_ + WireUp(node_size * options.max_tokens * sizeof(uint32_t));
  }
  // Every rank of the group makes the window, also one that is alone on its node.
  window_ = exchange.MakeWindow(
      options.protocol,
      results_at_ + options.max_tokens * exchange.NumSlots() * options.home.bytes(), kNumFlags,
      options.setting);
}

// --- Waiting and failing ------------------------------------------------------------------------

std::optional<Signal> NodeExchange::AwaitPeer(size_t rank, Flag flag, std::string_view stage) {
  if (!exchange_.IsActive(rank)) return std::nullopt;
  const bool elastic = exchange_.options.elastic;
  // The elastic protocols wait for ever until their first combine (contract 3.7).
  const bool limited = !elastic || exchange_.ep.is_warm();
  const Deadline deadline = limited ? exchange_.Limit(stage) : Deadline::Never(stage);
  try {
    const Signal signal = exchange_.Await(*window_, rank, flag, deadline);
    if (signal.epoch == exchange_.epoch && signal.count == kGivenUp) {
      throw Error(ErrorCode::kUnavailable,
                  fmt::format("rank {} has given this step up", exchange_.group.WorldRank(rank)));
    }
    return signal;
  } catch (const Error& error) {
    // Only silence is a loss; a rank that says what is wrong with it ends the pass. And the
    // collectives between nodes need every rank.
    const bool silent = exchange_.ep.IsDead(exchange_.group, rank) || deadline.Passed();
    const bool lost = elastic && !exchange_.has_net && silent;
    if (!lost) exchange_.Rethrow(stage, error);
    exchange_.ep.MarkLost(rank, exchange_.Where(stage) + ": " + error.what());
    return std::nullopt;
  }
}

void NodeExchange::PostAll(Flag flag, uint32_t count) {
  posted_[flag] = true;
  if (window_ == nullptr) return;
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer != exchange_.group.rank()) window_->Post(peer, flag, {exchange_.epoch, count});
  }
}

void NodeExchange::GiveUp() {
  for (const Flag flag : {kRowsFlag, kResultsFlag}) {
    if (!posted_[flag]) PostAll(flag, kGivenUp);
  }
  must_drain_ = true;
}

void NodeExchange::AwaitOldExchange() {
  if (!must_drain_) return;
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer != exchange_.group.rank() && exchange_.IsActive(peer))
      exchange_.Await(*window_, peer, kResultsFlag, exchange_.Limit("begin"));
  }
  must_drain_ = false;
}

void NodeExchange::Begin() {
  posted_[kRowsFlag] = !exchange_.options.dispatches;
  posted_[kResultsFlag] = false;
}

// --- Places -------------------------------------------------------------------------------------

std::byte* NodeExchange::Pushed(size_t receiver, size_t sender) const {
  return window_->Part(receiver).data() + exchange_.nodes.index[sender] * push_rows_ * row_bytes_;
}

std::byte* NodeExchange::Published(size_t rank) const {
  return window_->Part(rank).data() + published_at_;
}

uint32_t* NodeExchange::List(size_t sender, size_t receiver) const {
  auto* lists = reinterpret_cast<uint32_t*>(window_->Part(sender).data() + lists_at_);
  return lists + exchange_.nodes.index[receiver] * exchange_.options.max_tokens;
}

std::byte* NodeExchange::Place(size_t rank, size_t slot) const {
  return window_->Part(rank).data() + results_at_ + slot * exchange_.options.home.bytes();
}

// --- Rows ---------------------------------------------------------------------------------------

std::byte* NodeExchange::PackRoom(size_t num_tokens) const {
  if (window_ == nullptr || num_tokens <= push_rows_) return nullptr;
  return Published(exchange_.group.rank());
}

void NodeExchange::Send(ExecContext& context, const PackedTokens& packed, size_t num_tokens) {
  if (window_ == nullptr) return;
  const size_t me = exchange_.group.rank();
  const bool publish = PackRoom(num_tokens) != nullptr;
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer == me || !exchange_.IsActive(peer)) continue;
    const std::vector<uint32_t>& tokens = exchange_.targets[peer];
    if (publish) {
      std::copy(tokens.begin(), tokens.end(), List(me, peer));
    } else {
      std::byte* to = Pushed(peer, me);
      quant::ForEachRow(context, tokens.size(), [&](size_t i) {
        std::memcpy(to + i * row_bytes_, packed.Row(tokens[i]), row_bytes_);
      });
    }
    const auto count = static_cast<uint32_t>(tokens.size());
    window_->Post(peer, kRowsFlag, {exchange_.epoch, publish ? count | kPublished : count});
    exchange_.stats.rows_in_node += count;
  }
  posted_[kRowsFlag] = true;
}

void NodeExchange::Receive(size_t source, std::vector<const std::byte*>& rows) {
  const std::optional<Signal> signal = AwaitPeer(source, kRowsFlag, "dispatch");
  if (!signal) return;
  const size_t me = exchange_.group.rank();
  const size_t count = signal->count & ~kPublished;
  const bool published = (signal->count & kPublished) != 0;
  const std::byte* from = published ? Published(source) : Pushed(me, source);
  const uint32_t* list = List(source, me);
  for (size_t i = 0; i < count; ++i) rows.push_back(from + (published ? list[i] : i) * row_bytes_);
}

// --- Results ------------------------------------------------------------------------------------

std::byte* NodeExchange::ResultSlot(size_t owner, size_t slot) const {
  return exchange_.IsActive(owner) ? Place(owner, slot) : nullptr;
}

void NodeExchange::PostResults(size_t count) {
  PostAll(kResultsFlag, static_cast<uint32_t>(count));
}

void NodeExchange::CollectResults(std::span<const std::byte*> rows) {
  const size_t me = exchange_.group.rank();
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer == me || !AwaitPeer(peer, kResultsFlag, "combine")) continue;
    for (uint32_t slot : exchange_.result_slots[peer]) rows[slot] = Place(me, slot);
  }
}

}  // namespace switchyard::moe
