#include "moe/routing/policies.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "moe/routing/random.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// In place is fine. A NaN is left out of the maximum, and then makes the whole row NaN through the
// sum, as in the reference system.
void Softmax(const float* logits, size_t n, float* scores) {
  float max = -kInfinity;
  for (size_t i = 0; i < n; ++i) max = std::max(max, logits[i]);
  float sum = 0;
  for (size_t i = 0; i < n; ++i) {
    scores[i] = std::exp(logits[i] - max);
    sum += scores[i];
  }
  for (size_t i = 0; i < n; ++i) scores[i] /= sum;
}

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float SqrtSoftplus(float x) {
  return std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))));
}

float SqrtSoftplusLog1p(float x) {
  return std::sqrt(x > kSoftplusLinear ? x : std::log1p(std::exp(x)));
}

// Contract 2.2. `scores` must not be `logits`.
void Score(const TopKConfig& config, ScoringFunc scoring, const float* logits, float* scores) {
  const size_t n = config.num_experts;
  switch (scoring) {
    case ScoringFunc::kSoftmax:
      if (config.router_logit_softcap != 0) {
        const float cap = static_cast<float>(config.router_logit_softcap);
        for (size_t e = 0; e < n; ++e) scores[e] = cap * std::tanh(logits[e] / cap);
        logits = scores;
      }
      return Softmax(logits, n, scores);
    case ScoringFunc::kSigmoid: std::transform(logits, logits + n, scores, Sigmoid); return;
    case ScoringFunc::kSqrtSoftplus:
      std::transform(logits, logits + n, scores,
                     config.sqrtsoftplus_log1p ? SqrtSoftplusLog1p : SqrtSoftplus);
      return;
  }
}

// choice[i] = values[i] + bias[i] (bias may be null), NaN replaced.
void ChoiceValues(const float* values, const float* bias, size_t n, float nan_rank, float* choice) {
  for (size_t i = 0; i < n; ++i) {
    choice[i] = bias == nullptr ? values[i] : values[i] + bias[i];
    if (std::isnan(choice[i])) choice[i] = nan_rank;
  }
}

// The k largest of choice[0, n), ties to the lower index, in descending order. ids is a heap with
// the worst of the best in front, so an index that is no candidate costs one comparison.
void TopIndices(const float* choice, size_t n, size_t k, int32_t* ids) {
  const auto better = [choice](int32_t a, int32_t b) {
    return choice[a] > choice[b] || (choice[a] == choice[b] && a < b);
  };
  for (size_t i = 0; i < k; ++i) ids[i] = static_cast<int32_t>(i);
  std::make_heap(ids, ids + k, better);
  for (size_t i = k; i < n; ++i) {
    if (!(choice[i] > choice[ids[0]])) continue;
    std::pop_heap(ids, ids + k, better);
    ids[k - 1] = static_cast<int32_t>(i);
    std::push_heap(ids, ids + k, better);
  }
  std::sort_heap(ids, ids + k, better);
}

void Gather(const float* values, const int32_t* ids, size_t k, float* out) {
  for (size_t i = 0; i < k; ++i) out[i] = values[ids[i]];
}

float SumOfTopTwo(const float* values, size_t n) {
  float first = -kInfinity, second = -kInfinity;
  for (size_t i = 0; i < n; ++i) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else {
      second = std::max(second, values[i]);
    }
  }
  // One value, or infinities of both signs: the larger alone.
  return n == 1 || std::isnan(first + second) ? first : first + second;
}

