#include "moe/ep/rail_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/elementwise/elementwise.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe {

RailExchange::RailExchange(Exchange& exchange, ProcessGroup& rail)
    : exchange_(exchange),
      row_bytes_(exchange.options.wire.row_bytes()),
      num_places_((exchange.nodes.size() - 1) * exchange.options.max_tokens),
      out_(rail, row_bytes_),
      home_(rail, exchange.options.home.bytes()),
      tokens_of_(exchange.nodes.size()),
      relayed_(exchange.nodes.size()),
      for_peer_(exchange.group.node_peers().size()),
      of_node_(for_peer_.size()),
      slots_of_(exchange.nodes.size()) {
  const RowChannelOptions& options = exchange.options;
  if (options.dispatches) {
    lists_at_ = num_places_ * row_bytes_;
    results_at_ = lists_at_ + WireUp(for_peer_.size() * num_places_ * sizeof(uint32_t));
  }
  window_ = exchange.MakeWindow(
      options.protocol + " relay",
      results_at_ + num_places_ * exchange.NumSlots() * options.home.bytes(), kNumFlags,
      fmt::format("{}; ep-hierarchical off does without", options.setting));
}

template <typename Body>
void RailExchange::ForEachNode(const Body& body) const {
  for (size_t node = 0; node < exchange_.nodes.size(); ++node) {
    if (node != exchange_.nodes.here) body(node);
  }
}

size_t RailExchange::BucketOf(size_t rank) const {
  const NodeMap& nodes = exchange_.nodes;
  return nodes.IsHere(rank) ? Exchange::kNowhere : nodes.node[rank];
}

Signal RailExchange::AwaitPeer(size_t rank, Flag flag, std::string_view stage) const {
  try {
    return exchange_.Await(*window_, rank, flag, exchange_.Limit(stage));
  } catch (const Error& error) {
    exchange_.Rethrow(stage, error);
  }
}

// --- Places -------------------------------------------------------------------------------------

size_t RailExchange::FirstPlace(size_t node) const {
  return (node - (node > exchange_.nodes.here ? 1 : 0)) * exchange_.options.max_tokens;
}

size_t RailExchange::NodeOfPlace(size_t place) const {
  const size_t node = place / exchange_.options.max_tokens;
  return node + (node >= exchange_.nodes.here ? 1 : 0);
}

std::byte* RailExchange::RelayedRow(size_t relay, size_t place) const {
  return window_->Part(relay).data() + place * row_bytes_;
}

uint32_t* RailExchange::List(size_t relay, size_t reader) const {
  auto* lists = reinterpret_cast<uint32_t*>(window_->Part(relay).data() + lists_at_);
  return lists + exchange_.nodes.index[reader] * num_places_;
}

std::byte* RailExchange::ResultSlot(size_t relay, size_t place, size_t slot) const {
  return window_->Part(relay).data() + results_at_ +
         (place * exchange_.NumSlots() + slot) * exchange_.options.home.bytes();
}

// --- Out ----------------------------------------------------------------------------------------

void RailExchange::StartDispatch(ExecContext& context, const PackedTokens& packed,
                                 const TopKOutput& topk) {
  exchange_.ListTokens(
      topk, [&](size_t rank) { return BucketOf(rank); }, tokens_of_);
  ForEachNode([&](size_t node) { out_.send_rows()[node] = tokens_of_[node].size(); });
  out_.ExchangeCounts(exchange_.Limit("dispatch"));
  std::byte* to = out_.SendRoom();
  ForEachNode([&](size_t node) {
    const std::vector<uint32_t>& tokens = tokens_of_[node];
    quant::ForEachRow(context, tokens.size(), [&](size_t i) {
      std::memcpy(to + i * row_bytes_, packed.Row(tokens[i]), row_bytes_);
    });
    to += tokens.size() * row_bytes_;
  });
  exchange_.stats.rows_between_nodes += out_.NumSent();
  out_.Start();
}

void RailExchange::FinishDispatch(ExecContext& context, RowsOfSources& rows) {
  out_.Wait(exchange_, "dispatch");
  ReadArrivals();
  Publish(context);
  const size_t me = exchange_.group.rank();
  size_t first = 0;
  ForEachNode([&](size_t node) {
    const size_t source = exchange_.nodes.ranks[node][LocalIndex()];
    for (uint32_t place : for_peer_[LocalIndex()]) {
      if (NodeOfPlace(place) == node)
        rows[source].push_back(out_.Row(first + place - FirstPlace(node)));
    }
    first += relayed_[node].token.size();
  });
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer != me) TakeFromRelay(peer, rows);
  }
}

