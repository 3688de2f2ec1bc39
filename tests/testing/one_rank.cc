#include "testing/one_rank.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "quant/act_quant.h"
#include "testing/quant_formats.h"

namespace switchyard::testing {
namespace {

using moe::DispatchFormat;
using Kind = Realisation::Kind;

// Bytes that are a NaN in f32, bf16, e4m3 and e8m0.
constexpr std::byte kPoison{0xff};
// An id that nobody may look at.
constexpr int32_t kNonsense = 0x7ffffffe;

QuantRows ToBF16Rows(ExecContext& context, ConstRows rows) {
  QuantRows narrow;
  narrow.dtype = DType::kBF16;
  narrow.rows = rows.rows;
  narrow.cols = rows.cols;
  narrow.stride = rows.cols * sizeof(BF16);
  const std::span<BF16> data = context.arena.AllocateSpan<BF16>(rows.rows * rows.cols);
  for (size_t i = 0; i < data.size(); ++i) data[i] = ToBF16(rows.Row(i / rows.cols)[i % rows.cols]);
  narrow.data = reinterpret_cast<const std::byte*>(data.data());
  return narrow;
}

QuantRows Encode(ExecContext& context, ConstRows rows, const Wire& wire) {
  if (wire.dtype == DType::kBF16) return ToBF16Rows(context, rows);
  return quant::QuantizeRows(context, rows, wire.how);
}

// Bit by bit: NaN is what it is.
template <typename T>
bool SameBits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

void Require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("combine: " + what);
}

}  // namespace

std::vector<Realisation> RealisationsOf(const moe::Registry& registry, DispatchFormat format) {
  switch (format) {
    case DispatchFormat::kStandard: return {{Kind::kStandard, format, "standard"}};
    case DispatchFormat::kDeepepNormal:
      return {{Kind::kNormalTokens, format, "deepep_normal, token rows"},
              {Kind::kNormalExpanded, format, "deepep_normal, expanded rows"},
              {Kind::kMori, format, "deepep_normal, mori"}};
    case DispatchFormat::kDeepepLl: return {{Kind::kLowLatency, format, "deepep_ll"}};
    default: break;
  }
  std::vector<Realisation> registered;
  for (const moe::DispatcherEntry& entry : registry.dispatchers()) {
    if (entry.format == format)
      registered.push_back({Kind::kRegistered, format, std::string(entry.name), &entry});
  }
  return registered;
}

std::vector<Wire> AllWires() {
  std::vector<Wire> wires = {{}, {"bf16", {}, DType::kBF16}};
  for (ActQuantKind kind : {ActQuantKind::kFp8Group, ActQuantKind::kInt8Token, ActQuantKind::kMxFp8,
                            ActQuantKind::kMxFp4}) {
    Wire wire;
    wire.name = ActQuantKindName(kind);
    wire.how.kind = kind;
    wires.push_back(wire);
  }
  return wires;
}

MoeTokens AfterWire(ExecContext& context, const MoeTokens& tokens, const Wire& wire) {
  ArenaScope scope(context.arena);
  MoeTokens arrived = tokens;
  const QuantRows rows = Encode(context, tokens.Hidden(), wire);
  quant::DequantizeRows(context, rows, Rows(arrived.hidden.data(), tokens.count, tokens.cols));
  return arrived;
}

