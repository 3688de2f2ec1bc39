#include "switchyard/simulate/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "switchyard/core/error.h"

namespace switchyard::simulate {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void RequireRange(std::string_view what, size_t value, size_t min, size_t max) {
  if (value < min || value > max)
    Invalid(fmt::format("{} must be {} to {}, found {}", what, min, max, value));
}

void Check(const SimulationRequest& request) {
  RequireRange("the number of ranks (--ep)", request.num_ranks, 1, kMaxRanks);
  RequireRange("the number of nodes (--nodes)", request.num_nodes, 1, request.num_ranks);
  RequireRange("the tokens of a rank (--tokens)", request.tokens, 0, kMaxTokens);
  RequireRange("the context (--context)", request.context, 0, kMaxContext);
  RequireRange("redundant experts (--redundant)", request.redundant.value_or(0), 0, kMaxRedundant);
  if (request.num_ranks % request.num_nodes != 0) {
    Invalid(fmt::format("{} ranks (--ep) cannot be divided evenly among {} nodes (--nodes)",
                        request.num_ranks, request.num_nodes));
  }
  if (request.shape.top_k == 0 || request.shape.top_k > request.shape.num_experts) {
    Invalid(fmt::format("{}: experts per token must be 1 to {} (the experts), found {}",
                        request.shape.name, request.shape.num_experts, request.shape.top_k));
  }
  if (request.routing.layers.empty()) Invalid("the routing has no layers");
  for (const std::vector<double>& layer : request.routing.layers) {
    if (layer.size() != request.shape.num_experts) {
      Invalid(fmt::format("{}: the routing is of {} experts, {} has {}",
                          request.routing.description, layer.size(), request.shape.name,
                          request.shape.num_experts));
    }
  }
}

// A stage takes as long as its bytes or its operations, whichever is slower.
double StageUs(double bytes, double flops, const LinkProfile& link) {
  return std::max(bytes / link.read_gbytes_per_s, flops / link.compute_gflop_per_s) * 1e-3;
}

// A product of `tokens` rows with a matrix.
double MatrixUs(double params, double bytes_per_weight, double tokens, const LinkProfile& link) {
  return tokens == 0 ? 0 : StageUs(params * bytes_per_weight, 2 * params * tokens, link);
}

// Everything but the experts and their exchanges, of one step.
double OtherUs(const SimulationRequest& request) {
  const ModelShape& shape = request.shape;
  const LinkProfile& link = request.link;
  const double moe = static_cast<double>(shape.moe_layers);
  const double dense = static_cast<double>(shape.dense_layers);
  const double own = static_cast<double>(request.tokens);
  const double tokens = request.attention == AttentionMode::kReplicated
                            ? own * static_cast<double>(request.num_ranks)
                            : own;
  const double keys = tokens * static_cast<double>(request.context);
  const auto matrix = [&](double params, double rows) {
    return MatrixUs(params, shape.other_bytes_per_weight, rows, link);
  };
  const double router = static_cast<double>(shape.hidden) * static_cast<double>(shape.num_experts);
  const double attention = matrix(shape.attention_params, tokens) +
                           StageUs(keys * shape.kv_bytes, keys * shape.flops_per_key, link);
  return (moe + dense) * attention + dense * matrix(shape.dense_params, tokens) +
         moe * (matrix(router, own) + matrix(shape.shared_params, own)) +
         matrix(shape.head_params, own);
}

// After a layer each rank gets the hidden rows of all others, a node each of them once.
double GatherUs(const SimulationRequest& request) {
  if (request.attention == AttentionMode::kDataParallel || request.num_ranks == 1) return 0;
  const LinkProfile& link = request.link;
  const size_t per_node = request.num_ranks / request.num_nodes;
  const double row = 2 * static_cast<double>(request.shape.hidden);
  const double rows = static_cast<double>(request.tokens);
  const auto others = [&](size_t near) {
    return static_cast<double>(request.num_ranks - near) * rows * row;
  };
  const double cards = link.nic_per == NicOwner::kNode ? 1 : static_cast<double>(per_node);
  const double rounds = static_cast<double>(std::bit_width(request.num_ranks - 1));
  return rounds * (link.o_us + link.latency_us) +
         (others(per_node) / cards / link.nic_gbytes_per_s + others(1) / link.memory_gbytes_per_s) *
             1e-3;
}

// The experts of the busiest rank. Each expert that is wanted is read once; its rows are read and
// written in bf16.
double ExpertsUs(const SimulationRequest& request, std::span<const double> slots) {
  const ModelShape& shape = request.shape;
  const size_t per_rank = slots.size() / request.num_ranks;
  const double tokens =
      static_cast<double>(request.tokens) * static_cast<double>(request.num_ranks);
  const double row_bytes = 4 * static_cast<double>(shape.hidden);
  std::vector<double> ranks(request.num_ranks, 0.0);
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const double rows = tokens * slots[slot];
    const double chance = 1 - std::pow(1 - std::min(slots[slot], 1.0), tokens);
    ranks[slot / per_rank] += StageUs(chance * shape.expert_bytes() + rows * row_bytes,
                                      2 * shape.expert_params() * rows, request.link);
  }
  return *std::max_element(ranks.begin(), ranks.end());
}