// Which tokens have come, and who is to have them.
void RailExchange::ReadArrivals() {
  const WireLayout& wire = exchange_.options.wire;
  for (std::vector<uint32_t>& places : for_peer_) places.clear();
  size_t next = 0;
  ForEachNode([&](size_t node) {
    const size_t count = out_.recv_rows()[node];
    SY_CHECK(count <= exchange_.options.max_tokens);
    Relayed& relayed = relayed_[node];
    relayed.Clear();
    for (size_t i = 0; i < count; ++i) {
      const std::byte* row = out_.Row(next++);
      relayed.token.push_back(WireLayout::Token(row));
      for (size_t k = 0; k < wire.top_k(); ++k) relayed.ids.push_back(wire.Id(row, k));
    }
    const TopKOutput topk{count, wire.top_k(), {}, relayed.ids, {}};
    exchange_.ListTokens(
        topk,
        [&](size_t rank) {
          return exchange_.nodes.IsHere(rank) ? exchange_.nodes.index[rank] : Exchange::kNowhere;
        },
        of_node_);
    for (size_t peer = 0; peer < of_node_.size(); ++peer) {
      for (uint32_t i : of_node_[peer])
        for_peer_[peer].push_back(static_cast<uint32_t>(FirstPlace(node)) + i);
    }
  });
}

// Rows and lists for the others of the node. The own ones stay where they came.
void RailExchange::Publish(ExecContext& context) {
  const size_t me = exchange_.group.rank();
  is_read_.assign(num_places_, false);
  for (size_t peer = 0; peer < for_peer_.size(); ++peer) {
    if (peer == LocalIndex()) continue;
    for (uint32_t place : for_peer_[peer]) is_read_[place] = true;
  }
  size_t first = 0;
  ForEachNode([&](size_t node) {
    const size_t place = FirstPlace(node);
    const size_t count = relayed_[node].token.size();
    quant::ForEachRow(context, count, [&](size_t i) {
      if (is_read_[place + i])
        std::memcpy(RelayedRow(me, place + i), out_.Row(first + i), row_bytes_);
    });
    first += count;
  });
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer == me) continue;
    const std::vector<uint32_t>& places = for_peer_[exchange_.nodes.index[peer]];
    std::copy(places.begin(), places.end(), List(me, peer));
    window_->Post(peer, kRowsFlag, {exchange_.epoch, static_cast<uint32_t>(places.size())});
    exchange_.stats.rows_in_node += places.size();
  }
}

void RailExchange::TakeFromRelay(size_t relay, RowsOfSources& rows) const {
  const size_t count = AwaitPeer(relay, kRowsFlag, "dispatch").count;
  const uint32_t* list = List(relay, exchange_.group.rank());
  const size_t index = exchange_.nodes.index[relay];
  for (size_t i = 0; i < count; ++i) {
    const size_t source = exchange_.nodes.ranks[NodeOfPlace(list[i])][index];
    rows[source].push_back(RelayedRow(relay, list[i]));
  }
}

// --- Home ---------------------------------------------------------------------------------------

void RailExchange::StartCombine(ExecContext& context, const ComputedResults& results,
                                const RowPacker& packer) {
  const NodeMap& nodes = exchange_.nodes;
  const size_t top_k = exchange_.options.wire.top_k();
  const size_t parts = exchange_.options.parts;
  const size_t me = exchange_.group.rank();
  const ReceivedTokens& received = *results.received;
  quant::ForEachRow(context, received.size(), [&](size_t i) {
    const size_t source = received.source[i];
    if (nodes.IsHere(source)) return;
    const size_t relay = nodes.ranks[nodes.here][nodes.index[source]];
    const size_t place = FirstPlace(nodes.node[source]) + received.token[i];
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t row = results.row_of[i * top_k + k];
      if (row >= 0)
        packer.Pack(static_cast<size_t>(row), ResultSlot(relay, place, k * parts + me % parts));
    }
  });
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer != me) window_->Post(peer, kResultsFlag, {exchange_.epoch, 0});
  }
  exchange_.stats.results_in_node += exchange_.CountResults(results, [&](size_t source) {
    return !nodes.IsHere(source) && nodes.index[source] != LocalIndex();
  });
  if (!exchange_.options.dispatches) ListWithoutDispatch(results);
  exchange_.ListSlots(
      exchange_.own.topk, [&](size_t rank) { return BucketOf(rank); }, slots_of_);
}