SimulatedDispatch::SimulatedDispatch(ExecContext& context, const Realisation& realisation,
                                     const moe::MoeRunnerConfig& config, size_t num_experts,
                                     std::vector<MoeTokens> sources, const DispatchOptions& options)
    : context_(context),
      realisation_(realisation),
      config_(config),
      num_local_(num_experts / sources.size()),
      sources_(std::move(sources)),
      options_(options) {
  Require(num_local_ * num_ranks() == num_experts, "experts cannot be divided evenly");
  for (const MoeTokens& source : sources_)
    sent_.push_back(Encode(context, source.Hidden(), options.wire));
  received_.resize(num_ranks());
  places_.resize(num_ranks());
  capacity_.resize(num_ranks());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    masks_.emplace_back(num_experts);
    for (size_t e = 0; e < num_experts; ++e)
      masks_[rank][e] = OwnsExpert(rank, static_cast<int32_t>(e)) ? 1 : 0;
  }
  switch (realisation.kind) {
    case Kind::kStandard: DispatchStandard(); return;
    case Kind::kRegistered: {
      Require(num_ranks() == 1, "a registered dispatcher is tested on one rank");
      dispatcher_ = realisation.dispatcher->make({config_, ""});
      moe::DispatcherQuantConfig quant;
      quant.output = options.wire.how;
      dispatcher_->SetQuantConfig(quant);
      // A plain wire is what the caller hands over: rows of bf16 come rounded.
      if (quant.output.kind == ActQuantKind::kNone)
        sources_[0] = AfterWire(context, sources_[0], options.wire);
      outputs_.push_back(&dispatcher_->Dispatch(context, sources_[0].Hidden(), sources_[0].TopK()));
      return;
    }
    default: break;
  }
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    switch (realisation.kind) {
      case Kind::kNormalTokens: DispatchTokens(rank, false); break;
      case Kind::kMori: DispatchTokens(rank, true); break;
      case Kind::kNormalExpanded: DispatchExpanded(rank); break;
      default: DispatchLowLatency(rank); break;
    }
  }
}

bool SimulatedDispatch::OwnsExpert(size_t rank, int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) / num_local_ == rank;
}

std::span<const int32_t> SimulatedDispatch::expert_mask(size_t rank) const {
  const bool needed = realisation_.kind == Kind::kStandard && num_ranks() > 1;
  return needed ? std::span<const int32_t>(masks_[rank]) : std::span<const int32_t>();
}

// A token once, if the rank has one of its experts; by source, then token.
std::vector<SimulatedDispatch::Received> SimulatedDispatch::TokenRowsOf(size_t rank) const {
  std::vector<Received> rows;
  for (size_t source = 0; source < num_ranks(); ++source) {
    const MoeTokens& tokens = sources_[source];
    for (size_t t = 0; t < tokens.count; ++t) {
      bool wanted = false;
      for (size_t k = 0; k < tokens.top_k; ++k)
        wanted = wanted || OwnsExpert(rank, tokens.ids[t * tokens.top_k + k]);
      if (wanted) rows.push_back({source, t, 0});
    }
  }
  return rows;
}

// Each route to the rank; by local expert, then source, then token.
std::vector<SimulatedDispatch::Received> SimulatedDispatch::RouteRowsOf(size_t rank) const {
  std::vector<Received> rows;
  for (size_t local = 0; local < num_local_; ++local) {
    const auto id = static_cast<int32_t>(rank * num_local_ + local);
    for (size_t source = 0; source < num_ranks(); ++source) {
      const MoeTokens& tokens = sources_[source];
      for (size_t slot = 0; slot < tokens.ids.size(); ++slot) {
        if (tokens.ids[slot] == id)
          rows.push_back({source, slot / tokens.top_k, slot % tokens.top_k});
      }
    }
  }
  return rows;
}

// rows[i] at place places[i] of a buffer of `capacity` rows; poison everywhere else. Rows have no
// padding between them, so that a reader past the last column runs into poison too.
QuantRows SimulatedDispatch::Place(const std::vector<Received>& rows,
                                   const std::vector<size_t>& places, size_t capacity) {
  QuantRows placed = sent_[0];
  placed.rows = capacity;
  placed.cols = config_.hidden_size;
  const size_t row_bytes = BytesOf(placed.dtype, placed.cols);
  const size_t scale_bytes =
      placed.scale == nullptr ? 0 : placed.scale_stride * DTypeBytes(placed.scale_dtype);
  placed.stride = row_bytes;
  Buffer& buffer = buffers_.emplace_back();
  buffer.data.assign(capacity * row_bytes, kPoison);
  buffer.scale.assign(capacity * scale_bytes, kPoison);
  for (size_t i = 0; i < rows.size(); ++i) {
    const QuantRows& from = sent_[rows[i].source];
    std::memcpy(buffer.data.data() + places[i] * row_bytes, from.Row(rows[i].token), row_bytes);
    if (scale_bytes == 0) continue;
    std::memcpy(buffer.scale.data() + places[i] * scale_bytes,
                from.scale + rows[i].token * scale_bytes, scale_bytes);
  }
  placed.data = buffer.data.data();
  if (scale_bytes != 0) placed.scale = buffer.scale.data();
  return placed;
}

