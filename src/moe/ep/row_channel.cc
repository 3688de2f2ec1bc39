#include "moe/ep/row_channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "moe/ep/rail_exchange.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe {

RowChannel::RowChannel(ExpertParallel& ep, ProcessGroup& group, ProcessGroup* net,
                       RowChannelOptions options)
    : exchange_(ep, group, std::move(options)), node_(exchange_), rows_of_(group.size()) {
  if (!exchange_.has_net) return;
  SY_CHECK(net != nullptr);
  if (exchange_.nodes.UsesRails(ep.options().hierarchy)) {
    net_ = std::make_unique<RailExchange>(exchange_, *net);
  } else {
    net_ = MakeFlatExchange(exchange_, *net);
  }
}

RowChannel::~RowChannel() = default;

void RowChannel::GiveUp() noexcept {
  if (!is_open_) return;
  is_open_ = false;
  try {
    if (net_ != nullptr) {
      group().Abort(exchange_.Where("exchange") + ": given up");
      net_->Drop();
    }
    node_.GiveUp();
  } catch (...) {  // the group is gone, and so is whoever might wait
  }
}

void RowChannel::Begin(size_t layer_id) {
  exchange_.layer_id = layer_id;
  SY_CHECK(!is_open_);
  try {
    node_.AwaitOldExchange();
  } catch (const Error& error) {
    exchange_.Rethrow("begin", error);
  }
  ++exchange_.epoch;
  is_open_ = true;
  node_.Begin();
}

// --- Dispatch -----------------------------------------------------------------------------------

void RowChannel::CheckDispatch(ConstRows hidden, const TopKOutput& topk) const {
  const size_t top_k = options().wire.top_k();
  if (hidden.rows > options().max_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} tokens on this rank, {} allows {}", exchange_.Where("dispatch"),
                            hidden.rows, options().setting, options().max_tokens));
  }
  if (topk.top_k != top_k && hidden.rows != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: top_k {}, expected {}", exchange_.Where("dispatch"), topk.top_k, top_k));
  }
  for (size_t slot = 0; slot < topk.ids.size(); ++slot) {
    const int32_t id = topk.ids[slot];
    if (id == -1 || (id >= 0 && static_cast<size_t>(id) < options().num_experts)) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: token {} names expert {}; ids are -1 to {}", exchange_.Where("dispatch"),
                    slot / topk.top_k, id, options().num_experts - 1));
  }
  SY_CHECK(hidden.rows == 0 || hidden.cols == options().hidden_size);
}

void RowChannel::StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk,
                               size_t layer_id, bool to_all) {
  Begin(layer_id);
  CheckDispatch(hidden, topk);
  exchange_.to_all = to_all;
  exchange_.ListTokens(
      topk, [](size_t rank) { return rank; }, exchange_.targets);
  const PackedTokens packed = Pack(context, hidden, topk);
  node_.Send(context, packed, hidden.rows);
  // The own rows are read like those of others.
  std::vector<const std::byte*>& own = rows_of_[group().rank()];
  own.clear();
  for (uint32_t token : exchange_.targets[group().rank()]) own.push_back(packed.Row(token));
  if (net_ != nullptr) net_->StartDispatch(context, packed, topk);
}

void RowChannel::BeginWithoutDispatch(size_t layer_id) { Begin(layer_id); }

// Every token once, however many ranks it goes to.
PackedTokens RowChannel::Pack(ExecContext& context, ConstRows hidden,
                              const TopKOutput& topk) const {
  const WireLayout& wire = options().wire;
  const size_t row_bytes = wire.row_bytes();
  std::byte* packed = node_.PackRoom(hidden.rows);
  if (packed == nullptr)
    packed = context.arena.AllocateSpan<std::byte>(hidden.rows * row_bytes).data();
  const RowPacker packer(context, hidden, options().wire_quant, wire.values());
  quant::ForEachRow(context, hidden.rows, [&](size_t t) {
    std::byte* row = packed + t * row_bytes;
    wire.PackHeader(topk, t, row);
    packer.Pack(t, wire.Values(row));
  });
  return {packed, row_bytes};
}

const ReceivedTokens& RowChannel::FinishDispatch(ExecContext& context) {
  for (size_t source = 0; source < rows_of_.size(); ++source) {
    if (source != group().rank()) rows_of_[source].clear();
  }
  if (net_ != nullptr) net_->FinishDispatch(context, rows_of_);
  for (size_t peer : group().node_peers()) {
    if (peer != group().rank()) node_.Receive(peer, rows_of_[peer]);
  }
  received_rows_.clear();
  received_source_.clear();
  received_begin_.assign(1, 0);
  for (size_t source = 0; source < rows_of_.size(); ++source) {
    received_rows_.insert(received_rows_.end(), rows_of_[source].begin(), rows_of_[source].end());
    received_source_.resize(received_rows_.size(), static_cast<uint32_t>(source));
    received_begin_.push_back(static_cast<uint32_t>(received_rows_.size()));
  }
  received_token_.resize(received_rows_.size());
  std::transform(received_rows_.begin(), received_rows_.end(), received_token_.begin(),
                 [](const std::byte* row) { return WireLayout::Token(row); });
  received_ = {received_rows_, received_begin_, received_source_, received_token_};
  return received_;
}

// --- Combine ------------------------------------------------------------------------------------

void RowChannel::CheckCombine(const Results& results, const OwnTokens& own) const {
  const std::span<const uint32_t> tokens = results.received->token;
  SY_CHECK(results.row_of.size() == tokens.size() * options().wire.top_k());
  // Tokens that all ranks have are in slices of several sizes; everybody finds the largest.
  size_t most = own.num_tokens;
  for (uint32_t token : tokens) most = std::max(most, size_t{token} + 1);
  if (most <= options().max_tokens) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {} tokens on a rank, {} allows {}", exchange_.Where("combine"), most,
                          options().setting, options().max_tokens));
}

