#include "moe/ep/row_channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "kernels/convert/convert.h"
#include "kernels/elementwise/elementwise.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe {
namespace {

// Counts of flags: what says that a rank has given up, and that rows are published, not pushed.
constexpr uint32_t kGivenUp = UINT32_MAX;
constexpr uint32_t kPublished = 0x80000000;

Deadline Limit(const ExpertParallel& ep, std::string_view stage) {
  return Deadline::After(ep.options().timeout, stage);
}

size_t LargestNode(const ProcessGroup& group) {
  std::map<size_t, size_t> ranks;
  size_t largest = 0;
  for (size_t rank = 0; rank < group.size(); ++rank)
    largest = std::max(largest, ++ranks[group.NodeOf(rank)]);
  return largest;
}

}  // namespace

bool RowChannelOptions::operator==(const RowChannelOptions& other) const {
  return protocol == other.protocol && max_tokens == other.max_tokens &&
         hidden_size == other.hidden_size && num_experts == other.num_experts &&
         wire.top_k() == other.wire.top_k() && wire.values() == other.wire.values() &&
         home == other.home && parts == other.parts && dispatches == other.dispatches &&
         elastic == other.elastic;
}

RowChannel::RowChannel(ExpertParallel& ep, ProcessGroup& group, RowChannelOptions options)
    : ep_(ep), group_(group), options_(std::move(options)) {
  const size_t experts_ranks = group.size() / options_.parts;
  if (options_.num_experts % experts_ranks != 0 || options_.num_experts == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("expert parallelism: {} experts cannot be divided evenly among {} "
                            "ranks; choose another --moe-ep-size, or add copies with "
                            "--ep-num-redundant-experts {}",
                            options_.num_experts, experts_ranks,
                            experts_ranks - options_.num_experts % experts_ranks));
  }
  if (options_.num_experts >= WireLayout::kMaxExperts) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("expert parallelism: {} experts, at most {}", options_.num_experts,
                            WireLayout::kMaxExperts - 1));
  }
  num_local_ = options_.num_experts / experts_ranks;
  const std::span<const size_t> peers = group.node_peers();
  in_node_.resize(group.size());
  node_index_.resize(group.size());
  for (size_t i = 0; i < peers.size(); ++i) {
    in_node_[peers[i]] = true;
    node_index_[peers[i]] = i;
  }
  has_net_ = peers.size() != group.size();
  targets_.resize(group.size());
  // Every rank of the group makes the window, also one that is alone on its node.
  push_rows_ = std::min(ep.options().push_rows, options_.max_tokens);
  const size_t row_bytes = options_.wire.row_bytes();
  const size_t node_size = LargestNode(group);  // parts are of one size everywhere
  if (options_.dispatches) {
    published_at_ = node_size * push_rows_ * row_bytes;
    lists_at_ = published_at_;
    if (options_.max_tokens > push_rows_) lists_at_ += options_.max_tokens * row_bytes;
    results_at_ = lists_at_ + WireUp(node_size * options_.max_tokens * sizeof(uint32_t));
  }
  WindowOptions window;
  window.name = options_.protocol;
  window.bytes_per_rank = results_at_ + options_.max_tokens * NumSlots() * options_.home.bytes();
  window.num_flags = kNumFlags;
  window.setting = options_.setting;
  if (group.size() > 1) window_ = group.MakeWindow(window, Limit(ep, "make an exchange buffer"));
  if (has_net_) {
    net_out_ = std::make_shared<NetBuffers>();
    net_home_ = std::make_shared<NetBuffers>();
    for (NetBuffers* net : {net_out_.get(), net_home_.get()}) {
      net->send_rows.resize(group.size());
      net->recv_rows.resize(group.size());
      net->send_counts.resize(group.size());
      net->recv_counts.resize(group.size());
    }
  }
}

RowChannel::~RowChannel() = default;

// --- Waiting and failing ------------------------------------------------------------------------