void SimulatedDispatch::DispatchStandard() {
  all_.top_k = sources_[0].top_k;
  for (size_t source = 0; source < num_ranks(); ++source) {
    const MoeTokens& tokens = sources_[source];
    for (size_t t = 0; t < tokens.count; ++t) received_[0].push_back({source, t, 0});
    all_.count += tokens.count;
    all_.ids.insert(all_.ids.end(), tokens.ids.begin(), tokens.ids.end());
    all_.weights.insert(all_.weights.end(), tokens.weights.begin(), tokens.weights.end());
  }
  for (size_t i = 0; i < all_.count; ++i) places_[0].push_back(i);
  const QuantRows rows = Place(received_[0], places_[0], all_.count);
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    capacity_[rank] = all_.count * (config_.no_combine ? all_.top_k : 1);
    outputs_.push_back(&standard_.emplace_back(rows, all_.TopK()));
  }
}

void SimulatedDispatch::DispatchTokens(size_t rank, bool mori) {
  received_[rank] = TokenRowsOf(rank);
  const size_t total = received_[rank].size();
  for (size_t i = 0; i < total; ++i) places_[rank].push_back(i);
  capacity_[rank] = mori ? total + options_.spare : total;
  const size_t top_k = sources_[0].top_k;
  std::vector<int32_t>& ids = ints_.emplace_back(capacity_[rank] * top_k, kNonsense);
  std::vector<float>& weights =
      floats_.emplace_back(capacity_[rank] * top_k, std::numeric_limits<float>::quiet_NaN());
  std::vector<int32_t>& counts = ints_.emplace_back(num_local_);
  for (size_t i = 0; i < total; ++i) {
    const MoeTokens& tokens = sources_[received_[rank][i].source];
    for (size_t k = 0; k < top_k; ++k) {
      const size_t slot = received_[rank][i].token * top_k + k;
      const int32_t id = tokens.ids[slot];
      const bool local = OwnsExpert(rank, id);
      if (local) ++counts[LocalId(id)];
      ids[i * top_k + k] = mori ? id : local ? static_cast<int32_t>(LocalId(id)) : -1;
      weights[i * top_k + k] = mori || local ? tokens.weights[slot] : 0.0f;
    }
  }
  moe::DispatchPromises promises = moe::kTokenRows;
  promises.id_space = mori ? moe::IdSpace::kGlobal : moe::IdSpace::kLocal;
  moe::DeepepNormalDispatchOutput& output = normal_.emplace_back(promises);
  output.hidden_states = Place(received_[rank], places_[rank], capacity_[rank]);
  output.topk_ids = ids;
  output.topk_weights = weights;
  output.top_k = top_k;
  outputs_.push_back(&output);
  if (!mori) {
    // Rounded up as for a scratch of aligned groups: only a size, no bound on rows.
    for (int32_t& count : counts) count = (count + 127) / 128 * 128;
    output.num_recv_tokens_per_expert = counts;
    return;
  }
  moe::MoriDispatch& extra = mori_.emplace_back();
  extra.num_recv_tokens = total;
  extra.origin_topk_ids = sources_[rank].ids;
  extra.origin_topk_weights = sources_[rank].weights;
  extra.out_dtype = options_.out_dtype;
  extra.recv_cap = options_.spare == 0 ? 0 : capacity_[rank] - 1;
  extra.expert_mask = masks_[rank];
  if (options_.expert_output) {
    std::vector<float>& staging = floats_.emplace_back(capacity_[rank] * config_.hidden_size,
                                                       std::numeric_limits<float>::quiet_NaN());
    extra.expert_output = Rows(staging.data(), capacity_[rank], config_.hidden_size);
  }
  output.mori = &extra;
}