// Replaces the choice values of all but the topk_group best groups. Leaves in group_scores 1 for a
// group that was kept and 0 for the others.
void LimitGroups(const TopKConfig& config, bool has_bias, const RoutingScratch& scratch) {
  const size_t num_groups = config.num_expert_group;
  const size_t size = config.num_experts / num_groups;
  const bool top_two = config.group_score_rule == GroupScoreRule::kAuto
                           ? has_bias
                           : config.group_score_rule == GroupScoreRule::kTopTwoSum;
  for (size_t g = 0; g < num_groups; ++g) {
    const float* group = scratch.choice + g * size;
    scratch.group_scores[g] =
        top_two ? SumOfTopTwo(group, size) : *std::max_element(group, group + size);
  }
  TopIndices(scratch.group_scores, num_groups, config.topk_group, scratch.group_ids);
  std::fill_n(scratch.group_scores, num_groups, 0.0f);
  for (size_t i = 0; i < config.topk_group; ++i) scratch.group_scores[scratch.group_ids[i]] = 1.0f;
  for (size_t g = 0; g < num_groups; ++g) {
    if (scratch.group_scores[g] == 0)
      std::fill_n(scratch.choice + g * size, size, has_bias ? -kInfinity : 0.0f);
  }
}

// What the routing of one token works with.
struct Token {
  const TopKConfig& config;
  const TopKInputs& inputs;
  const float* logits;
  bool has_bias;
  const float* bias;  // of this token; null without one, and for one of zeros
  size_t index;
  const RoutingScratch& scratch;
  int32_t* ids;
  float* weights;

  size_t n() const { return config.num_experts; }
  size_t k() const { return config.NumRouted(); }
};

// Rules 1 to 4 of contract 2.3. With groups and a bias the scores are sigmoid whatever the config
// says.
void RouteByScores(const Token& token) {
  const TopKConfig& config = token.config;
  const RoutingScratch& scratch = token.scratch;
  const bool grouped = config.use_grouped_topk && config.num_expert_group > 1;
  const ScoringFunc scoring =
      config.use_grouped_topk && token.has_bias ? ScoringFunc::kSigmoid : config.scoring_func;
  const bool nan_first = config.sqrtsoftplus_log1p && scoring == ScoringFunc::kSqrtSoftplus;
  Score(config, scoring, token.logits, scratch.scores);
  ChoiceValues(scratch.scores, token.bias, token.n(), nan_first ? kInfinity : kNanRank,
               scratch.choice);
  if (grouped) LimitGroups(config, token.has_bias, scratch);
  TopIndices(scratch.choice, token.n(), token.k(), token.ids);
  Gather(scratch.scores, token.ids, token.k(), token.weights);
  if (!grouped) return;
  // An expert outside the kept groups is a filler without weight.
  const size_t size = token.n() / config.num_expert_group;
  for (size_t i = 0; i < token.k(); ++i) {
    if (scratch.group_scores[static_cast<size_t>(token.ids[i]) / size] == 0) token.weights[i] = 0;
  }
}

void ChooseByLogits(const Token& token) {
  ChoiceValues(token.logits, nullptr, token.n(), kNanRank, token.scratch.choice);
  TopIndices(token.scratch.choice, token.n(), token.k(), token.ids);
  Gather(token.logits, token.ids, token.k(), token.weights);
}

void RouteLlama4(const Token& token) {
  ChooseByLogits(token);
  std::transform(token.weights, token.weights + token.k(), token.weights, Sigmoid);
}

void RouteTopKThenSoftmax(const Token& token) {
  ChooseByLogits(token);
  if (token.config.renormalize) Softmax(token.weights, token.k(), token.weights);
}

void RouteGemma4(const Token& token) {
  ChooseByLogits(token);
  Softmax(token.weights, token.k(), token.weights);
  for (size_t i = 0; i < token.k(); ++i)
    token.weights[i] *= token.config.per_expert_scale[static_cast<size_t>(token.ids[i])];
}

void RouteCohere2(const Token& token) {
  Score(token.config, ScoringFunc::kSigmoid, token.logits, token.scratch.scores);
  ChoiceValues(token.scratch.scores, nullptr, token.n(), kNanRank, token.scratch.choice);
  TopIndices(token.scratch.choice, token.n(), token.k(), token.ids);
  Gather(token.scratch.scores, token.ids, token.k(), token.weights);
}