std::string RowChannel::Where(std::string_view stage) const {
  return fmt::format("rank {}, layer {}, step {}, {} {}", group_.WorldRank(group_.rank()),
                     layer_id_, ep_.pass(), options_.protocol, stage);
}

void RowChannel::Rethrow(std::string_view stage, const Error& error) const {
  throw Error(error.code(), fmt::format("{}: {}", Where(stage), error.what()));
}

bool RowChannel::IsActive(size_t rank) const {
  return !options_.elastic || ep_.active_ranks()[rank] != 0;
}

// A process that has ended is noticed long before the deadline.
Signal RowChannel::LookUntil(size_t rank, Flag flag, const Deadline& deadline) const {
  return window_->Await(rank, flag, epoch_, deadline, [&] {
    if (ep_.IsDead(group_.WorldRank(rank)))
      throw Error(ErrorCode::kUnavailable, fmt::format("rank {} has died", group_.WorldRank(rank)));
  });
}

std::optional<Signal> RowChannel::AwaitPeer(size_t rank, Flag flag, std::string_view stage) {
  if (!IsActive(rank)) return std::nullopt;
  // The elastic protocols wait for ever until their first combine (contract 3.7).
  const bool limited = !options_.elastic || ep_.is_warm();
  try {
    const Signal signal =
        LookUntil(rank, flag, limited ? Limit(ep_, stage) : Deadline::Never(stage));
    if (signal.epoch == epoch_ && signal.count == kGivenUp) {
      throw Error(ErrorCode::kUnavailable,
                  fmt::format("rank {} has given this step up", group_.WorldRank(rank)));
    }
    return signal;
  } catch (const Error& error) {
    const bool lost = options_.elastic && error.code() == ErrorCode::kUnavailable;
    if (!lost) Rethrow(stage, error);
    ep_.MarkLost(rank, Where(stage) + ": " + error.what());
    return std::nullopt;
  }
}

void RowChannel::PostAll(Flag flag, uint32_t count) {
  posted_[flag] = true;
  if (window_ == nullptr) return;
  for (size_t peer : group_.node_peers()) {
    if (peer != group_.rank()) window_->Post(peer, flag, {epoch_, count});
  }
}

void RowChannel::GiveUp() noexcept {
  if (!is_open_) return;
  is_open_ = false;
  try {
    if (has_net_) {
      // Collectives cannot be left by one rank alone.
      group_.Abort(Where("exchange") + ": given up");
      pending_ = {};
    }
    for (const Flag flag : {kRowsFlag, kResultsFlag}) {
      if (!posted_[flag]) PostAll(flag, kGivenUp);
    }
    must_drain_ = true;
  } catch (...) {  // the group is gone, and so is whoever might wait
  }
}

// After an exchange that was given up: its peers have left it before memory is written again.
void RowChannel::AwaitOldExchange() {
  if (!must_drain_) return;
  for (size_t peer : group_.node_peers()) {
    if (peer != group_.rank() && IsActive(peer)) LookUntil(peer, kResultsFlag, Limit(ep_, "begin"));
  }
  must_drain_ = false;
}

void RowChannel::Begin(size_t layer_id) {
  layer_id_ = layer_id;
  SY_CHECK(!is_open_);
  try {
    AwaitOldExchange();
  } catch (const Error& error) {
    Rethrow("begin", error);
  }
  ++epoch_;
  is_open_ = true;
  posted_[kRowsFlag] = !options_.dispatches;
  posted_[kResultsFlag] = false;
}

// --- Dispatch -----------------------------------------------------------------------------------

void RowChannel::CheckDispatch(const QuantRows& rows, const TopKOutput& topk) const {
  if (rows.rows > options_.max_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} tokens on this rank, {} allows {}", Where("dispatch"),
                            rows.rows, options_.setting, options_.max_tokens));
  }
  if (topk.top_k != options_.wire.top_k() && rows.rows != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: top_k {}, expected {}", Where("dispatch"), topk.top_k,
                            options_.wire.top_k()));
  }
  for (size_t slot = 0; slot < topk.ids.size(); ++slot) {
    const int32_t id = topk.ids[slot];
    if (id == -1 || (id >= 0 && static_cast<size_t>(id) < options_.num_experts)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: token {} names expert {}; ids are -1 to {}", Where("dispatch"),
                            slot / topk.top_k, id, options_.num_experts - 1));
  }
  SY_CHECK(ValueLayout::Of(rows) == options_.wire.values());
}

