#include "switchyard/moe/routing/select_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

constexpr float kNanRank = -1e30f;
constexpr float kRenormalizeEpsilon = 1e-20f;

// Logits to scores of one row, in T. Contract 2.2.
template <typename T>
void Score(ScoringFunc scoring, const float* logits, size_t n, T* scores) {
  switch (scoring) {
    case ScoringFunc::kSoftmax: {
      // A NaN is left out of the maximum, and then makes the whole row NaN through the sum, as in
      // the reference.
      float max = -std::numeric_limits<float>::infinity();
      for (size_t e = 0; e < n; ++e) max = std::max(max, logits[e]);
      T sum = 0;
      for (size_t e = 0; e < n; ++e) {
        scores[e] = std::exp(static_cast<T>(logits[e]) - static_cast<T>(max));
        sum += scores[e];
      }
      for (size_t e = 0; e < n; ++e) scores[e] /= sum;
      return;
    }
    case ScoringFunc::kSigmoid:
      for (size_t e = 0; e < n; ++e)
        scores[e] = T{1} / (T{1} + std::exp(-static_cast<T>(logits[e])));
      return;
  }
}

// The k largest of choice[0, n), ties to the lower index, in descending order.
template <typename T>
void TopIndices(const T* choice, size_t n, size_t k, int32_t* ids) {
  size_t found = 0;
  for (size_t e = 0; e < n; ++e) {
    if (found == k && !(choice[e] > choice[ids[k - 1]])) continue;
    // Insertion behind all values that are at least as large; e is larger than every id so far, so
    // ties stay in order.
    size_t at = found < k ? found++ : k - 1;
    for (; at > 0 && choice[e] > choice[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(e);
  }
}

// scores and choice are scratch of num_experts each.
template <typename T>
void SelectRow(const TopKConfig& config, const float* logits, T* scores, T* choice, int32_t* ids,
               T* weights) {
  const size_t n = config.num_experts;
  Score(config.scoring_func, logits, n, scores);
  for (size_t e = 0; e < n; ++e) {
    choice[e] = scores[e] +
                (config.correction_bias.empty() ? T{0} : static_cast<T>(config.correction_bias[e]));
    if (std::isnan(choice[e])) choice[e] = kNanRank;
  }
  TopIndices(choice, n, config.top_k, ids);
  T sum = 0;
  for (size_t k = 0; k < config.top_k; ++k) {
    weights[k] = scores[ids[k]];
    sum += weights[k];
  }
  if (!config.renormalize) return;
  for (size_t k = 0; k < config.top_k; ++k) weights[k] /= sum + static_cast<T>(kRenormalizeEpsilon);
}

}  // namespace

void ValidateTopK(const TopKConfig& config) {
  if (config.num_experts == 0)
    throw Error(ErrorCode::kInvalidArgument, "num_experts must be at least 1, found 0");
  if (config.top_k == 0 || config.top_k > config.num_experts) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("top_k must be 1 to {} (the number of experts), found {}",
                            config.num_experts, config.top_k));
  }
  if (!config.correction_bias.empty() && config.correction_bias.size() != config.num_experts) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the correction bias must have {} entries, found {}",
                            config.num_experts, config.correction_bias.size()));
  }
}

TopKOutput SelectExperts(ExecContext& context, const TopKConfig& config, ConstRows logits,
                         size_t num_valid) {
  const size_t num_tokens = logits.rows;
  const size_t top_k = config.top_k;
  std::span<float> weights = context.arena.AllocateSpan<float>(num_tokens * top_k);
  std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(num_tokens * top_k);
  // Scratch of each worker: scores and choice values.
  float* scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * 2 * config.num_experts).data();
  constexpr size_t kTokensPerTask = 8;
  context.pool.Run((num_tokens + kTokensPerTask - 1) / kTokensPerTask,
                   [&](size_t task, size_t worker) {
                     float* scores = scratch + worker * 2 * config.num_experts;
                     const size_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
                     for (size_t t = task * kTokensPerTask; t < end; ++t) {
                       if (t < num_valid) {
                         SelectRow(config, logits.Row(t), scores, scores + config.num_experts,
                                   &ids[t * top_k], &weights[t * top_k]);
                       } else {
                         std::fill_n(&ids[t * top_k], top_k, -1);
                         std::fill_n(&weights[t * top_k], top_k, 0.0f);
                       }
                     }
                   });
  return {num_tokens, top_k, weights, ids, logits};
}

void SelectExpertsReference(const TopKConfig& config, const float* logits, int32_t* ids,
                            double* weights) {
  std::vector<double> scores(config.num_experts);
  std::vector<double> choice(config.num_experts);
  SelectRow(config, logits, scores.data(), choice.data(), ids, weights);
}

}  // namespace switchyard::moe
