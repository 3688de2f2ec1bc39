#include "moe/dispatchers/ep_dispatcher.h"

#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe::dispatchers {
namespace {

[[noreturn]] void Refuse(const DispatcherArgs& args, std::string_view name, std::string_view why) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("layer {}: the {} dispatcher {}", args.config.layer_id, name, why));
}

ExpertParallel& RequireGroups(const DispatcherArgs& args, std::string_view name) {
  if (args.ep != nullptr) return *args.ep;
  throw Error(ErrorCode::kFailedPrecondition,
              fmt::format("layer {}: the {} dispatcher moves rows between ranks and was made "
                          "without process groups (MoeLayerOptions::ep)",
                          args.config.layer_id, name));
}

}  // namespace

EpDispatcher::EpDispatcher(const DispatcherArgs& args, const EpProtocol& protocol)
    : Dispatcher(args.config.layer_id),
      protocol_(protocol),
      batch_(args.batch),
      config_(args.config),
      ep_(RequireGroups(args, protocol.name)) {
  if (config_.no_combine)
    Refuse(args, protocol.name,
           "sums over the top-k; no_combine is for --moe-a2a none on one rank");
  const bool split = ep_.moe_tp_size() != 1;
  if (split && protocol.format != DispatchFormat::kStandard) {
    Refuse(args, protocol.name,
           fmt::format("needs whole experts on each rank: --moe-ep-size must be {} (tp-size / "
                       "moe-dp-size), found {}",
                       ep_.groups().config().tp_size / ep_.groups().config().moe_dp_size,
                       ep_.ep_size()));
  }
}

bool EpDispatcher::CanSend(ActQuantKind kind) const {
  switch (kind) {
    case ActQuantKind::kNone:
    case ActQuantKind::kInt8Token:
    case ActQuantKind::kInt4Token:
    case ActQuantKind::kFp8Token:
    case ActQuantKind::kFp8Group:
    case ActQuantKind::kMxFp8:
    case ActQuantKind::kMxFp4: return true;
    case ActQuantKind::kInt8Static:
    case ActQuantKind::kFp8Tensor:
    case ActQuantKind::kFp8TensorStatic: return false;
  }
  return false;
}

void EpDispatcher::SetQuantConfig(const DispatcherQuantConfig& config) {
  for (const ActQuant* how : {&config.output, &config.combine}) {
    if (CanSend(how->kind)) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: the {} dispatcher sends rows with scales of their own; {} "
                            "was asked for",
                            layer_id(), name(), ActQuantKindName(how->kind)));
  }
  wire_ = config;
  // What a row of this layer looks like; made of one of zeros.
  ThreadPool alone(1);
  Arena arena;
  ExecContext context{alone, arena};
  const Rows one = arena.AllocateRows(1, config_.hidden_size);
  std::fill_n(one.data, one.cols, 0.0f);
  const auto layout_of = [&](const ActQuant& how, DType plain) {
    QuantRows rows = QuantRows::Plain(one);
    rows.dtype = plain;
    return ValueLayout::Of(
        how.kind == ActQuantKind::kNone ? rows : quant::QuantizeRows(context, one, how));
  };
  RowChannelOptions options;
  options.protocol = protocol_.name;
  options.setting = protocol_.setting;
  options.max_tokens = protocol_.max_tokens;
  options.hidden_size = config_.hidden_size;
  options.parts = ep_.moe_tp_size();
  options.num_experts = num_local() * ep_.ep_size();
  options.wire = WireLayout(layout_of(config.output, config.plain), config_.top_k);
  options.wire_quant = config.output;
  options.home = layout_of(config.combine, config.combine_plain);
  options.home_quant = config.combine;
  options.dispatches = !(protocol_.to_all && ep_.options().tokens_are_replicated);
  options.elastic = protocol_.elastic;
  options.batch = batch_;
  channel_ = &ep_.Channel(ep_.block(), options);
}

int32_t EpDispatcher::LocalId(int32_t id) const {
  const auto local = static_cast<int32_t>(num_local());
  if (id < 0 || id / local != static_cast<int32_t>(ep_.ep_rank())) return -1;
  return id % local;
}

void EpDispatcher::StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) {
  SY_CHECK(channel_ != nullptr);
  topk_ = topk;
  channel_->StartDispatch(context, hidden, topk, layer_id(), protocol_.to_all);
}

const DispatchOutput& EpDispatcher::FinishDispatch(ExecContext& context) {
  received_ = &channel_->FinishDispatch(context);
  const DispatchOutput& output = Arrange(context, *received_);
  promises_ = output.promises;
  return output;
}

EpDispatcher::Slots EpDispatcher::ReadSlots(ExecContext& context, IdSpace space) const {
  const WireLayout& wire = channel_->options().wire;
  const size_t top_k = wire.top_k();
  const size_t count = received_->size() * top_k;
  const Slots slots{context.arena.AllocateSpan<int32_t>(count),
                    context.arena.AllocateSpan<float>(count)};
  for (size_t i = 0; i < received_->size(); ++i) {
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t id = wire.Id(received_->rows[i], k);
      const bool global = space == IdSpace::kGlobal;
      slots.ids[i * top_k + k] = global ? id : LocalId(id);
      const bool cut = !global && slots.ids[i * top_k + k] < 0;
      slots.weights[i * top_k + k] = cut ? 0.0f : wire.Weight(received_->rows[i], k);
    }
  }
  return slots;
}