// The tokens of each rank, ascending.
void RowChannel::ListTargets(ExecContext&, const TopKOutput& topk, bool to_all) {
  for (std::vector<uint32_t>& tokens : targets_) tokens.clear();
  for (size_t t = 0; t < topk.num_tokens; ++t) {
    const auto token = static_cast<uint32_t>(t);
    if (to_all) {
      for (std::vector<uint32_t>& tokens : targets_) tokens.push_back(token);
      continue;
    }
    for (int32_t id : topk.Ids(t)) {
      if (id < 0) continue;
      std::vector<uint32_t>& tokens = targets_[RankOf(id)];
      if (tokens.empty() || tokens.back() != token) tokens.push_back(token);
    }
  }
}

void RowChannel::StartDispatch(ExecContext& context, const QuantRows& rows, const TopKOutput& topk,
                               size_t layer_id, bool to_all) {
  Begin(layer_id);
  CheckDispatch(rows, topk);
  ListTargets(context, topk, to_all);
  SendInNode(context, rows, topk);
  if (has_net_) SendOverNet(context, rows, topk);
}

void RowChannel::BeginWithoutDispatch(size_t layer_id) { Begin(layer_id); }

void RowChannel::SendInNode(ExecContext& context, const QuantRows& rows, const TopKOutput& topk) {
  const WireLayout& wire = options_.wire;
  const size_t me = group_.rank();
  // The own rows are packed too, so that all rows are read alike.
  const size_t row_bytes = wire.row_bytes();
  std::byte* own = context.arena.AllocateSpan<std::byte>(targets_[me].size() * row_bytes).data();
  quant::ForEachRow(context, targets_[me].size(),
                    [&](size_t i) { wire.Pack(rows, topk, targets_[me][i], own + i * row_bytes); });
  received_rows_.resize(targets_[me].size());
  for (size_t i = 0; i < received_rows_.size(); ++i) received_rows_[i] = own + i * row_bytes;
  if (window_ == nullptr) return;

  std::byte* part = window_->Part(me).data();
  const bool publish = rows.rows > push_rows_;
  if (publish) {
    quant::ForEachRow(context, rows.rows, [&](size_t t) {
      wire.Pack(rows, topk, t, part + published_at_ + t * row_bytes);
    });
  }
  for (size_t peer : group_.node_peers()) {
    if (peer == me || !IsActive(peer)) continue;
    const std::vector<uint32_t>& tokens = targets_[peer];
    if (publish) {
      std::byte* list =
          part + lists_at_ + node_index_[peer] * options_.max_tokens * sizeof(uint32_t);
      if (!tokens.empty()) std::memcpy(list, tokens.data(), tokens.size() * sizeof(uint32_t));
    } else {
      std::byte* to = window_->Part(peer).data() + node_index_[me] * push_rows_ * row_bytes;
      quant::ForEachRow(context, tokens.size(),
                        [&](size_t i) { wire.Pack(rows, topk, tokens[i], to + i * row_bytes); });
    }
    const auto count = static_cast<uint32_t>(tokens.size());
    window_->Post(peer, kRowsFlag, {epoch_, publish ? count | kPublished : count});
  }
  posted_[kRowsFlag] = true;
}

