// The oracle: every policy once more in f64, by sorting all experts and with vectors, without the
// fast path's selection.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "moe/routing/columns.h"
#include "moe/routing/policies.h"
#include "moe/routing/random.h"
#include "moe/routing/validate.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

using Values = std::vector<double>;
using Ids = std::vector<int32_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Values SoftmaxOf(const Values& logits) {
  double max = -kInfinity;
  for (double l : logits) max = std::max(max, l);
  Values scores;
  for (double l : logits) scores.push_back(std::exp(l - max));
  const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
  for (double& s : scores) s /= sum;
  return scores;
}

double SigmoidOf(double x) { return 1 / (1 + std::exp(-x)); }

double SqrtSoftplusOf(double x, bool log1p_form) {
  if (log1p_form) return std::sqrt(x > kSoftplusLinear ? x : std::log1p(std::exp(x)));
  return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
}

Values ScoresOf(const TopKConfig& config, ScoringFunc scoring, Values logits) {
  const double cap = config.router_logit_softcap;
  switch (scoring) {
    case ScoringFunc::kSoftmax:
      if (cap != 0)
        for (double& l : logits) l = cap * std::tanh(l / cap);
      return SoftmaxOf(logits);
    case ScoringFunc::kSigmoid:
      for (double& l : logits) l = SigmoidOf(l);
      return logits;
    case ScoringFunc::kSqrtSoftplus:
      for (double& l : logits) l = SqrtSoftplusOf(l, config.sqrtsoftplus_log1p);
      return logits;
  }
  return logits;
}

// All indices, best first; NaN counts as nan_rank.
Ids Ranking(Values values, double nan_rank = kNanRank) {
  for (double& v : values)
    if (std::isnan(v)) v = nan_rank;
  Ids order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

Ids Best(const Values& values, size_t k, double nan_rank = kNanRank) {
  Ids order = Ranking(values, nan_rank);
  order.resize(k);
  return order;
}

Values Pick(const Values& values, const Ids& ids) {
  Values picked;
  for (int32_t id : ids) picked.push_back(values[static_cast<size_t>(id)]);
  return picked;
}

Values Sum(Values a, const Values& b) {
  if (!b.empty()) std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::plus<>());
  return a;
}

// The routed columns of one token, before renormalisation.
struct Row {
  Ids ids;
  Values weights;
};

// One token of one call, widened.
struct TokenValues {
  const TopKConfig& config;
  Values logits;
  Values bias;  // empty without one
  size_t k;
};

double GroupScore(const TopKConfig& config, bool has_bias, Values group) {
  std::sort(group.begin(), group.end(), std::greater<>());
  const bool top_two = config.group_score_rule == GroupScoreRule::kTopTwoSum ||
                       (config.group_score_rule == GroupScoreRule::kAuto && has_bias);
  if (!top_two || group.size() == 1) return group[0];
  const double sum = group[0] + group[1];
  return std::isnan(sum) ? group[0] : sum;
}

Row ScoresRow(const TokenValues& token) {
  const TopKConfig& config = token.config;
  const bool has_bias = !token.bias.empty();
  const ScoringFunc scoring =
      config.use_grouped_topk && has_bias ? ScoringFunc::kSigmoid : config.scoring_func;
  const Values scores = ScoresOf(config, scoring, token.logits);
  Values choice = Sum(scores, token.bias);
  const double nan_rank = config.sqrtsoftplus_log1p ? kInfinity : double{kNanRank};
  for (double& c : choice)
    if (std::isnan(c)) c = nan_rank;
  Values weights = scores;
  if (config.use_grouped_topk) {
    const size_t size = config.num_experts / config.num_expert_group;
    Values group_scores;
    for (size_t g = 0; g < config.num_expert_group; ++g) {
      const auto first = choice.begin() + static_cast<std::ptrdiff_t>(g * size);
      group_scores.push_back(
          GroupScore(config, has_bias, Values(first, first + static_cast<std::ptrdiff_t>(size))));
    }
    const Ids kept = Best(group_scores, config.topk_group);
    for (size_t e = 0; e < config.num_experts; ++e) {
      if (std::count(kept.begin(), kept.end(), static_cast<int32_t>(e / size)) != 0) continue;
      choice[e] = has_bias ? -kInfinity : 0.0;
      weights[e] = 0;
    }
  }
  const Ids ids = Best(choice, token.k, nan_rank);
  return {ids, Pick(weights, ids)};
}

