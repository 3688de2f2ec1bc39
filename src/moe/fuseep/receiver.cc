#include "moe/fuseep/receiver.h"

#include <fmt/format.h>

#include <algorithm>

#include "quant/expert_rows.h"
#include "quant/panel_matmul.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::fuseep {
namespace {

// Rows after which a batch is computed: enough to fill threads, and what lies between the products
// stays small.
constexpr size_t kRowsPerBatch = 2048;

// Ranks that are in step send within this time of each other. Reading the weights of a few experts
// takes longer.
constexpr std::chrono::microseconds kGrace{200};

}  // namespace

Receiver::Receiver(ExecContext& context, Window& window, const Layer& layer,
                   const MoeQuantInfo& weights)
    : context_(context),
      window_(window),
      layout_(window.layout()),
      layer_(layer),
      weights_(weights),
      sources_(context.arena.AllocateSpan<Source>(layout_.num_ranks)),
      routes_before_(context.arena.AllocateSpan<uint32_t>(layout_.num_ranks *
                                                          (layout_.shape.num_local_experts + 1))) {
  std::fill(sources_.begin(), sources_.end(), Source{});
  for (size_t source = 0; source < sources_.size(); ++source) RoutesBefore(source, 0) = 0;
}

bool Receiver::Advance() {
  TakeArrivals();
  if (!FindReady()) return false;
  ArenaScope scope(context_.arena);
  Batch batch = MakeBatch();
  for (size_t expert = 0; expert < layout_.shape.num_local_experts; ++expert) {
    AddExpert(batch, expert);
    if (batch.num_rows >= kRowsPerBatch) Compute(batch);
  }
  Compute(batch);
  FinishReady();
  return true;
}

void Receiver::TakeArrivals() {
  for (size_t source = 0; source < sources_.size(); ++source) {
    size_t& arrived = sources_[source].arrived;
    for (; arrived < layout_.num_blocks; ++arrived) {
      const std::optional<uint32_t> count = window_.BlockFrom(source, arrived);
      if (!count) break;
      const uint32_t* counts = window_.Counts(window_.rank(), source);
      const size_t first = layout_.BlockBegin(arrived), last = layout_.BlockEnd(arrived);
      for (size_t expert = first; expert < last; ++expert)
        RoutesBefore(source, expert + 1) = RoutesBefore(source, expert) + counts[expert];
      const uint32_t found = RoutesBefore(source, last) - RoutesBefore(source, first);
      if (found == *count) continue;
      throw Error(ErrorCode::kInternal,
                  fmt::format("{}: rank {} sent {} routes for experts {} to {}, and says {}",
                              layer_.names.layer, source, found, first, last - 1, *count));
    }
  }
}

bool Receiver::IsWaitingForRest() const {
  return layer_.mode == kDispatchGmmCombineDecode ||
         std::chrono::steady_clock::now() - *began_ < kGrace;
}

bool Receiver::FindReady() {
  if (!began_) began_ = std::chrono::steady_clock::now();
  const bool together = IsWaitingForRest();
  size_t from_all = layout_.num_blocks;
  for (const Source& source : sources_) from_all = std::min(from_all, source.arrived);
  bool any = false;
  is_waiting_ = false;
  for (Source& source : sources_) {
    source.ready = std::max(source.computed, together ? from_all : source.arrived);
    any = any || source.computed < source.ready;
    is_waiting_ = is_waiting_ || source.ready < source.arrived;
  }
  return any;
}

Receiver::Batch Receiver::MakeBatch() {
  size_t most = 0;
  for (size_t source = 0; source < sources_.size(); ++source) {
    const auto before = [&](size_t blocks) {
      return blocks == 0 ? 0 : RoutesBefore(source, layout_.BlockEnd(blocks - 1));
    };
    most += before(sources_[source].ready) - before(sources_[source].computed);
  }
  Batch batch;
  batch.experts = context_.arena.AllocateSpan<uint32_t>(layout_.shape.num_local_experts);
  batch.begin = context_.arena.AllocateSpan<uint32_t>(layout_.shape.num_local_experts + 1);
  batch.rows = context_.arena.AllocateSpan<const void*>(most);
  batch.homes = context_.arena.AllocateSpan<float*>(most);
  if (layer_.rows_are_codes) batch.scales = context_.arena.AllocateSpan<float>(most);
  return batch;
}