void RowChannel::SendOverNet(ExecContext& context, const QuantRows& rows, const TopKOutput& topk) {
  const size_t row_bytes = options_.wire.row_bytes();
  NetBuffers& net = *net_out_;
  size_t total = 0;
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    net.send_rows[rank] = in_node_[rank] ? 0 : targets_[rank].size();
    net.send_counts[rank] = static_cast<uint32_t>(net.send_rows[rank]);
    total += net.send_rows[rank];
  }
  if (net.send.size() < total * row_bytes) net.send.resize(total * row_bytes);
  size_t first = 0;
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    if (in_node_[rank]) continue;
    quant::ForEachRow(context, targets_[rank].size(), [&](size_t i) {
      options_.wire.Pack(rows, topk, targets_[rank][i], net.send.data() + (first + i) * row_bytes);
    });
    first += targets_[rank].size();
  }
  group_.AllToAll(net.send_counts, net.recv_counts, Limit(ep_, "dispatch"));
  size_t arriving = 0;
  for (size_t rank = 0; rank < group_.size(); ++rank)
    arriving += net.recv_rows[rank] = net.recv_counts[rank];
  if (net.recv.size() < arriving * row_bytes) net.recv.resize(arriving * row_bytes);
  RowExchange exchange;
  exchange.row_bytes = row_bytes;
  exchange.send = net.send.data();
  exchange.recv = net.recv.data();
  exchange.send_rows = net.send_rows;
  exchange.recv_rows = net.recv_rows;
  exchange.owner = net_out_;
  pending_ = group_.StartAllToAllV(exchange);
}

void RowChannel::ReceiveInNode(size_t source, std::vector<const std::byte*>& rows) {
  const std::optional<Signal> signal = AwaitPeer(source, kRowsFlag, "dispatch");
  if (!signal) return;
  const size_t row_bytes = options_.wire.row_bytes();
  const size_t me = node_index_[group_.rank()];
  const size_t count = signal->count & ~kPublished;
  if ((signal->count & kPublished) != 0) {
    const std::byte* part = window_->Part(source).data();
    const auto* list = reinterpret_cast<const uint32_t*>(
        part + lists_at_ + me * options_.max_tokens * sizeof(uint32_t));
    for (size_t i = 0; i < count; ++i) rows.push_back(part + published_at_ + list[i] * row_bytes);
    return;
  }
  const std::byte* from =
      window_->Part(group_.rank()).data() + node_index_[source] * push_rows_ * row_bytes;
  for (size_t i = 0; i < count; ++i) rows.push_back(from + i * row_bytes);
}

void RowChannel::WaitForNet(std::string_view stage) {
  if (!pending_.active()) return;
  try {
    pending_.Wait(Limit(ep_, stage));
  } catch (const Error& error) {
    Rethrow(stage, error);
  }
  pending_ = {};
}

const ReceivedTokens& RowChannel::FinishDispatch(ExecContext&) {
  const std::vector<const std::byte*> own = received_rows_;
  received_rows_.clear();
  received_begin_.assign(1, 0);
  WaitForNet("dispatch");
  size_t net_row = 0;
  for (size_t source = 0; source < group_.size(); ++source) {
    if (source == group_.rank()) {
      received_rows_.insert(received_rows_.end(), own.begin(), own.end());
    } else if (in_node_[source]) {
      ReceiveInNode(source, received_rows_);
    } else {
      for (size_t i = 0; i < net_out_->recv_rows[source]; ++i)
        received_rows_.push_back(net_out_->recv.data() + net_row++ * options_.wire.row_bytes());
    }
    received_begin_.push_back(static_cast<uint32_t>(received_rows_.size()));
  }
  received_source_.resize(received_rows_.size());
  received_token_.resize(received_rows_.size());
  for (size_t source = 0; source < group_.size(); ++source) {
    for (size_t i = received_begin_[source]; i < received_begin_[source + 1]; ++i) {
      received_source_[i] = static_cast<uint32_t>(source);
      received_token_[i] = WireLayout::Token(received_rows_[i]);
    }
  }
  received_ = {received_rows_, received_begin_, received_source_, received_token_};
  return received_;
}

// --- Combine ------------------------------------------------------------------------------------

std::byte* RowChannel::ResultSlot(size_t rank, size_t slot) const {
  return window_->Part(rank).data() + results_at_ + slot * options_.home.bytes();
}