// The tokens that would have come over the rail: those of the partners.
void RailExchange::ListWithoutDispatch(const ComputedResults& results) {
  const NodeMap& nodes = exchange_.nodes;
  const size_t top_k = exchange_.options.wire.top_k();
  const ReceivedTokens& received = *results.received;
  SY_CHECK(results.ids.size() == received.size() * top_k);
  for (Relayed& relayed : relayed_) relayed.Clear();
  for (size_t i = 0; i < received.size(); ++i) {
    const size_t source = received.source[i];
    if (nodes.IsHere(source) || nodes.index[source] != LocalIndex()) continue;
    Relayed& relayed = relayed_[nodes.node[source]];
    relayed.token.push_back(received.token[i]);
    const auto ids = results.ids.subspan(i * top_k, top_k);
    relayed.ids.insert(relayed.ids.end(), ids.begin(), ids.end());
  }
}

void RailExchange::Relay(ExecContext& context) {
  for (size_t peer : exchange_.group.node_peers()) {
    if (peer != exchange_.group.rank()) AwaitPeer(peer, kResultsFlag, "combine");
  }
  ListResultsToSend();
  std::byte* to = home_.SendRoom();
  if (exchange_.sum == ResultSum::kRows) {
    SumResults(context, to);
  } else {
    const size_t bytes = exchange_.options.home.bytes();
    quant::ForEachRow(context, parts_.size(),
                      [&](size_t i) { std::memcpy(to + i * bytes, parts_[i], bytes); });
  }
  ForEachNode([&](size_t node) { home_.recv_rows()[node] = slots_of_[node].size(); });
  exchange_.stats.results_between_nodes += home_.NumSent();
  home_.Start();
}

// Where they are, by node, token and slot: the order in which the sources expect them.
void RailExchange::ListResultsToSend() {
  const size_t top_k = exchange_.options.wire.top_k();
  parts_.clear();
  begin_.clear();
  ForEachNode([&](size_t node) {
    const Relayed& relayed = relayed_[node];
    const size_t rows_before = begin_.size();
    for (size_t i = 0; i < relayed.token.size(); ++i) {
      const size_t place = FirstPlace(node) + relayed.token[i];
      const size_t parts_before = parts_.size();
      const std::span<const int32_t> ids(relayed.ids.data() + i * top_k, top_k);
      exchange_.ForEachResult(ids, [&](size_t slot, size_t rank) {
        if (!exchange_.nodes.IsHere(rank)) return;
        const bool is_next_row =
            exchange_.sum == ResultSum::kRoutes || parts_.size() == parts_before;
        if (is_next_row) begin_.push_back(parts_.size());
        parts_.push_back(ResultSlot(exchange_.group.rank(), place, slot));
      });
    }
    home_.send_rows()[node] = begin_.size() - rows_before;
  });
  begin_.push_back(parts_.size());
}

void RailExchange::SumResults(ExecContext& context, std::byte* to) {
  const ValueLayout& home = exchange_.options.home;
  const size_t cols = exchange_.options.hidden_size;
  const Rows sums = context.arena.AllocateRows(begin_.size() - 1, cols);
  const std::span<float> scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * cols);
  context.pool.Run(sums.rows, [&](size_t i, size_t worker) {
    std::fill_n(sums.Row(i), cols, 0.0f);
    for (size_t part = begin_[i]; part < begin_[i + 1]; ++part) {
      const float* values = ResultValues(home, parts_[part], scratch.data() + worker * cols);
      kernels::ScaleAddTo(values, 1.0f, cols, sums.Row(i));
    }
  });
  const RowPacker packer(context, sums, exchange_.options.home_quant, exchange_.options.home);
  quant::ForEachRow(context, sums.rows, [&](size_t i) { packer.Pack(i, to + i * home.bytes()); });
}

void RailExchange::CollectResults(std::span<const std::byte*> rows) {
  home_.Wait(exchange_, "combine");
  size_t next = 0;
  ForEachNode([&](size_t node) {
    for (uint32_t slot : slots_of_[node]) rows[slot] = home_.Row(next++);
  });
}

void RailExchange::Drop() noexcept {
  out_.Drop();
  home_.Drop();
}

}  // namespace switchyard::moe
