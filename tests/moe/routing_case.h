// Calls of the router for tests: rows of logits in, vectors out.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {

using LogitRows = std::vector<std::vector<float>>;

// The result of a call, copied out of its arena.
struct Routing {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> weights;
};

inline std::vector<float> Flatten(const LogitRows& rows) {
  std::vector<float> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return flat;
}

inline Routing Select(const TopKConfig& config, const LogitRows& logits, const TopKInputs& inputs,
                      size_t threads = 1) {
  ThreadPool pool(threads);
  Arena arena;
  ExecContext context{pool, arena};
  const std::vector<float> flat = Flatten(logits);
  const TopKOutput output = SelectExperts(
      context, config, ConstRows(flat.data(), logits.size(), config.num_experts), inputs);
  Routing routing;
  for (size_t t = 0; t < logits.size(); ++t) {
    routing.ids.emplace_back(output.Ids(t).begin(), output.Ids(t).end());
    routing.weights.emplace_back(output.Weights(t).begin(), output.Weights(t).end());
  }
  return routing;
}

inline Routing Select(const TopKConfig& config, const LogitRows& logits,
                      size_t num_valid = SIZE_MAX, size_t threads = 1) {
  TopKInputs inputs;
  inputs.num_token_non_padded = num_valid;
  return Select(config, logits, inputs, threads);
}

inline TopKConfig RouterConfig(size_t experts, size_t top_k,
                               ScoringFunc scoring = ScoringFunc::kSoftmax,
                               bool renormalize = true) {
  TopKConfig config;
  config.num_experts = experts;
  config.top_k = top_k;
  config.scoring_func = scoring;
  config.renormalize = renormalize;
  return config;
}

inline bool AreDistinct(const std::vector<int32_t>& ids) {
  return std::set<int32_t>(ids.begin(), ids.end()).size() == ids.size();
}

}  // namespace switchyard::moe