Row LogitsRow(const TokenValues& token) {
  const Ids ids = Best(token.logits, token.k);
  Values weights = Pick(token.logits, ids);
  if (token.config.policy == RoutingPolicy::kLlama4) {
    for (double& w : weights) w = SigmoidOf(w);
  } else if (token.config.policy == RoutingPolicy::kGemma4 || token.config.renormalize) {
    weights = SoftmaxOf(weights);
  }
  if (token.config.policy == RoutingPolicy::kGemma4) {
    for (size_t i = 0; i < ids.size(); ++i)
      weights[i] *= token.config.per_expert_scale[static_cast<size_t>(ids[i])];
  }
  return {ids, weights};
}

Row AfmoeRow(const TokenValues& token) {
  const bool in_logit = token.config.scoring_func == ScoringFunc::kSoftmax;
  const Values logits = in_logit ? Sum(token.logits, token.bias) : token.logits;
  const Values scores = ScoresOf(token.config, token.config.scoring_func, logits);
  const Ids ids = Best(in_logit ? scores : Sum(scores, token.bias), token.k);
  return {ids, Pick(scores, ids)};
}

Row GroupRouterRow(const TokenValues& token) {
  const size_t groups = token.config.router_n_groups;
  const size_t size = token.config.num_experts / groups;
  const Values scores = ScoresOf(token.config, ScoringFunc::kSoftmax, token.logits);
  // Walk all experts, best first, and take what its group still has room for.
  std::vector<size_t> room(groups, token.k / groups);
  Ids ids;
  for (int32_t e : Ranking(scores)) {
    size_t& left = room[static_cast<size_t>(e) / size];
    if (left == 0) continue;
    --left;
    ids.push_back(e);
  }
  return {ids, Pick(scores, ids)};
}

Row SparsemixerRow(const TokenValues& token) {
  Row row;
  Values ranked = token.logits;  // NaN ranks low, and a chosen expert below everything
  for (double& r : ranked)
    if (std::isnan(r)) r = kNanRank;
  Values left = token.logits;
  for (size_t round = 0; round < 2; ++round) {
    const auto best = static_cast<size_t>(Ranking(ranked)[0]);
    const double max = left[best];
    Values close = left;
    for (size_t e = 0; e < close.size(); ++e) {
      const double l = token.logits[e];
      if ((max - l) / std::max(std::abs(l), max) > 2 * token.config.jitter_eps)
        close[e] = -kInfinity;
    }
    row.ids.push_back(static_cast<int32_t>(best));
    row.weights.push_back(SoftmaxOf(close)[best]);
    left[best] = ranked[best] = -kInfinity;
  }
  return row;
}

Row HashRow(const TokenValues& token, int64_t input_id) {
  const size_t vocabulary = token.config.tid2eid.size() / token.k;
  const bool known = input_id >= 0 && static_cast<size_t>(input_id) < vocabulary;
  const auto table =
      token.config.tid2eid.subspan((known ? static_cast<size_t>(input_id) : 0) * token.k, token.k);
  const Ids ids(table.begin(), table.end());
  return {ids, Pick(ScoresOf(token.config, token.config.scoring_func, token.logits), ids)};
}

Row FunctionRow(const TokenValues& token, const float* hidden, const float* logits) {
  Ids ids(token.k);
  std::vector<float> weights(token.k);
  const CustomRoutingFunction& function = token.config.custom_routing_function;
  function.route(function.state, hidden, logits, token.config.num_experts, token.k,
                 token.config.renormalize, ids.data(), weights.data());
  return {ids, Values(weights.begin(), weights.end())};
}

Row SimulatedRow(const TopKConfig& config, const TopKInputs& inputs, size_t t) {
  Row row;
  const size_t k = config.NumRouted(), experts = config.num_experts;
  row.weights.assign(k, 1.0 / static_cast<double>(k));
  const size_t ranks = config.moe_ep_size;
  for (size_t i = 0; i < k; ++i) {
    const size_t slot = t * k + i + config.simulated_offset;
    const size_t robin = slot % ranks * (experts / ranks) + slot / ranks % (experts / ranks);
    const size_t uniform = (RandomBits(inputs.seed, t, 0) + i * (experts / k)) % experts;
    row.ids.push_back(static_cast<int32_t>(
        config.simulated_routing == SimulatedRouting::kRoundRobin ? robin : uniform));
  }
  return row;
}

