#include "bench_exchange.h"

#include <algorithm>
#include <chrono>
#include <random>

#include "switchyard/moe/layer/register_builtins.h"

namespace switchyard::cli {
namespace {

using moe::DispatchFormat;
using moe::RoutewiseLayout;

size_t RankOf(const BenchLayer& layer, int32_t id) {
  return static_cast<size_t>(id) / layer.config.num_local_experts;
}

// Slots of a token whose experts are on a rank.
size_t SlotsAt(const BenchLayer& layer, const BenchTokens& tokens, size_t token, size_t rank) {
  const auto ids = tokens.TopK().Ids(token);
  return static_cast<size_t>(
      std::count_if(ids.begin(), ids.end(), [&](int32_t id) { return RankOf(layer, id) == rank; }));
}

// Rows that rank `to` gets of the tokens of one rank: tokens that go there.
std::vector<uint32_t> TokensFor(const BenchLayer& layer, const BenchTokens& tokens, size_t to,
                                bool to_all) {
  std::vector<uint32_t> rows;
  for (size_t t = 0; t < tokens.count; ++t) {
    if (to_all || SlotsAt(layer, tokens, t, to) != 0) rows.push_back(static_cast<uint32_t>(t));
  }
  return rows;
}

// Rows that `rank` computes for the tokens of one rank.
size_t ResultsAt(const BenchLayer& layer, const BenchTokens& tokens, size_t rank, bool summed) {
  size_t rows = 0;
  for (size_t t = 0; t < tokens.count; ++t) {
    const size_t slots = SlotsAt(layer, tokens, t, rank);
    rows += summed ? std::min<size_t>(slots, 1) : slots;
  }
  return rows;
}

Leg DispatchLeg(const BenchLayer& layer, std::span<const BenchTokens> all, size_t me, bool to_all) {
  Leg leg;
  leg.row_bytes = layer.dispatch_row_bytes;
  leg.needs_counts = true;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    leg.send.push_back(TokensFor(layer, all[me], rank, to_all));
    leg.recv.push_back(TokensFor(layer, all[rank], me, to_all).size());
  }
  return leg;
}

Leg CombineLeg(const BenchLayer& layer, std::span<const BenchTokens> all, size_t me, bool summed) {
  Leg leg;
  leg.row_bytes = layer.home_row_bytes;
  leg.own_in_place = true;
  uint32_t row = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::vector<uint32_t>& rows = leg.send.emplace_back();
    for (size_t count = ResultsAt(layer, all[rank], me, summed); count > 0; --count)
      rows.push_back(row++);
    leg.recv.push_back(ResultsAt(layer, all[me], rank, summed));
  }
  return leg;
}

// Every rank's sums to all ranks, the own ones too.
Leg GatherLeg(const BenchLayer& layer, std::span<const BenchTokens> all, size_t me) {
  Leg leg;
  leg.row_bytes = (layer.config.hidden_size * sizeof(float) + 63) / 64 * 64;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    leg.send.push_back(TokensFor(layer, all[me], rank, true));
    leg.recv.push_back(all[rank].count);
  }
  return leg;
}

}  // namespace

BenchTokens BenchTokens::Random(const moe::MoeRunnerConfig& config, size_t count, size_t rank) {
  std::mt19937_64 random(rank * 1000003 + count);
  BenchTokens tokens;
  tokens.count = count;
  tokens.top_k = config.top_k;
  tokens.cols = config.hidden_size;
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  for (size_t i = 0; i < count * config.hidden_size; ++i) tokens.hidden.push_back(value(random));
  std::vector<int32_t> experts(config.num_experts);
  for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
  for (size_t t = 0; t < count; ++t) {
    // The first K of a shuffle.
    for (size_t k = 0; k < config.top_k; ++k)
      std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
    tokens.ids.insert(tokens.ids.end(), experts.begin(),
                      experts.begin() + static_cast<std::ptrdiff_t>(config.top_k));
  }
  tokens.weights.assign(tokens.ids.size(), 1.0f / static_cast<float>(config.top_k));
  return tokens;
}

BenchTokens BenchTokens::Join(std::span<const BenchTokens> all) {
  BenchTokens joined = all[0];
  for (const BenchTokens& tokens : all.subspan(1)) {
    joined.count += tokens.count;
    joined.hidden.insert(joined.hidden.end(), tokens.hidden.begin(), tokens.hidden.end());
    joined.ids.insert(joined.ids.end(), tokens.ids.begin(), tokens.ids.end());
    joined.weights.insert(joined.weights.end(), tokens.weights.begin(), tokens.weights.end());
  }
  return joined;
}

std::vector<Leg> LegsOf(const Backend& backend, const BenchLayer& layer,
                        std::span<const BenchTokens> all, size_t me, bool summed) {
  // Slabs have a row per route anyway.
  const Leg home = CombineLeg(layer, all, me, summed && !backend.is_low_latency);
  if (backend.traffic == Traffic::kReplicated) return {home, GatherLeg(layer, all, me)};
  return {DispatchLeg(layer, all, me, backend.traffic == Traffic::kAll), home};
}