void RowChannel::StartCombine(ExecContext& context, const Results& results, const OwnTokens& own) {
  CheckCombine(results, own);
  exchange_.own = own;
  exchange_.sum = results.sum;
  exchange_.ListSlots(
      own.topk, [](size_t rank) { return rank; }, exchange_.result_slots);
  const RowPacker packer(context, results.rows, options().home_quant, options().home);
  PutResultsInNode(context, results, packer);
  node_.PostResults(results.received->size());
  exchange_.stats.results_in_node += exchange_.CountResults(results, [&](size_t source) {
    return source != group().rank() && exchange_.nodes.IsHere(source);
  });
  if (net_ != nullptr) net_->StartCombine(context, results, packer);
}

void RowChannel::PutResultsInNode(ExecContext& context, const Results& results,
                                  const RowPacker& packer) {
  const size_t top_k = options().wire.top_k();
  const ValueLayout& home = options().home;
  const ReceivedTokens& received = *results.received;
  const size_t me = group().rank();
  own_rows_ = context.arena.AllocateSpan<const std::byte*>(exchange_.own.num_tokens * top_k);
  std::fill(own_rows_.begin(), own_rows_.end(), nullptr);
  own_cols_ = home.meta.is_plain_f32() ? results.rows.cols : options().hidden_size;
  // The own results are rounded like all others, so that it does not matter who computes what.
  std::byte* own_packed = nullptr;
  if (!home.meta.is_plain_f32())
    own_packed = context.arena.AllocateSpan<std::byte>(own_rows_.size() * home.bytes()).data();
  quant::ForEachRow(context, received.size(), [&](size_t i) {
    const size_t source = received.source[i];
    if (!exchange_.nodes.IsHere(source)) return;
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t row = results.row_of[i * top_k + k];
      if (row < 0) continue;
      const auto index = static_cast<size_t>(row);
      const size_t slot = received.token[i] * top_k + k;
      if (source != me) {
        std::byte* to = node_.ResultSlot(source, slot * options().parts + me % options().parts);
        if (to != nullptr) packer.Pack(index, to);
      } else if (own_packed == nullptr) {
        own_rows_[slot] = reinterpret_cast<const std::byte*>(results.rows.Row(index));
      } else {
        own_rows_[slot] = own_packed + slot * home.bytes();
        packer.Pack(index, own_packed + slot * home.bytes());
      }
    }
  });
}

Rows RowChannel::FinishCombine(ExecContext& context) {
  const OwnTokens& own = exchange_.own;
  const size_t num_slots = own.num_tokens * exchange_.NumSlots();
  // A null pointer for slots whose rows do not come: another's, or those of a rank that is lost.
  const std::span<const std::byte*> rows = context.arena.AllocateSpan<const std::byte*>(num_slots);
  std::fill(rows.begin(), rows.end(), nullptr);
  if (net_ != nullptr) net_->Relay(context);
  node_.CollectResults(rows);
  if (net_ != nullptr) net_->CollectResults(rows);
  const Rows out = context.arena.AllocateRows(own.num_tokens, options().hidden_size);
  const Summands summands = MakeSummands(context);
  constexpr size_t kTokensPerTask = 4;
  context.pool.Run((out.rows + kTokensPerTask - 1) / kTokensPerTask,
                   [&](size_t task, size_t worker) {
                     const size_t end = std::min(out.rows, (task + 1) * kTokensPerTask);
                     for (size_t t = task * kTokensPerTask; t < end; ++t)
                       SumToken(t, rows, summands.Of(worker), out.Row(t));
                   });
  is_open_ = false;
  if (options().elastic) exchange_.ep.SetWarm();
  return out;
}

RowChannel::Summands RowChannel::MakeSummands(ExecContext& context) const {
  const size_t slots = exchange_.NumSlots();
  const size_t workers = context.pool.num_threads();
  Summands all{slots, options().hidden_size};
  all.rows = context.arena.AllocateSpan<const float*>(workers * slots).data();
  all.weights = context.arena.AllocateSpan<float>(workers * slots).data();
  if (!options().home.meta.is_plain_f32())
    all.decoded = context.arena.AllocateSpan<float>(workers * slots * all.cols).data();
  return all;
}

// All routes in the order of slots, and all parts of one in the order of their ranks.
void RowChannel::SumToken(size_t token, std::span<const std::byte* const> rows,
                          const Summands& summands, float* out) const {
  const size_t parts = options().parts;
  const size_t cols = options().hidden_size;
  size_t count = 0, narrow = 0;
  for (size_t i = 0; i < exchange_.NumSlots(); ++i) {
    const size_t slot = token * exchange_.NumSlots() + i;
    const std::byte* row = rows[slot];
    const bool is_own = row == nullptr && group().rank() % parts == i % parts;
    if (is_own) row = own_rows_[slot / parts];
    if (row == nullptr) continue;
    float* scratch = summands.decoded == nullptr ? nullptr : summands.decoded + count * cols;
    summands.rows[count] = ResultValues(options().home, row, scratch);
    summands.weights[count++] =
        exchange_.sum == Sum::kRoutes ? exchange_.own.topk.Weights(token)[i / parts] : 1.0f;
    if (is_own && own_cols_ != cols) ++narrow;
  }
  if (narrow == 0) return kernels::WeightedSum(summands.rows, summands.weights, count, cols, out);
  // Own rows have no padded columns, those of others do.
  kernels::WeightedSum(summands.rows, summands.weights, count, own_cols_, out);
  std::fill_n(out + own_cols_, cols - own_cols_, 0.0f);
}

}  // namespace switchyard::moe
