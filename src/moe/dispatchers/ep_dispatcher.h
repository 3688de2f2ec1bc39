// What the dispatchers that move rows between ranks share: encoding, the exchange, and where each
// result goes home to. They differ in how received rows are laid out for the runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "moe/dispatchers/layout.h"
#include "moe/ep/row_channel.h"
#include "quant/act_quant.h"
#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/moe/ep/expert_parallel.h"

namespace switchyard::moe::dispatchers {

// Bytes from row to row: whole cache lines, and an odd number of them. Slabs start powers of two
// apart, and with such a stride too all their rows would meet in the same few sets of the caches.
constexpr size_t SpreadStride(size_t row_bytes) {
  return (WireUp(row_bytes) / kWireAlignment | 1u) * kWireAlignment;
}

// What tells one protocol from another.
struct EpProtocol {
  std::string_view name;  // registered name
  DispatchFormat format;
  std::string_view setting;  // that limits the tokens of a rank
  size_t max_tokens = 0;     // the limit
  bool to_all = false;       // every rank gets all tokens (all-gather)
  bool elastic = false;      // a rank that does not answer is taken out
};

// Implements the stages over a RowChannel; a protocol implements Arrange and Answer.
class EpDispatcher : public Dispatcher {
 public:
  // Errors: kFailedPrecondition without args.ep; kUnsupported for no_combine, or for experts that
  //   are split over ranks (MoE-TP) behind a protocol other than standard.
  EpDispatcher(const DispatcherArgs& args, const EpProtocol& protocol);

  std::string_view name() const override { return protocol_.name; }
  DispatchFormat format() const override { return protocol_.format; }
  // Kinds whose rows have scales of their own.
  bool CanSend(ActQuantKind kind) const override;
  void SetQuantConfig(const DispatcherQuantConfig& config) override;

 protected:
  // Lays the received rows out. Sets promises() by way of the output.
  virtual const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens& received) = 0;
  // The runner's results: `rows` and where slot k of received token i is among them.
  struct Answered {
    ConstRows rows;
    std::span<const int32_t> row_of;  // [N * K], -1 = not computed here
    RowChannel::Sum sum = RowChannel::Sum::kRoutes;
    std::span<const int32_t> ids = {};  // [N * K] global; only of tokens that were not dispatched
  };
  virtual Answered Answer(ExecContext& context, const CombineInput& input) = 0;

  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) override;
  const DispatchOutput& FinishDispatch(ExecContext& context) override;
  void StartCombine(ExecContext& context, const CombineInput& input) override;
  Rows FinishCombine(ExecContext& context) override;
  void Reset() noexcept override;
  void SetPromises(const DispatchPromises& promises) { promises_ = promises; }

  ExpertParallel& ep() const { return ep_; }
  const MoeRunnerConfig& config() const { return config_; }
  RowChannel& channel() const { return *channel_; }
  const ReceivedTokens& received() const { return *received_; }
  // Of this rank, as it was routed.
  const TopKOutput& own_topk() const { return topk_; }
  bool deterministic() const { return ep_.options().deterministic; }
  size_t num_local() const { return config_.num_local_experts; }
  // The id among this rank's experts, -1 = another's.
  int32_t LocalId(int32_t id) const;

  // The received rows at places of their own, as they came or in f32 as the runner takes them:
  // received row i at every place for which places_of(i, emit) calls emit(place). Other places hold
  // nothing that may be read.
  template <typename PlacesOf>
  QuantRows Collect(ExecContext& context, size_t capacity, const PlacesOf& places_of) const;
  // Row i at place i.
  QuantRows CollectTokens(ExecContext& context) const {
    return Collect(context, received_->size(), [](size_t i, const auto& emit) { emit(i); });
  }
  // Ids (local, or global as sent) and weights of received token rows. Weights of slots that are
  // not of this rank are 0 with local ids.
  struct Slots {
    std::span<int32_t> ids;
    std::span<float> weights;
  };
  Slots ReadSlots(ExecContext& context, IdSpace space) const;
  // Received tokens as one row per route, grouped by the expert that computes it; rows of an expert
  // by source rank and then token.
  struct RouteRows {
    std::span<int32_t> counts;    // [L] rows of each expert
    std::span<int32_t> place_of;  // [N * K] place of each slot, -1 = another rank's
    QuantRows rows;               // [capacity, H]
  };
  // Expert e's rows start at e * slab, or, with slab 0, behind those of e - 1.
  RouteRows CollectRoutes(ExecContext& context, size_t slab) const;
  // What answers token rows: one row per route, or one per token. `ids` [N * K] are those of the
  // received tokens.
  Answered AnswerTokens(ExecContext& context, ConstRows rows, RoutewiseLayout layout,
                        std::span<const int32_t> row_of_slot, std::span<const int32_t> ids,
                        IdSpace space) const;
  // The exchange's second half, for rows that were received or are there anyway.
  void SendHome(ExecContext& context, const Answered& answered, const ReceivedTokens& received,
                OwnTokens own);

 private:
  template <typename PlacesOf>
  QuantRows CollectValues(ExecContext& context, size_t capacity, const PlacesOf& places_of) const;
  void NumberRoutes(ExecContext& context, size_t slab, RouteRows& routes) const;

  EpProtocol protocol_;
  size_t batch_;
  const MoeRunnerConfig config_;
  ExpertParallel& ep_;
  DispatcherQuantConfig wire_;
  RowChannel* channel_ = nullptr;
  const ReceivedTokens* received_ = nullptr;
  TopKOutput topk_;
  DispatchPromises promises_;
};

template <typename PlacesOf>
QuantRows EpDispatcher::Collect(ExecContext& context, size_t capacity,
                                const PlacesOf& places_of) const {
  const ValueLayout& values = channel_->options().wire.values();
  QuantRows rows = values.meta;
  rows.rows = capacity;
  const bool decodes = wire_.decode_on_arrival && rows.kind != ActQuantKind::kNone;
  if (decodes || rows.is_plain_f32()) return CollectValues(context, capacity, places_of);
  // Read where they have arrived: they stay there until the results are home.
  const std::span<const std::byte*> scattered =
      context.arena.AllocateSpan<const std::byte*>(capacity);
  for (size_t i = 0; i < received_->size(); ++i) {
    const std::byte* from = channel_->options().wire.Values(received_->rows[i]);
    places_of(i, [&](size_t place) { scattered[place] = from; });
  }
  rows.scattered = scattered.data();
  rows.scale_offset = values.scale_bytes == 0 ? 0 : values.data_bytes;
  return rows;
}

template <typename PlacesOf>
QuantRows EpDispatcher::CollectValues(ExecContext& context, size_t capacity,
                                      const PlacesOf& places_of) const {
  const WireLayout& wire = channel_->options().wire;
  const size_t stride = SpreadStride(config_.hidden_size * sizeof(float)) / sizeof(float);
  float* data = context.arena.AllocateSpan<float>(capacity * stride).data();
  quant::ForEachRow(context, received_->size(), [&](size_t i) {
    const QuantRows from = wire.values().View(wire.Values(received_->rows[i]));
    places_of(i, [&](size_t place) { quant::DequantizeRow(from, 0, data + place * stride); });
  });
  return QuantRows::Plain(ConstRows(data, capacity, config_.hidden_size, stride));
}

}  // namespace switchyard::moe::dispatchers