TokenValues Widen(const TopKConfig& config, const TopKInputs& inputs, ConstRows logits, size_t t) {
  const std::span<const float> row = logits.RowSpan(t);
  TokenValues token{config, Values(row.begin(), row.end()), {}, config.NumRouted()};
  if (!config.correction_bias.empty())
    token.bias.assign(config.correction_bias.begin(), config.correction_bias.end());
  if (inputs.dynamic_expert_bias.rows != 0) {
    const std::span<const float> bias = inputs.dynamic_expert_bias.RowSpan(t);
    token.bias.assign(bias.begin(), bias.end());
  }
  if (inputs.placement != nullptr && inputs.placement->algorithm == DispatchAlgorithm::kFake) {
    for (size_t e = 0; e < config.num_experts; ++e) token.logits[e] = FakeLogit(inputs.seed, t, e);
    std::fill(token.bias.begin(), token.bias.end(), 0.0);
  }
  return token;
}

Row RowOf(const TokenValues& token, const TopKInputs& inputs, ConstRows logits, size_t t) {
  const TopKConfig& config = token.config;
  switch (config.policy) {
    case RoutingPolicy::kScores: return ScoresRow(token);
    case RoutingPolicy::kLlama4:
    case RoutingPolicy::kTopKThenSoftmax:
    case RoutingPolicy::kGemma4: return LogitsRow(token);
    case RoutingPolicy::kPhimoeSparsemixer: return SparsemixerRow(token);
    case RoutingPolicy::kCohere2Sigmoid: {
      const Values scores = ScoresOf(config, ScoringFunc::kSigmoid, token.logits);
      const Ids ids = Best(scores, token.k);
      return {ids, Pick(scores, ids)};
    }
    case RoutingPolicy::kAfmoe: return AfmoeRow(token);
    case RoutingPolicy::kGroupRouter: return GroupRouterRow(token);
    case RoutingPolicy::kHash: return HashRow(token, inputs.input_ids[t]);
    case RoutingPolicy::kFunction:
      return FunctionRow(token, inputs.hidden.rows == 0 ? nullptr : inputs.hidden.Row(t),
                         logits.Row(t));
  }
  return {};
}

void Weigh(const TopKConfig& config, Values& weights) {
  if (config.simulated_routing == SimulatedRouting::kNone && PolicyRenormalizes(config)) {
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (double& w : weights) w /= sum + double{kRenormalizeEpsilon};
  }
  if (config.apply_routed_scaling_factor_on_output)
    for (double& w : weights) w *= config.routed_scaling_factor;
}

// Physical ids and shared columns.
void AddColumns(const TopKConfig& config, const TopKInputs& inputs, size_t t, Row& row) {
  PlaceIds(config, inputs, t, row.ids.data());
  const size_t shared = config.num_fused_shared_experts;
  if (shared == 0) return;
  const size_t num_physical = NumPhysical(config, inputs);
  if (config.shared_layout == SharedLayout::kPerRank) {
    const auto block = static_cast<int32_t>(num_physical / config.moe_ep_size);
    for (int32_t& id : row.ids) id += id / block * static_cast<int32_t>(shared);
  }
  for (size_t j = 0; j < shared; ++j) {
    row.ids.push_back(SharedId(config, num_physical, j));
    row.weights.push_back(SharedWeight(config));
  }
}

}  // namespace

ReferenceRouting SelectExpertsReference(const TopKConfig& config, ConstRows logits,
                                        const TopKInputs& inputs) {
  CheckInputs(config, logits, inputs);
  ReferenceRouting routing;
  for (size_t t = 0; t < logits.rows; ++t) {
    const bool is_padding = t >= inputs.num_token_non_padded;
    Row row;
    if (is_padding && config.padding != PaddingFamily::kAscend) {
      row.ids.assign(config.top_k, config.padding == PaddingFamily::kHipAiter ? 0 : -1);
      row.weights.assign(config.top_k, 0.0);
    } else {
      row = config.simulated_routing != SimulatedRouting::kNone
                ? SimulatedRow(config, inputs, t)
                : RowOf(Widen(config, inputs, logits, t), inputs, logits, t);
      Weigh(config, row.weights);
      AddColumns(config, inputs, t, row);
      if (is_padding) row.weights.assign(config.top_k, 0.0);
    }
    routing.ids.insert(routing.ids.end(), row.ids.begin(), row.ids.end());
    routing.weights.insert(routing.weights.end(), row.weights.begin(), row.weights.end());
  }
  return routing;
}

void SelectExpertsReference(const TopKConfig& config, const float* logits, int32_t* ids,
                            double* weights) {
  const ReferenceRouting routing =
      SelectExpertsReference(config, ConstRows(logits, 1, config.num_experts), TopKInputs{});
  std::copy(routing.ids.begin(), routing.ids.end(), ids);
  std::copy(routing.weights.begin(), routing.weights.end(), weights);
}

}  // namespace switchyard::moe