template <typename Body>
void RowChannel::ForEachSlotOf(size_t rank, const Body& body) const {
  const size_t top_k = options_.wire.top_k();
  for (size_t t = 0; t < own_.num_tokens; ++t) {
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t id = own_.topk.Ids(t)[k];
      if (id < 0 || RankOf(id) != rank - rank % options_.parts) continue;
      body(t * top_k + k);
      if (sum_ == Sum::kRows) break;
    }
  }
}

void RowChannel::StartCombine(ExecContext& context, const Results& results, const OwnTokens& own) {
  const size_t top_k = options_.wire.top_k();
  const ReceivedTokens& received = *results.received;
  SY_CHECK(results.row_of.size() == received.size() * top_k);
  if (own.num_tokens > options_.max_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} tokens on this rank, {} allows {}", Where("combine"),
                            own.num_tokens, options_.setting, options_.max_tokens));
  }
  const ValueLayout& home = options_.home;
  own_ = own;
  sum_ = results.sum;
  own_rows_ = context.arena.AllocateSpan<const std::byte*>(own.num_tokens * top_k);
  std::fill(own_rows_.begin(), own_rows_.end(), nullptr);
  own_cols_ = home.meta.is_plain_f32() ? results.rows.cols : options_.hidden_size;
  // The own results are rounded like all others, so that it does not matter who computes what.
  std::byte* own_packed = nullptr;
  if (!home.meta.is_plain_f32())
    own_packed = context.arena.AllocateSpan<std::byte>(own_rows_.size() * home.bytes()).data();
  QuantRows coded;
  if (home.meta.kind != ActQuantKind::kNone)
    coded = quant::QuantizeRows(context, results.rows, options_.home_quant);
  const size_t me = group_.rank();
  quant::ForEachRow(context, received.size(), [&](size_t i) {
    const size_t source = received.source[i];
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t row = results.row_of[i * top_k + k];
      if (row < 0) continue;
      const auto index = static_cast<size_t>(row);
      const size_t slot = received.token[i] * top_k + k;
      if (source != me) {
        if (in_node_[source] && IsActive(source))
          PackResult(results.rows, coded, index,
                     ResultSlot(source, slot * options_.parts + me % options_.parts));
      } else if (own_packed == nullptr) {
        own_rows_[slot] = reinterpret_cast<const std::byte*>(results.rows.Row(index));
      } else {
        own_rows_[slot] = own_packed + slot * home.bytes();
        PackResult(results.rows, coded, index, own_packed + slot * home.bytes());
      }
    }
  });
  PostAll(kResultsFlag, static_cast<uint32_t>(received.size()));
  if (has_net_) SendResultsOverNet(context, results, coded);
}

void RowChannel::PackResult(ConstRows rows, const QuantRows& coded, size_t row,
                            std::byte* to) const {
  const ValueLayout& home = options_.home;
  if (home.meta.kind != ActQuantKind::kNone) return home.Pack(coded, row, to);
  const size_t width = BytesOf(home.meta.dtype, rows.cols);
  if (home.meta.dtype == DType::kF32) {
    std::memcpy(to, rows.Row(row), width);
  } else {
    kernels::ConvertFromF32(rows.Row(row), rows.cols, home.meta.dtype, to);
  }
  std::memset(to + width, 0, home.data_bytes - width);
}