DispatchStep::DispatchStep(ExecContext& context, ParallelGroups& groups,
                           const moe::ExpertParallelOptions& options, const Backend& backend,
                           const BenchLayer& layer, const BenchTokens& tokens)
    : context_(context), layer_(layer), tokens_(tokens), ep_(groups, options) {
  const auto entries = moe::BuiltinRegistry().DispatchersFor(backend.a2a, "aiter", backend.mode);
  dispatcher_ = entries.front()->make({layer.config, "aiter", &ep_});
  moe::DispatcherQuantConfig wire = layer.wire;
  if (!dispatcher_->CanSend(wire.output.kind)) wire.output = {};
  dispatcher_->SetQuantConfig(wire);
  ep_.BeginPass(backend.is_low_latency ? moe::ForwardPhase::kDecode : moe::ForwardPhase::kPrefill);
}

void DispatchStep::Run() {
  using Clock = std::chrono::steady_clock;
  std::array<Clock::time_point, 5> at;
  context_.arena.Reset();
  at[0] = Clock::now();
  dispatcher_->DispatchA(context_, tokens_.Hidden(), tokens_.TopK());
  at[1] = Clock::now();
  const moe::DispatchOutput& output = dispatcher_->DispatchB(context_);
  at[2] = Clock::now();
  dispatcher_->CombineA(context_, HandBack(output));
  at[3] = Clock::now();
  dispatcher_->CombineB(context_);
  at[4] = Clock::now();
  for (size_t i = 0; i < 4; ++i)
    stages_.us[i] += std::chrono::duration<double, std::micro>(at[i + 1] - at[i]).count();
  ++stages_.runs;
}

void DispatchStep::MakeRows(std::span<const int32_t> ids, bool ids_are_local) {
  if (is_made_) return;
  is_made_ = true;
  const auto local = static_cast<int32_t>(layer_.config.num_local_experts);
  const auto first = ids_are_local ? 0 : static_cast<int32_t>(ep_.ep_rank()) * local;
  int32_t rows = 0;
  for (int32_t id : ids) row_of_slot_.push_back(id >= first && id < first + local ? rows++ : -1);
  const size_t cols = layer_.config.hidden_size;
  // As many as tokens too, for sums.
  const size_t most = std::max(static_cast<size_t>(rows), ids.size() / layer_.config.top_k);
  data_.reset(new float[most * cols]());
  rows_ = Rows(data_.get(), static_cast<size_t>(rows), cols);
}

void DispatchStep::MakeSlab(const moe::DeepepLlDispatchOutput& output) {
  if (is_made_) return;
  is_made_ = true;
  const size_t cols = layer_.config.hidden_size;
  // Side by side by expert, as a runner computes them.
  row_of_slot_.assign(output.hidden_states.rows, -1);
  int32_t rows = 0;
  for (size_t e = 0; e < output.masked_m.size(); ++e) {
    for (size_t i = 0; i < static_cast<size_t>(output.masked_m[e]); ++i)
      row_of_slot_[e * output.capacity + i] = rows++;
  }
  data_.reset(new float[static_cast<size_t>(rows) * cols]());
  rows_ = Rows(data_.get(), static_cast<size_t>(rows), cols);
}

const moe::CombineInput& DispatchStep::HandBack(const moe::DispatchOutput& output) {
  const RoutewiseLayout layout =
      moe::IsRoutewise(output.promises) ? RoutewiseLayout::kExpanded : RoutewiseLayout::kNone;
  // A token's sum instead of its routes: as many rows as tokens, for which those of routes do.
  const auto rows_of = [&](size_t tokens) {
    return layout == RoutewiseLayout::kExpanded ? rows_ : Rows(rows_.data, tokens, rows_.cols);
  };
  if (output.format == DispatchFormat::kDeepepLl) {
    const auto& slab = moe::As<moe::DeepepLlDispatchOutput>(output);
    MakeSlab(slab);
    auto* answer = context_.arena.New<moe::DeepepLlCombineInput>(rows_, output.promises);
    answer->row_of_place = row_of_slot_;
    answer->topk_ids = slab.topk_ids;
    answer->topk_weights = slab.topk_weights;
    return *answer;
  }
  if (output.format == DispatchFormat::kDeepepNormal) {
    const auto& tokens = moe::As<moe::DeepepNormalDispatchOutput>(output);
    MakeRows(tokens.topk_ids, tokens.promises.id_space == moe::IdSpace::kLocal);
    auto* answer = context_.arena.New<moe::DeepepNormalCombineInput>(
        rows_of(tokens.hidden_states.rows), output.promises);
    answer->routewise = layout;
    answer->row_of_slot = row_of_slot_;
    answer->topk_ids = tokens.topk_ids;
    answer->topk_weights = tokens.topk_weights;
    return *answer;
  }
  const auto& tokens = moe::As<moe::StandardDispatchOutput>(output);
  MakeRows(tokens.topk_output.ids, false);
  auto* answer = context_.arena.New<moe::StandardCombineInput>(rows_of(tokens.hidden_states.rows),
                                                               output.promises);
  answer->routewise = layout;
  answer->row_of_slot = row_of_slot_;
  return *answer;
}

}  // namespace switchyard::cli