void SimulatedDispatch::DispatchExpanded(size_t rank) {
  received_[rank] = RouteRowsOf(rank);
  std::vector<int32_t>& counts = ints_.emplace_back(num_local_);
  for (size_t i = 0; i < received_[rank].size(); ++i) {
    const Received& row = received_[rank][i];
    ++counts[LocalId(sources_[row.source].ids[row.token * sources_[0].top_k + row.column])];
    places_[rank].push_back(i);
  }
  capacity_[rank] = received_[rank].size() + options_.spare;
  moe::DeepepNormalDispatchOutput& output = normal_.emplace_back(moe::kExpandedRows);
  output.hidden_states = Place(received_[rank], places_[rank], capacity_[rank]);
  output.topk_ids = sources_[rank].ids;
  output.topk_weights = sources_[rank].weights;
  output.top_k = sources_[rank].top_k;
  output.num_recv_tokens_per_expert = counts;
  outputs_.push_back(&output);
}

void SimulatedDispatch::DispatchLowLatency(size_t rank) {
  received_[rank] = RouteRowsOf(rank);
  size_t most = 0;
  for (const MoeTokens& source : sources_) most = std::max(most, source.count);
  const size_t per_expert = most * num_ranks() + options_.spare;
  std::vector<int32_t>& masked_m = ints_.emplace_back(num_local_);
  for (const Received& row : received_[rank]) {
    const size_t local =
        LocalId(sources_[row.source].ids[row.token * sources_[0].top_k + row.column]);
    places_[rank].push_back(local * per_expert + static_cast<size_t>(masked_m[local]++));
  }
  capacity_[rank] = num_local_ * per_expert;
  moe::DeepepLlDispatchOutput& output = low_latency_.emplace_back();
  output.hidden_states = Place(received_[rank], places_[rank], capacity_[rank]);
  output.masked_m = masked_m;
  output.capacity = per_expert;
  output.expected_m = 1;  // a hint, and a bad one
  output.topk_ids = sources_[rank].ids;
  output.topk_weights = sources_[rank].weights;
  output.top_k = sources_[rank].top_k;
  outputs_.push_back(&output);
}

// The routing that combine needs came back as it was sent.
void SimulatedDispatch::CheckReturn(const moe::CombineInput& answer, size_t rank) const {
  std::span<const int32_t> ids;
  std::span<const float> weights;
  if (answer.format == DispatchFormat::kDeepepNormal) {
    ids = moe::As<moe::DeepepNormalCombineInput>(answer).topk_ids;
    weights = moe::As<moe::DeepepNormalCombineInput>(answer).topk_weights;
  } else if (answer.format == DispatchFormat::kDeepepLl) {
    ids = moe::As<moe::DeepepLlCombineInput>(answer).topk_ids;
    weights = moe::As<moe::DeepepLlCombineInput>(answer).topk_weights;
  } else {
    return;
  }
  std::span<const int32_t> sent_ids = sources_[rank].ids;
  std::span<const float> sent_weights = sources_[rank].weights;
  if (realisation_.kind == Kind::kNormalTokens) {
    sent_ids = normal_[rank].topk_ids;
    sent_weights = normal_[rank].topk_weights;
  }
  Require(SameBits(ids, sent_ids) && SameBits(weights, sent_weights),
          "the routing did not come back as it was sent");
}