void RouteAfmoe(const Token& token) {
  const RoutingScratch& scratch = token.scratch;
  const bool in_logit = token.config.scoring_func == ScoringFunc::kSoftmax;
  const float* logits = token.logits;
  if (in_logit && token.bias != nullptr) {
    std::transform(logits, logits + token.n(), token.bias, scratch.choice, std::plus<>());
    logits = scratch.choice;
  }
  Score(token.config, token.config.scoring_func, logits, scratch.scores);
  ChoiceValues(scratch.scores, in_logit ? nullptr : token.bias, token.n(), kNanRank,
               scratch.choice);
  TopIndices(scratch.choice, token.n(), token.k(), token.ids);
  Gather(scratch.scores, token.ids, token.k(), token.weights);
}

void RouteGroupRouter(const Token& token) {
  const size_t num_groups = token.config.router_n_groups;
  const size_t size = token.n() / num_groups, per_group = token.k() / num_groups;
  Score(token.config, ScoringFunc::kSoftmax, token.logits, token.scratch.scores);
  ChoiceValues(token.scratch.scores, nullptr, token.n(), kNanRank, token.scratch.choice);
  for (size_t g = 0; g < num_groups; ++g) {
    int32_t* ids = token.ids + g * per_group;
    TopIndices(token.scratch.choice + g * size, size, per_group, ids);
    for (size_t i = 0; i < per_group; ++i) ids[i] += static_cast<int32_t>(g * size);
  }
  // Columns of all groups together in the common order.
  const float* choice = token.scratch.choice;
  std::sort(token.ids, token.ids + token.k(), [choice](int32_t a, int32_t b) {
    return choice[a] > choice[b] || (choice[a] == choice[b] && a < b);
  });
  Gather(token.scratch.scores, token.ids, token.k(), token.weights);
}

// Each round takes the largest logit and weighs it by a softmax over the logits that are close to
// it; the second round does without the first's expert. Source: the routing of the PhiMoE models.
void RouteSparsemixer(const Token& token) {
  const RoutingScratch& scratch = token.scratch;
  const float threshold = static_cast<float>(2 * token.config.jitter_eps);
  ChoiceValues(token.logits, nullptr, token.n(), kNanRank, scratch.choice);
  std::copy_n(token.logits, token.n(), scratch.logits);
  for (size_t round = 0; round < 2; ++round) {
    TopIndices(scratch.choice, token.n(), 1, token.ids + round);
    const auto best = static_cast<size_t>(token.ids[round]);
    const float max = scratch.logits[best];
    for (size_t e = 0; e < token.n(); ++e) {
      const float distance = (max - token.logits[e]) / std::max(std::abs(token.logits[e]), max);
      scratch.scores[e] = distance > threshold ? -kInfinity : scratch.logits[e];
    }
    Softmax(scratch.scores, token.n(), scratch.scores);
    token.weights[round] = scratch.scores[best];
    scratch.logits[best] = -kInfinity;
    scratch.choice[best] = -kInfinity;
  }
}

void RouteByHash(const Token& token) {
  const size_t vocabulary = token.config.tid2eid.size() / token.k();
  // Tokens that count were checked; the ids of padding may be anything.
  const int64_t input = token.inputs.input_ids[token.index];
  const size_t row =
      input < 0 || static_cast<size_t>(input) >= vocabulary ? 0 : static_cast<size_t>(input);
  std::copy_n(token.config.tid2eid.data() + row * token.k(), token.k(), token.ids);
  Score(token.config, token.config.scoring_func, token.logits, token.scratch.scores);
  Gather(token.scratch.scores, token.ids, token.k(), token.weights);
}

void RouteByFunction(const Token& token) {
  const CustomRoutingFunction& function = token.config.custom_routing_function;
  const float* hidden =
      token.inputs.hidden.rows == 0 ? nullptr : token.inputs.hidden.Row(token.index);
  function.route(function.state, hidden, token.logits, token.n(), token.k(),
                 token.config.renormalize, token.ids, token.weights);
  for (size_t i = 0; i < token.k(); ++i) {
    if (token.ids[i] < 0 || static_cast<size_t>(token.ids[i]) >= token.n()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the custom routing function gave token {} expert {} in column {}; "
                              "experts are 0 to {}",
                              token.index, token.ids[i], i, token.n() - 1));
    }
  }
}