void Receiver::AddExpert(Batch& batch, size_t expert) {
  const size_t block = expert / layout_.experts_per_block;
  const size_t first_row = batch.num_rows;
  for (size_t source = 0; source < sources_.size(); ++source) {
    if (block < sources_[source].computed || block >= sources_[source].ready) continue;
    const Route* routes = window_.Routes(window_.rank(), source);
    for (size_t i = RoutesBefore(source, expert); i < RoutesBefore(source, expert + 1); ++i)
      AddRoute(batch, source, routes[i]);
  }
  if (batch.num_rows == first_row) return;
  batch.experts[batch.num_experts] = static_cast<uint32_t>(expert);
  batch.begin[batch.num_experts++] = static_cast<uint32_t>(first_row);
}

void Receiver::AddRoute(Batch& batch, size_t source, const Route& route) const {
  batch.rows[batch.num_rows] = window_.RowOf(window_.rank(), source, route.row);
  batch.homes[batch.num_rows] = window_.Home(source, route.slot);
  if (layer_.rows_are_codes)
    batch.scales[batch.num_rows] = window_.Scales(window_.rank(), source)[route.row];
  ++batch.num_rows;
}

void Receiver::Compute(Batch& batch) const {
  if (batch.num_rows == 0) return;
  ArenaScope scope(context_.arena);
  batch.begin[batch.num_experts] = static_cast<uint32_t>(batch.num_rows);
  const quant::ExpertGroups groups{batch.experts.first(batch.num_experts),
                                   batch.begin.first(batch.num_experts + 1)};
  quant::ActRows x{layer_.row_dtype, batch.rows.first(batch.num_rows), layout_.shape.hidden_size};
  if (layer_.rows_are_codes) x.row_scale = batch.scales.first(batch.num_rows);
  const MoeRunnerConfig& config = layer_.config;
  if (weights_.w1.format.in_panels)
    x = quant::MakeRecords(context_, x, weights_.w1.format, config.activation_dtype);
  const ExpertMatrices& w2 = weights_.w2;
  const QuantRows hidden = quant::GateUp(
      context_, groups, x, {weights_.w1, weights_.w3, config.is_gated, config.formula},
      quant::HiddenDType(weights_.a2, w2.format, config.activation_dtype));
  quant::DownInto(
      context_, groups,
      quant::PrepareExpertRows(context_, hidden, weights_.a2, w2.format, config.activation_dtype),
      w2, batch.homes.first(batch.num_rows));
  batch.num_rows = batch.num_experts = 0;
}

void Receiver::FinishReady() {
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    Source& source = sources_[rank];
    if (source.computed == source.ready) continue;
    source.computed = source.ready;
    if (source.computed < layout_.num_blocks) continue;
    window_.PostDone(rank, RoutesBefore(rank, layout_.shape.num_local_experts));
    ++num_finished_;
  }
}

bool Receiver::HasNews() const {
  if (is_waiting_ && !IsWaitingForRest()) return true;
  for (size_t source = 0; source < sources_.size(); ++source) {
    const size_t arrived = sources_[source].arrived;
    if (arrived < layout_.num_blocks && window_.HasBlock(source, arrived)) return true;
  }
  return false;
}

std::vector<size_t> Receiver::Late() const {
  std::vector<size_t> late;
  for (size_t source = 0; source < sources_.size(); ++source) {
    if (sources_[source].arrived < layout_.num_blocks) late.push_back(source);
  }
  return late;
}

}  // namespace switchyard::moe::fuseep