Rows SimulatedDispatch::AnswerRows(const moe::CombineInput& answer, size_t rank) const {
  moe::CombineInput plain = answer;
  if (config_.no_combine) {
    Require(answer.routewise == moe::RoutewiseLayout::kTokenTopk, "rows are not marked routewise");
    plain.routewise = moe::RoutewiseLayout::kNone;
  }
  moe::CheckAnswer(plain, outputs_[rank]->format, outputs_[rank]->promises, "simulated",
                   config_.layer_id);
  CheckReturn(answer, rank);
  switch (answer.format) {
    case DispatchFormat::kStandard: return moe::As<moe::StandardCombineInput>(answer).hidden_states;
    case DispatchFormat::kDeepepNormal:
      return moe::As<moe::DeepepNormalCombineInput>(answer).hidden_states;
    default: return moe::As<moe::DeepepLlCombineInput>(answer).hidden_states;
  }
}

std::vector<std::vector<float>> SimulatedDispatch::Combine(
    std::span<const moe::CombineInput* const> answers) {
  Require(answers.size() == num_ranks(), "not one answer of each rank");
  std::vector<std::vector<float>> out;
  if (realisation_.kind == Kind::kRegistered) {
    const Rows rows = dispatcher_->Combine(context_, *answers[0]);
    out.emplace_back();
    for (size_t t = 0; t < rows.rows; ++t)
      out[0].insert(out[0].end(), rows.Row(t), rows.Row(t) + rows.cols);
    return out;
  }
  std::vector<Rows> rows;
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    rows.push_back(AnswerRows(*answers[rank], rank));
    size_t expected = capacity_[rank];
    if (realisation_.kind == Kind::kMori) {
      const moe::MoriDispatch& mori = *normal_[rank].mori;
      if (mori.recv_cap != 0) expected = std::min(expected, mori.recv_cap);
      Require(mori.expert_output.data == nullptr || rows[rank].data == mori.expert_output.data,
              "the rows are not where they were asked for");
    }
    Require(rows[rank].rows == expected && rows[rank].cols == config_.hidden_size,
            "another number of rows came back");
  }
  if (outputs_[0]->promises.weights_applied_by == moe::WeightsAppliedBy::kCombine)
    return SumRoutes(rows);
  return SumRanks(rows);
}

// Rank after rank, in f32: the order in which a sum over ranks is taken.
std::vector<std::vector<float>> SimulatedDispatch::SumRanks(const std::vector<Rows>& rows) const {
  const size_t cols = config_.hidden_size;
  const size_t per_token = config_.no_combine ? sources_[0].top_k : 1;
  std::vector<std::vector<float>> out;
  for (const MoeTokens& source : sources_) out.emplace_back(source.count * per_token * cols);
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const bool all = realisation_.kind == Kind::kStandard;
    const std::vector<Received>& received = received_[all ? 0 : rank];
    for (size_t i = 0; i < received.size() * per_token; ++i) {
      const Received& from = received[i / per_token];
      float* to = out[from.source].data() + (from.token * per_token + i % per_token) * cols;
      for (size_t h = 0; h < cols; ++h) to[h] += rows[rank].Row(i)[h];
    }
  }
  return out;
}

// out[t] = sum over k of w[t, k] * y[row of (t, k)], columns in order.
std::vector<std::vector<float>> SimulatedDispatch::SumRoutes(const std::vector<Rows>& rows) const {
  std::vector<std::vector<float>> out;
  for (size_t s = 0; s < num_ranks(); ++s) {
    const MoeTokens& source = sources_[s];
    std::vector<const float*> row_of_slot(source.ids.size());
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      for (size_t i = 0; i < received_[rank].size(); ++i) {
        const Received& from = received_[rank][i];
        if (from.source == s)
          row_of_slot[from.token * source.top_k + from.column] = rows[rank].Row(places_[rank][i]);
      }
    }
    std::vector<float>& sum = out.emplace_back(source.count * config_.hidden_size);
    for (size_t slot = 0; slot < row_of_slot.size(); ++slot) {
      if (row_of_slot[slot] == nullptr) continue;
      float* to = sum.data() + slot / source.top_k * config_.hidden_size;
      for (size_t h = 0; h < config_.hidden_size; ++h)
        to[h] += source.weights[slot] * row_of_slot[slot][h];
    }
  }
  return out;
}

}  // namespace switchyard::testing