double WeightBytes(const ModelShape& shape, size_t experts_per_rank) {
  const double moe = static_cast<double>(shape.moe_layers);
  const double dense = static_cast<double>(shape.dense_layers);
  // Embedding and head.
  const double other = (moe + dense) * shape.attention_params + dense * shape.dense_params +
                       moe * shape.shared_params + 2 * shape.head_params;
  return moe * static_cast<double>(experts_per_rank) * shape.expert_bytes() +
         other * shape.other_bytes_per_weight;
}

void AddScaled(ExchangeCost& sum, const ExchangeCost& cost, double scale) {
  sum.counts_us += cost.counts_us * scale;
  sum.latency_us += cost.latency_us * scale;
  sum.network_us += cost.network_us * scale;
  sum.memory_us += cost.memory_us * scale;
  sum.fixed_us += cost.fixed_us * scale;
  sum.off_rank_bytes += cost.off_rank_bytes * scale;
  sum.off_node_bytes += cost.off_node_bytes * scale;
  sum.busiest_nic_bytes += cost.busiest_nic_bytes * scale;
}

// How many of the model's layers have the routing of entry `index`, as a share of all.
double LayerShare(size_t index, size_t entries, size_t moe_layers) {
  const size_t count = moe_layers / entries + (index < moe_layers % entries ? 1 : 0);
  return static_cast<double>(count) / static_cast<double>(moe_layers);
}

// Adds one layer's exchanges and experts to the means.
void AddLayer(const SimulationRequest& request, std::span<const double> slots, double share,
              Prediction& prediction) {
  const Reach reach =
      ComputeReach(slots, request.num_ranks, request.num_nodes, request.shape.top_k);
  const double imbalance = MaxOverMean(reach.rows);
  prediction.balance.mean += share * imbalance;
  prediction.balance.worst = std::max(prediction.balance.worst, imbalance);
  double rows = 0;
  for (const double own : reach.rows) rows += own;
  prediction.balance.rows += share * rows * static_cast<double>(request.tokens);
  const double experts_us = ExpertsUs(request, slots);
  for (StepPrediction& step : prediction.steps) {
    ExchangeRequest exchange{step.scheme, request.tokens,
                             static_cast<double>(prediction.dispatch_row_bytes), true,
                             request.link.dispatch_fixed_us};
    AddScaled(step.dispatch, PredictExchange(reach, request.link, exchange), share);
    exchange.row_bytes = static_cast<double>(prediction.combine_row_bytes);
    exchange.exchanges_counts = false;
    exchange.fixed_us = request.link.combine_fixed_us;
    AddScaled(step.combine, PredictExchange(reach, request.link, exchange), share);
    step.experts_us += share * experts_us;
  }
}

void FinishStep(const SimulationRequest& request, const Prediction& prediction,
                StepPrediction& step) {
  const double layers = static_cast<double>(request.shape.moe_layers);
  step.step_us = layers * step.moe_layer_us() + prediction.other_us + prediction.gather_us;
  step.exchange_us =
      layers * (step.dispatch.total_us() + step.combine.total_us()) + prediction.gather_us;
  const double tokens =
      static_cast<double>(request.tokens) * static_cast<double>(request.num_ranks);
  step.tokens_per_s = step.step_us > 0 ? tokens / step.step_us * 1e6 : 0;
}

}  // namespace