// For each source, its rows by token and slot: the order in which the source expects them.
void RowChannel::SendResultsOverNet(ExecContext& context, const Results& results,
                                    const QuantRows& coded) {
  const size_t top_k = options_.wire.top_k();
  const size_t bytes = options_.home.bytes();
  const ReceivedTokens& received = *results.received;
  NetBuffers& net = *net_home_;
  std::fill(net.send_rows.begin(), net.send_rows.end(), 0);
  std::vector<std::pair<uint32_t, size_t>> rows;  // row of results, received token
  for (size_t i = 0; i < received.size(); ++i) {
    if (in_node_[received.source[i]]) continue;
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t row = results.row_of[i * top_k + k];
      if (row < 0) continue;
      rows.emplace_back(static_cast<uint32_t>(row), i);
      ++net.send_rows[received.source[i]];
    }
  }
  if (net.send.size() < rows.size() * bytes) net.send.resize(rows.size() * bytes);
  quant::ForEachRow(context, rows.size(), [&](size_t i) {
    PackResult(results.rows, coded, rows[i].first, net.send.data() + i * bytes);
  });
  net_slots_.clear();
  std::fill(net.recv_rows.begin(), net.recv_rows.end(), 0);
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    if (in_node_[rank]) continue;
    ForEachSlotOf(rank, [&](size_t slot) {
      net_slots_.push_back(slot * options_.parts + rank % options_.parts);
      ++net.recv_rows[rank];
    });
  }
  if (net.recv.size() < net_slots_.size() * bytes) net.recv.resize(net_slots_.size() * bytes);
  RowExchange exchange;
  exchange.row_bytes = bytes;
  exchange.send = net.send.data();
  exchange.recv = net.recv.data();
  exchange.send_rows = net.send_rows;
  exchange.recv_rows = net.recv_rows;
  exchange.owner = net_home_;
  pending_ = group_.StartAllToAllV(exchange);
}

Rows RowChannel::FinishCombine(ExecContext& context) {
  const size_t top_k = options_.wire.top_k();
  const size_t num_slots = own_.num_tokens * NumSlots();
  // A null pointer for slots whose rows do not come: another's, or those of a rank that is lost.
  const std::span<const std::byte*> rows = context.arena.AllocateSpan<const std::byte*>(num_slots);
  std::fill(rows.begin(), rows.end(), nullptr);
  for (size_t peer : group_.node_peers()) {
    if (peer == group_.rank() || !AwaitPeer(peer, kResultsFlag, "combine")) continue;
    ForEachSlotOf(peer, [&](size_t slot) {
      const size_t at = slot * options_.parts + peer % options_.parts;
      rows[at] = ResultSlot(group_.rank(), at);
    });
  }
  WaitForNet("combine");
  for (size_t i = 0; i < net_slots_.size(); ++i)
    rows[net_slots_[i]] = net_home_->recv.data() + i * options_.home.bytes();
  const Rows out = context.arena.AllocateRows(own_.num_tokens, options_.hidden_size);
  const std::span<float> scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * options_.hidden_size);
  constexpr size_t kTokensPerTask = 4;
  context.pool.Run((out.rows + kTokensPerTask - 1) / kTokensPerTask,
                   [&](size_t task, size_t worker) {
                     float* decoded = scratch.data() + worker * options_.hidden_size;
                     const size_t end = std::min(out.rows, (task + 1) * kTokensPerTask);
                     for (size_t t = task * kTokensPerTask; t < end; ++t) {
                       std::fill_n(out.Row(t), out.cols, 0.0f);
                       for (size_t k = 0; k < top_k; ++k) {
                         const float weight = sum_ == Sum::kRoutes ? own_.topk.Weights(t)[k] : 1.0f;
                         AddRoute(t * top_k + k, rows, weight, decoded, out.Row(t));
                       }
                     }
                   });
  is_open_ = false;
  if (options_.elastic) ep_.SetWarm();
  return out;
}

// All parts of one route, in the order of their ranks.
void RowChannel::AddRoute(size_t slot, std::span<const std::byte* const> rows, float weight,
                          float* decoded, float* out) const {
  const ValueLayout& home = options_.home;
  for (size_t part = 0; part < options_.parts; ++part) {
    const std::byte* row = rows[slot * options_.parts + part];
    size_t cols = options_.hidden_size;
    if (row == nullptr && group_.rank() % options_.parts == part) {
      row = own_rows_[slot];
      cols = own_cols_;
    }
    if (row == nullptr) continue;
    const float* values = decoded;
    if (home.meta.is_plain_f32()) {
      values = reinterpret_cast<const float*>(row);
    } else {
      quant::DequantizeRow(home.View(row), 0, decoded);
    }
    kernels::ScaleAddTo(values, weight, cols, out);
  }
}

}  // namespace switchyard::moe