EpDispatcher::RouteRows EpDispatcher::CollectRoutes(ExecContext& context, size_t slab) const {
  const WireLayout& wire = channel_->options().wire;
  const size_t top_k = wire.top_k();
  RouteRows routes;
  routes.counts = context.arena.AllocateSpan<int32_t>(num_local());
  routes.place_of = context.arena.AllocateSpan<int32_t>(received_->size() * top_k);
  std::fill(routes.counts.begin(), routes.counts.end(), 0);
  size_t total = 0;
  for (size_t i = 0; i < received_->size(); ++i) {
    for (size_t k = 0; k < top_k; ++k) {
      const int32_t local = LocalId(wire.Id(received_->rows[i], k));
      routes.place_of[i * top_k + k] = local;
      if (local < 0) continue;
      ++routes.counts[static_cast<size_t>(local)];
      ++total;
    }
  }
  if (total != 0) NumberRoutes(context, slab, routes);
  const size_t capacity = slab == 0 ? total : num_local() * slab;
  routes.rows = Collect(context, capacity, [&](size_t i, const auto& emit) {
    for (int32_t place : routes.place_of.subspan(i * top_k, top_k)) {
      if (place >= 0) emit(static_cast<size_t>(place));
    }
  });
  return routes;
}

// From the expert of each slot to its place.
void EpDispatcher::NumberRoutes(ExecContext& context, size_t slab, RouteRows& routes) const {
  const std::span<size_t> next = context.arena.AllocateSpan<size_t>(num_local());
  size_t first = 0;
  for (size_t e = 0; e < num_local(); ++e) {
    next[e] = slab == 0 ? first : e * slab;
    first += static_cast<size_t>(routes.counts[e]);
  }
  for (int32_t& place : routes.place_of) {
    if (place >= 0) place = static_cast<int32_t>(next[static_cast<size_t>(place)]++);
  }
}

EpDispatcher::Answered EpDispatcher::AnswerTokens(ExecContext& context, ConstRows rows,
                                                  RoutewiseLayout layout,
                                                  std::span<const int32_t> row_of_slot,
                                                  std::span<const int32_t> ids,
                                                  IdSpace space) const {
  const size_t top_k = config_.top_k;
  if (layout == RoutewiseLayout::kExpanded) {
    if (row_of_slot.size() < ids.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} dispatcher: {} slots were sent, the answer says where "
                              "{} are",
                              layer_id(), name(), ids.size(), row_of_slot.size()));
    }
    return {rows, row_of_slot.first(ids.size()), RowChannel::Sum::kRoutes};
  }
  // One row per token, in the place of its first expert here.
  const std::span<int32_t> row_of = context.arena.AllocateSpan<int32_t>(ids.size());
  std::fill(row_of.begin(), row_of.end(), -1);
  for (size_t first = 0; first < ids.size(); first += top_k) {
    for (size_t slot = first; slot < first + top_k; ++slot) {
      if ((space == IdSpace::kLocal ? ids[slot] : LocalId(ids[slot])) < 0) continue;
      row_of[slot] = static_cast<int32_t>(first / top_k);
      break;
    }
  }
  return {rows, row_of, RowChannel::Sum::kRows};
}

void EpDispatcher::StartCombine(ExecContext& context, const CombineInput& input) {
  CheckAnswer(input, format(), promises_, name(), layer_id());
  SendHome(context, Answer(context, input), *received_, {topk_.num_tokens, topk_});
}

void EpDispatcher::SendHome(ExecContext& context, const Answered& answered,
                            const ReceivedTokens& received, OwnTokens own) {
  if (answered.rows.rows != 0 && answered.rows.cols > config_.hidden_size) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: {} dispatcher: rows of {} columns came back, expected {}",
                            layer_id(), name(), answered.rows.cols, config_.hidden_size));
  }
  for (int32_t row : answered.row_of) {
    if (row < static_cast<int32_t>(answered.rows.rows)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: {} dispatcher: {} rows must come back to combine, found {}",
                            layer_id(), name(), row + 1, answered.rows.rows));
  }
  // A weight that was applied to the input is not applied again.
  if (config_.apply_router_weight_on_input) {
    const std::span<float> ones = context.arena.AllocateSpan<float>(own.topk.weights.size());
    std::fill(ones.begin(), ones.end(), 1.0f);
    own.topk.weights = ones;
  }
  channel_->StartCombine(
      context, {&received, answered.rows, answered.row_of, answered.sum, answered.ids}, own);
}

Rows EpDispatcher::FinishCombine(ExecContext& context) { return channel_->FinishCombine(context); }

void EpDispatcher::Reset() noexcept {
  if (channel_ != nullptr) channel_->GiveUp();
}

}  // namespace switchyard::moe::dispatchers