Prediction Predict(const SimulationRequest& request) {
  Check(request);
  const ModelShape& shape = request.shape;
  Prediction prediction;
  prediction.num_ranks = request.num_ranks;
  prediction.num_nodes = request.num_nodes;
  prediction.redundant = request.redundant.value_or(0);
  prediction.dispatch_row_bytes = DispatchRowBytes(shape.hidden, shape.top_k, request.wire);
  prediction.combine_row_bytes = CombineRowBytes(shape.hidden);
  prediction.other_us = OtherUs(request);
  prediction.gather_us =
      GatherUs(request) * static_cast<double>(shape.moe_layers + shape.dense_layers);
  prediction.balance.mean = 0;
  if (request.low_latency) {
    prediction.steps.push_back({.scheme = ExchangeScheme::kSlots});
  } else {
    prediction.steps.push_back({.scheme = ExchangeScheme::kFlat});
    prediction.steps.push_back({.scheme = ExchangeScheme::kHierarchical});
  }
  const std::vector<std::vector<double>>& layers = request.routing.layers;
  const size_t entries = std::min(layers.size(), shape.moe_layers);
  for (size_t i = 0; i < entries; ++i) {
    const std::vector<double> slots = PlaceExperts(layers[i], request.num_ranks, request.redundant);
    prediction.experts_per_rank = slots.size() / request.num_ranks;
    AddLayer(request, slots, LayerShare(i, entries, shape.moe_layers), prediction);
  }
  prediction.weight_bytes = WeightBytes(shape, prediction.experts_per_rank);
  for (StepPrediction& step : prediction.steps) FinishStep(request, prediction, step);
  return prediction;
}

std::vector<Prediction> Sweep(const SimulationRequest& request, size_t max_ranks) {
  RequireRange("the ranks of a sweep", max_ranks, 2, kMaxRanks);
  Check(request);
  const size_t per_node = request.num_ranks / request.num_nodes;
  std::vector<Prediction> points;
  size_t ranks = 2;
  while (ranks <= max_ranks) {
    SimulationRequest point = request;
    point.num_ranks = ranks;
    point.num_nodes = std::max<size_t>(1, ranks / per_node);
    const size_t redundant =
        FittingRedundancy(request.shape.num_experts, ranks, request.redundant.value_or(0));
    if (request.redundant || redundant > 0) point.redundant = redundant;
    points.push_back(Predict(point));
    ranks = ranks < per_node ? std::min(2 * ranks, per_node) : 2 * ranks;
  }
  return points;
}

std::vector<std::string> Assumptions(const SimulationRequest& request) {
  const LinkProfile& link = request.link;
  std::vector<std::string> lines = {
      fmt::format("link \"{}\": o {} us, latency {} us, gap {} us; one network card of {} GB/s per "
                  "{}; rows into a rank's memory at {} GB/s",
                  link.name, link.o_us, link.latency_us, link.gap_us, link.nic_gbytes_per_s,
                  NicOwnerName(link.nic_per), link.memory_gbytes_per_s),
      fmt::format(
          "a rank multiplies at {} GFLOP/s and reads weights at {} GB/s, whichever is slower "
          "in each stage",
          link.compute_gflop_per_s, link.read_gbytes_per_s),
      fmt::format("{} tokens a rank, each of its own sequence with {} keys; attention {}",
                  request.tokens, request.context,
                  request.attention == AttentionMode::kDataParallel
                      ? "of a rank's own tokens"
                      : "of all tokens on every rank, then gathered"),
      fmt::format("routing {}; rows dispatched in {}, combined in bf16",
                  request.routing.description, WireTypeName(request.wire))};
  lines.emplace_back(
      "expected values: scatter of finite batches, congestion between cards and other programs are "
      "left out; the busiest rank sets the pace; nothing overlaps");
  if (link.dispatch_fixed_us > 0 || link.combine_fixed_us > 0) {
    lines.push_back(fmt::format("{} us are added to each dispatch, {} us to each combine",
                                link.dispatch_fixed_us, link.combine_fixed_us));
  }
  return lines;
}

}  // namespace switchyard::simulate