// Contract 2.12: neighbouring slots go to neighbouring ranks.
void SimulateRoundRobin(const Token& token) {
  const size_t ranks = token.config.moe_ep_size, per_rank = token.n() / ranks;
  for (size_t i = 0; i < token.k(); ++i) {
    const size_t slot = token.index * token.k() + i + token.config.simulated_offset;
    token.ids[i] = static_cast<int32_t>(slot % ranks * per_rank + slot / ranks % per_rank);
  }
}

// A random base; the columns follow in steps that keep them distinct and spread them.
void SimulateUniform(const Token& token) {
  const size_t base = RandomBits(token.inputs.seed, token.index, 0) % token.n();
  const size_t step = token.n() / token.k();
  for (size_t i = 0; i < token.k(); ++i)
    token.ids[i] = static_cast<int32_t>((base + i * step) % token.n());
}

void Simulate(const Token& token) {
  if (token.config.simulated_routing == SimulatedRouting::kRoundRobin) {
    SimulateRoundRobin(token);
  } else {
    SimulateUniform(token);
  }
  std::fill_n(token.weights, token.k(), 1.0f / static_cast<float>(token.k()));
}

void RouteByPolicy(const Token& token) {
  switch (token.config.policy) {
    case RoutingPolicy::kScores: return RouteByScores(token);
    case RoutingPolicy::kLlama4: return RouteLlama4(token);
    case RoutingPolicy::kTopKThenSoftmax: return RouteTopKThenSoftmax(token);
    case RoutingPolicy::kPhimoeSparsemixer: return RouteSparsemixer(token);
    case RoutingPolicy::kCohere2Sigmoid: return RouteCohere2(token);
    case RoutingPolicy::kAfmoe: return RouteAfmoe(token);
    case RoutingPolicy::kGroupRouter: return RouteGroupRouter(token);
    case RoutingPolicy::kGemma4: return RouteGemma4(token);
    case RoutingPolicy::kHash: return RouteByHash(token);
    case RoutingPolicy::kFunction: return RouteByFunction(token);
  }
}

}  // namespace

void RouteToken(const TopKConfig& config, const TopKInputs& inputs, const float* logits,
                size_t token, const RoutingScratch& scratch, int32_t* ids, float* weights) {
  const float* bias = nullptr;
  if (!config.correction_bias.empty()) bias = config.correction_bias.data();
  if (inputs.dynamic_expert_bias.rows != 0) bias = inputs.dynamic_expert_bias.Row(token);
  const bool has_bias = bias != nullptr;
  if (inputs.placement != nullptr && inputs.placement->algorithm == DispatchAlgorithm::kFake) {
    for (size_t e = 0; e < config.num_experts; ++e)
      scratch.logits[e] = FakeLogit(inputs.seed, token, e);
    logits = scratch.logits;
    bias = nullptr;
  }
  const Token state{config, inputs, logits, has_bias, bias, token, scratch, ids, weights};
  const bool simulated = config.simulated_routing != SimulatedRouting::kNone;
  if (simulated) {
    Simulate(state);
  } else {
    RouteByPolicy(state);
  }
  const size_t k = config.NumRouted();
  if (!simulated && PolicyRenormalizes(config)) {
    float sum = 0;
    for (size_t i = 0; i < k; ++i) sum += weights[i];
    for (size_t i = 0; i < k; ++i) weights[i] /= sum + kRenormalizeEpsilon;
  }
  if (config.apply_routed_scaling_factor_on_output) {
    const float factor = static_cast<float>(config.routed_scaling_factor);
    for (size_t i = 0; i < k; ++i) weights[i] *= factor;
  }
}

}  // namespace switchyard::moe
