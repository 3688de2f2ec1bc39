// One forward step of a whole model on ranks that need not exist.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/simulate/exchange.h"
#include "switchyard/simulate/link.h"
#include "switchyard/simulate/routing.h"
#include "switchyard/simulate/shape.h"

namespace switchyard::simulate {

// What is computed outside the experts.
enum class AttentionMode {
  kDataParallel,  // each rank its own tokens
  kReplicated,    // each rank all tokens, which are gathered after every layer
};

// The layout to predict.
struct SimulationRequest {
  ModelShape shape;
  LinkProfile link;
  ExpertShares routing;
  size_t num_ranks = 8;  // 1 to kMaxRanks, a multiple of num_nodes
  size_t num_nodes = 1;
  size_t tokens = 128;    // of each rank in one step, each of a sequence of its own; 0 = idle
  size_t context = 1024;  // keys that each token's attention reads
  std::optional<size_t> redundant;  // experts that PlanExperts adds; without it: no plan
  WireType wire = WireType::kFp8;
  AttentionMode attention = AttentionMode::kDataParallel;
  bool low_latency = false;  // slots instead of flat and hierarchical
};

inline constexpr size_t kMaxRanks = 4096;
inline constexpr size_t kMaxTokens = size_t{1} << 20;   // of a rank
inline constexpr size_t kMaxContext = size_t{1} << 24;  // keys
inline constexpr size_t kMaxRedundant = size_t{1} << 14;

// How evenly ranks are used: (token, expert) rows of the busiest rank over those of the mean rank.
struct Balance {
  double mean = 1;   // over the layers
  double worst = 1;  // layer
  double rows = 0;   // of a mean rank in one layer
};

// One step with one way of exchanging.
struct StepPrediction {
  ExchangeScheme scheme = ExchangeScheme::kFlat;
  // Of one MoE layer, mean over the layers.
  ExchangeCost dispatch = {}, combine = {};
  double experts_us = 0;  // busiest rank
  // Whole step.
  double step_us = 0;
  double exchange_us = 0;   // of it: all dispatches, combines and gathers
  double tokens_per_s = 0;  // of all ranks together

  double moe_layer_us() const { return dispatch.total_us() + experts_us + combine.total_us(); }
  double exchange_share() const { return step_us > 0 ? exchange_us / step_us : 0; }
};

// What Predict finds.
struct Prediction {
  size_t num_ranks = 0, num_nodes = 0;
  size_t redundant = 0;
  size_t experts_per_rank = 0;
  size_t dispatch_row_bytes = 0, combine_row_bytes = 0;
  double weight_bytes = 0;  // of one rank
  double other_us = 0;      // attention, dense layers, shared experts, router, head: of one step
  double gather_us = 0;     // of one step; kReplicated only
  Balance balance;
  std::vector<StepPrediction> steps;  // flat and hierarchical, or slots
};

// Errors: kInvalidArgument naming the size that is out of range or does not divide.
Prediction Predict(const SimulationRequest& request);

// Predict for 2, 4, … ranks up to max_ranks, with as many of them on a node as in `request` (fewer
// while there are fewer; a full node is one of the points). Experts that do not divide get
// redundant ones, at least those of `request`.
// Errors: as Predict; kInvalidArgument if max_ranks is not 2 to kMaxRanks.
std::vector<Prediction> Sweep(const SimulationRequest& request, size_t max_ranks);

// The assumptions behind a prediction, a sentence each; printed beside every plot.
std::vector<std::string> Assumptions(const SimulationRequest& request);

}  // namespace switchyard::simulate
