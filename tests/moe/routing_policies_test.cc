// Contract 2.2 to 2.12: every policy against the f64 oracle, and what is special to groups, shared
// columns, placement, padding, simulated routing and custom functions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "moe/routing_case.h"
#include "switchyard/moe/routing/routing_method.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

LogitRows RandomRows(std::mt19937_64& random, size_t tokens, size_t experts, float scale = 2.0f) {
  LogitRows rows;
  for (size_t t = 0; t < tokens; ++t) rows.push_back(testing::RandomFloats(random, experts, scale));
  return rows;
}

// The custom function of these tests: experts 0, 1, …, weights from the first hidden value.
void FirstExperts(const void* state, const float* hidden, const float* /*logits*/,
                  size_t /*num_experts*/, size_t k, bool /*renormalize*/, int32_t* ids,
                  float* weights) {
  const int32_t first = *static_cast<const int32_t*>(state);
  for (size_t i = 0; i < k; ++i) {
    ids[i] = first + static_cast<int32_t>(i);
    weights[i] = hidden == nullptr ? 1.0f : hidden[0];
  }
}

// A config of every policy, 48 experts, and what it refers to.
class AllPolicies {
 public:
  static constexpr size_t kExperts = 48;
  static constexpr size_t kTokens = 21;

  explicit AllPolicies(std::mt19937_64& random)
      : bias_(testing::RandomFloats(random, kExperts, 0.1f)),
        scale_(testing::RandomFloats(random, kExperts)),
        token_bias_(testing::RandomFloats(random, kTokens * kExperts, 0.1f)),
        table_(DefaultHashTable(100, 4, kExperts)) {
    for (size_t t = 0; t < kTokens; ++t) input_ids_.push_back(static_cast<int64_t>(t * 4 % 100));
    inputs_.input_ids = input_ids_;
    for (ScoringFunc scoring :
         {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
      AddScores(RouterConfig(kExperts, 4, scoring));
      AddScores(RouterConfig(kExperts, 4, scoring, false));
    }
    TopKConfig config = RouterConfig(kExperts, 4, ScoringFunc::kSqrtSoftplus);
    config.sqrtsoftplus_log1p = true;
    configs_.push_back(config);
    config = RouterConfig(kExperts, 4);
    config.router_logit_softcap = 3;
    configs_.push_back(config);
    AddSpecial();
  }

  const std::vector<TopKConfig>& configs() const { return configs_; }
  TopKInputs inputs() const { return inputs_; }
  ConstRows token_bias() const { return ConstRows(token_bias_.data(), kTokens, kExperts); }

 private:
  void Add(TopKConfig config, RoutingPolicy policy) {
    config.policy = policy;
    configs_.push_back(config);
  }

  // Ungrouped and under every group rule, with and without a bias.
  void AddScores(TopKConfig config) {
    for (bool with_bias : {false, true}) {
      if (with_bias) config.correction_bias = bias_;
      config.use_grouped_topk = false;
      config.num_expert_group = config.topk_group = 0;
      configs_.push_back(config);
      config.use_grouped_topk = true;
      for (size_t groups : {1u, 6u, 24u}) {
        config.num_expert_group = groups;
        config.topk_group = std::min<size_t>(groups, 3);
        for (GroupScoreRule rule :
             {GroupScoreRule::kAuto, GroupScoreRule::kMax, GroupScoreRule::kTopTwoSum}) {
          config.group_score_rule = rule;
          configs_.push_back(config);
        }
      }
      config.group_score_rule = GroupScoreRule::kAuto;
    }
  }

  void AddSpecial() {
    Add(RouterConfig(kExperts, 1), RoutingPolicy::kLlama4);
    Add(RouterConfig(kExperts, 4), RoutingPolicy::kTopKThenSoftmax);
    Add(RouterConfig(kExperts, 4, ScoringFunc::kSoftmax, false), RoutingPolicy::kTopKThenSoftmax);
    Add(RouterConfig(kExperts, 2), RoutingPolicy::kPhimoeSparsemixer);
    Add(RouterConfig(kExperts, 5), RoutingPolicy::kCohere2Sigmoid);
    for (ScoringFunc scoring : {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid}) {
      TopKConfig config = RouterConfig(kExperts, 6, scoring);
      Add(config, RoutingPolicy::kAfmoe);
      config.correction_bias = bias_;
      Add(config, RoutingPolicy::kAfmoe);
    }
    TopKConfig config = RouterConfig(kExperts, 6);
    config.router_n_groups = 3;
    Add(config, RoutingPolicy::kGroupRouter);
    config = RouterConfig(kExperts, 4);
    config.per_expert_scale = scale_;
    Add(config, RoutingPolicy::kGemma4);
    for (ScoringFunc scoring :
         {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
      config = RouterConfig(kExperts, 4, scoring);
      config.tid2eid = table_;
      Add(config, RoutingPolicy::kHash);
    }
    config = RouterConfig(kExperts, 4);
    config.custom_routing_function = {FirstExperts, &first_};
    Add(config, RoutingPolicy::kFunction);
    for (SimulatedRouting simulated : {SimulatedRouting::kRoundRobin, SimulatedRouting::kUniform}) {
      config = RouterConfig(kExperts, 7);
      config.simulated_routing = simulated;
      config.moe_ep_size = 4;
      configs_.push_back(config);
    }
  }

  std::vector<float> bias_, scale_, token_bias_;
  std::vector<int32_t> table_;
  std::vector<int64_t> input_ids_;
  int32_t first_ = 3;
  std::vector<TopKConfig> configs_;
  TopKInputs inputs_;
};

TEST(RoutingPolicies, AllAgreeWithTheOracle) {
  auto random = testing::MakeRandom(33);
  const AllPolicies policies(random);
  size_t rows = 0, other_choices = 0;
  for (TopKConfig config : policies.configs()) {
    ValidateTopK(config);
    config.routed_scaling_factor = 2.5;
    config.apply_routed_scaling_factor_on_output = random() % 2 == 0;
    const LogitRows logits = RandomRows(random, AllPolicies::kTokens, AllPolicies::kExperts);
    const std::vector<float> flat = Flatten(logits);
    const Routing routing = Select(config, logits, policies.inputs(), 2);
    const ReferenceRouting expected = SelectExpertsReference(
        config, ConstRows(flat.data(), logits.size(), config.num_experts), policies.inputs());
    for (size_t t = 0; t < logits.size(); ++t, ++rows) {
      const auto first = expected.ids.begin() + static_cast<std::ptrdiff_t>(t * config.top_k);
      const std::vector<int32_t> ids(first, first + static_cast<std::ptrdiff_t>(config.top_k));
      ASSERT_TRUE(AreDistinct(routing.ids[t]));
      if (routing.ids[t] != ids) {
        ++other_choices;  // f32 cannot tell two scores apart
        continue;
      }
      for (size_t k = 0; k < config.top_k; ++k) {
        const double weight = expected.weights[t * config.top_k + k];
        ASSERT_NEAR(routing.weights[t][k], weight, 2e-5 * std::abs(weight) + 1e-7)
            << RoutingPolicyName(config.policy) << " " << ScoringFuncName(config.scoring_func);
      }
    }
  }
  EXPECT_GT(rows, 1000u);
  EXPECT_LE(other_choices, rows / 200);
}

TEST(RoutingPolicies, BitsDependOnTheRowAlone) {
  auto random = testing::MakeRandom(34);
  const AllPolicies policies(random);
  const LogitRows logits = RandomRows(random, AllPolicies::kTokens, AllPolicies::kExperts);
  for (const TopKConfig& config : policies.configs()) {
    const Routing one = Select(config, logits, policies.inputs(), 1);
    const Routing three = Select(config, logits, policies.inputs(), 3);
    EXPECT_EQ(one.ids, three.ids);
    EXPECT_EQ(one.weights, three.weights);
  }
}

TEST(RoutingPolicies, AnyLogitsGiveDistinctIdsInRange) {
  auto random = testing::MakeRandom(35);
  const AllPolicies policies(random);
  constexpr float kValues[] = {kNan, kInf, -kInf, 0.0f, 3e38f, -3e38f, 88.0f, -104.0f};
  for (int round = 0; round < 20; ++round) {
    LogitRows logits(AllPolicies::kTokens, std::vector<float>(AllPolicies::kExperts));
    const size_t kinds = 1 + random() % std::size(kValues);
    for (auto& row : logits)
      for (float& l : row) l = kValues[random() % kinds];
    for (const TopKConfig& config : policies.configs()) {
      const Routing routing = Select(config, logits, policies.inputs());
      for (const auto& ids : routing.ids) {
        ASSERT_TRUE(AreDistinct(ids)) << RoutingPolicyName(config.policy);
        for (int32_t id : ids) {
          ASSERT_GE(id, 0);
          ASSERT_LT(id, static_cast<int32_t>(AllPolicies::kExperts));
        }
      }
    }
  }
}

TEST(RoutingPolicies, NoTokensAndAWarmCallAllocateNothing) {
  auto random = testing::MakeRandom(36);
  const AllPolicies policies(random);
  ThreadPool pool(2);
  Arena arena;
  ExecContext context{pool, arena};
  const std::vector<float> flat =
      Flatten(RandomRows(random, AllPolicies::kTokens, AllPolicies::kExperts));
  for (const TopKConfig& config : policies.configs()) {
    EXPECT_EQ(SelectExperts(context, config, ConstRows(), policies.inputs()).ids.size(), 0u);
    const ConstRows logits(flat.data(), AllPolicies::kTokens, config.num_experts);
    SelectExperts(context, config, logits, policies.inputs());
    arena.Reset();
    const size_t before = arena.num_system_allocations();
    SelectExperts(context, config, logits, policies.inputs());
    EXPECT_EQ(arena.num_system_allocations(), before);
    arena.Reset();
  }
}

TEST(RoutingPolicies, OneExpert) {
  for (ScoringFunc scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    TopKConfig config = RouterConfig(1, 1, scoring);
    config.use_grouped_topk = true;
    config.num_expert_group = config.topk_group = 1;
    ValidateTopK(config);
    const Routing routing = Select(config, {{0.5f}});
    EXPECT_EQ(routing.ids[0][0], 0);
    EXPECT_FLOAT_EQ(routing.weights[0][0], 1.0f);
  }
}

TEST(RoutingPolicies, TheSoftcapBendsLogits) {
  TopKConfig config = RouterConfig(3, 3, ScoringFunc::kSoftmax, false);
  config.router_logit_softcap = 2;
  const Routing routing = Select(config, {{100.0f, 0.0f, -100.0f}});
  const double top = std::exp(2.0), mid = 1, low = std::exp(-2.0), sum = top + mid + low;
  EXPECT_NEAR(routing.weights[0][0], top / sum, 1e-6);
  EXPECT_NEAR(routing.weights[0][1], mid / sum, 1e-6);
  EXPECT_NEAR(routing.weights[0][2], low / sum, 1e-6);
}

TEST(RoutingPolicies, TheLog1pVariantRanksNanFirst) {  // contract 2.4
  TopKConfig config = RouterConfig(4, 2, ScoringFunc::kSqrtSoftplus);
  EXPECT_EQ(Select(config, {{1, kNan, 2, 3}}).ids[0], (std::vector<int32_t>{3, 2}));
  config.sqrtsoftplus_log1p = true;
  EXPECT_EQ(Select(config, {{1, kNan, 2, 3}}).ids[0], (std::vector<int32_t>{1, 3}));
  const Routing plain = Select(config, {{30, -40, -1, 20.5f}});
  EXPECT_FLOAT_EQ(plain.weights[0][0] / plain.weights[0][1], std::sqrt(30.0f / 20.5f));
}

TEST(RoutingPolicies, SparsemixerWeighsAmongNearLogits) {
  TopKConfig config = RouterConfig(4, 2);
  config.policy = RoutingPolicy::kPhimoeSparsemixer;
  config.jitter_eps = 0.01;
  // 9.9 is within 2 % of 10, 5 and 4.95 are not.
  const Routing routing = Select(config, {{5.0f, 10.0f, 9.9f, 4.95f}});
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{1, 2}));
  EXPECT_NEAR(routing.weights[0][0], 1 / (1 + std::exp(-0.1)), 1e-6);
  EXPECT_NEAR(routing.weights[0][1], 1.0, 1e-6);
}

// ---- groups

TopKConfig Grouped(size_t experts, size_t top_k, size_t groups, size_t kept,
                   ScoringFunc scoring = ScoringFunc::kSigmoid) {
  TopKConfig config = RouterConfig(experts, top_k, scoring, false);
  config.use_grouped_topk = true;
  config.num_expert_group = groups;
  config.topk_group = kept;
  return config;
}

TEST(RoutingGroups, TheRuleDecidesBetweenOneGoodAndTwoFairExperts) {
  const std::vector<std::vector<float>> logits = {{3.0f, -9.0f, 1.0f, 1.0f}};
  TopKConfig config = Grouped(4, 2, 2, 1);
  EXPECT_EQ(Select(config, logits).ids[0], (std::vector<int32_t>{0, 1}))
      << "largest without a bias";
  config.group_score_rule = GroupScoreRule::kTopTwoSum;
  EXPECT_EQ(Select(config, logits).ids[0], (std::vector<int32_t>{2, 3}));
  const std::vector<float> zero(4, 0.0f);
  config.correction_bias = zero;
  config.group_score_rule = GroupScoreRule::kAuto;
  EXPECT_EQ(Select(config, logits).ids[0], (std::vector<int32_t>{2, 3})) << "sum with a bias";
  config.group_score_rule = GroupScoreRule::kMax;
  EXPECT_EQ(Select(config, logits).ids[0], (std::vector<int32_t>{0, 1}));
}

TEST(RoutingGroups, TheTwoBestOfAGroupMayTie) {  // contract 2.3, second trap
  const std::vector<float> zero(4, 0.0f);
  TopKConfig config = Grouped(4, 2, 2, 1);
  config.correction_bias = zero;
  EXPECT_EQ(Select(config, {{1.2f, 0.0f, 1.0f, 1.0f}}).ids[0], (std::vector<int32_t>{2, 3}));
}

TEST(RoutingGroups, WithABiasScoresAreSigmoid) {
  const std::vector<float> zero(4, 0.0f);
  TopKConfig config = Grouped(4, 2, 2, 1, ScoringFunc::kSoftmax);
  config.correction_bias = zero;
  const Routing routing = Select(config, {{1.0f, 0.5f, -1.0f, 0.0f}});
  EXPECT_NEAR(routing.weights[0][0], 1 / (1 + std::exp(-1.0)), 1e-6);
}

TEST(RoutingGroups, OneGroupIsNoGroup) {
  auto random = testing::MakeRandom(37);
  const std::vector<float> bias = testing::RandomFloats(random, 12, 0.2f);
  TopKConfig config = Grouped(12, 5, 1, 1);
  config.correction_bias = bias;
  TopKConfig flat = RouterConfig(12, 5, ScoringFunc::kSigmoid, false);
  flat.correction_bias = bias;
  const LogitRows logits = RandomRows(random, 30, 12);
  EXPECT_EQ(Select(config, logits).ids, Select(flat, logits).ids);
  EXPECT_EQ(Select(config, logits).weights, Select(flat, logits).weights);
}

TEST(RoutingGroups, EqualGroupsGoToTheLower) {
  TopKConfig config = Grouped(8, 4, 4, 2);
  EXPECT_EQ(Select(config, {std::vector<float>(8, 0.5f)}).ids[0],
            (std::vector<int32_t>{0, 1, 2, 3}));
}

TEST(RoutingGroups, FillersWithoutABiasHaveNoWeight) {  // contract 2.5, last point
  TopKConfig config = Grouped(6, 4, 3, 1);
  ValidateTopK(config);
  const Routing routing = Select(config, {{0, 0, 2, 1, 0, 0}});
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{2, 3, 0, 1}));
  EXPECT_EQ(routing.weights[0][2], 0.0f);
  EXPECT_EQ(routing.weights[0][3], 0.0f);
  const std::vector<float> bias(6, 0.0f);
  config.correction_bias = bias;
  ExpectError(ErrorCode::kInvalidArgument, {"4 routed columns", "2 experts survive", "topk_group"},
              [&] { ValidateTopK(config); });
  config.topk_group = 2;
  ValidateTopK(config);
}

// ---- shared columns, placement, padding

TEST(RoutingShared, GlobalSlotsFollowAllPhysicalExperts) {
  TopKConfig config = RouterConfig(4, 4);
  config.num_fused_shared_experts = 2;
  config.routed_scaling_factor = 2.5;
  config.fused_shared_experts_scaling_factor = 0.25;
  ValidateTopK(config);
  const LogitRows logits = {{1, 2, 3, 4}};
  Routing routing = Select(config, logits);
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{3, 2, 4, 5}));
  EXPECT_NEAR(routing.weights[0][0] + routing.weights[0][1], 1.0, 1e-6) << "routed columns only";
  EXPECT_FLOAT_EQ(routing.weights[0][2], 0.1f);
  EXPECT_FLOAT_EQ(routing.weights[0][3], 0.1f);
  config.apply_routed_scaling_factor_on_output = true;
  routing = Select(config, logits);
  EXPECT_NEAR(routing.weights[0][0] + routing.weights[0][1], 2.5, 1e-5);
  EXPECT_FLOAT_EQ(routing.weights[0][2], 0.25f) << "the factor is in the routed weights already";

  const std::vector<int32_t> rank_map = {0, 5, 2, 3};
  ExpertPlacement placement;
  placement.algorithm = DispatchAlgorithm::kStatic;
  placement.num_physical = 6;
  placement.rank_map = rank_map;
  TopKInputs inputs;
  inputs.placement = &placement;
  EXPECT_EQ(Select(config, {{4, 5, 3, 1}}, inputs).ids[0], (std::vector<int32_t>{5, 0, 6, 7}));
}

TEST(RoutingShared, PerRankSlotsShiftRoutedIds) {
  TopKConfig config = RouterConfig(6, 4);
  config.num_fused_shared_experts = 2;
  config.shared_layout = SharedLayout::kPerRank;
  config.moe_ep_size = 3;
  config.moe_ep_rank = 1;
  ValidateTopK(config);
  // Rank r owns [4r, 4r + 2) and its shared slots [4r + 2, 4r + 4).
  const Routing routing =
      Select(config, {{0, 1, 0, 0, 0, 2}, {9, 0, 0, 8, 0, 0}, {1, 2, 3, 4, 5, 6}}, 2);
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{9, 1, 6, 7}));
  EXPECT_EQ(routing.ids[1], (std::vector<int32_t>{0, 5, 6, 7}));
  EXPECT_EQ(routing.ids[2], (std::vector<int32_t>{-1, -1, -1, -1})) << "masked after the shift";
  TopKConfig odd = config;
  odd.moe_ep_size = 4;
  ExpectError(ErrorCode::kInvalidArgument, {"physical experts", "multiple of 4", "6"}, [&] {
    Select(odd, {{0, 1, 0, 0, 0, 2}});
  });
}

// Six logical experts on nine physical ones; expert e has replicas e, and 6 + e if e < 3.
struct SixOnNine {
  SixOnNine() {
    placement.num_physical = 9;
    placement.max_replicas = 2;
    placement.all_physical = all;
    placement.num_valid = counts;
    placement.rank_map = rank_map;
    inputs.placement = &placement;
  }
  std::vector<int32_t> all = {0, 6, 1, 7, 2, 8, 3, -1, 4, -1, 5, -1};
  std::vector<int32_t> counts = {2, 2, 2, 1, 1, 1};
  std::vector<int32_t> rank_map = {6, 1, 8, 3, 4, 5};
  ExpertPlacement placement;
  TopKInputs inputs;
};

TEST(RoutingPlacement, AlgorithmsPickReplicas) {
  SixOnNine six;
  const TopKConfig config = RouterConfig(6, 3);
  const LogitRows logits(40, {9, 8, 0, 7, 0, 0});
  six.placement.algorithm = DispatchAlgorithm::kStatic;
  ValidatePlacement(six.placement, 6);
  EXPECT_EQ(Select(config, logits, six.inputs).ids[0], (std::vector<int32_t>{6, 1, 3}));

  six.placement.algorithm = DispatchAlgorithm::kDynamicByRow;
  Routing routing = Select(config, logits, six.inputs);
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(routing.ids[1], (std::vector<int32_t>{6, 7, 3}));

  six.placement.algorithm = DispatchAlgorithm::kDynamic;
  six.inputs.seed = 5;
  routing = Select(config, logits, six.inputs, 3);
  EXPECT_EQ(routing.ids, Select(config, logits, six.inputs, 1).ids);
  std::set<int32_t> used;
  for (const auto& ids : routing.ids) {
    used.insert(ids.begin(), ids.end());
    EXPECT_EQ(ids[0] % 6, 0);
    EXPECT_EQ(ids[1] % 6, 1);
    EXPECT_EQ(ids[2], 3);
  }
  EXPECT_EQ(used, (std::set<int32_t>{0, 6, 1, 7, 3})) << "both replicas are used";
  six.inputs.seed = 6;
  EXPECT_NE(routing.ids, Select(config, logits, six.inputs).ids);
}

TEST(RoutingPlacement, FakeIgnoresTheLogits) {
  SixOnNine six;
  six.placement.algorithm = DispatchAlgorithm::kFake;
  const std::vector<float> bias = {100, 0, 0, 0, 0, 0};
  TopKConfig config = RouterConfig(6, 1, ScoringFunc::kSigmoid);
  config.correction_bias = bias;
  const Routing routing = Select(config, LogitRows(200, {90, 0, 0, 0, 0, 0}), six.inputs);
  std::set<int32_t> used;
  for (const auto& ids : routing.ids) used.insert(ids[0]);
  EXPECT_EQ(used.size(), 9u) << "neither logits nor bias count, all replicas occur";
}

TEST(RoutingPlacement, MinusOneNeverIndexesAMap) {
  SixOnNine six;
  six.placement.algorithm = DispatchAlgorithm::kStatic;
  six.inputs.num_token_non_padded = 1;
  TopKConfig config = RouterConfig(6, 2);
  const LogitRows logits(3, {9, 0, 8, 0, 0, 0});
  EXPECT_EQ(Select(config, logits, six.inputs).ids[2], (std::vector<int32_t>{-1, -1}));
  config.padding = PaddingFamily::kHipAiter;
  EXPECT_EQ(Select(config, logits, six.inputs).ids[2], (std::vector<int32_t>{0, 0}))
      << "0 as it is, not the replica of expert 0";
}

TEST(RoutingPlacement, RulesOfTheBackend) {  // contract 2.11
  using enum DispatchAlgorithm;
  EXPECT_EQ(DefaultDispatchAlgorithm("none"), kDynamicByRow);
  EXPECT_EQ(DefaultDispatchAlgorithm("deepep"), kStatic);
  EXPECT_EQ(ResolveDispatchAlgorithm(kDynamic, "none"), kDynamicByRow);
  EXPECT_EQ(ResolveDispatchAlgorithm(kStatic, "deepep"), kStatic);
  for (DispatchAlgorithm algorithm : {kStatic, kLp}) {
    ExpectError(ErrorCode::kInvalidArgument, {"none", DispatchAlgorithmName(algorithm), "dynamic"},
                [&] { ResolveDispatchAlgorithm(algorithm, "none"); });
  }
}

TEST(RoutingPlacement, BadMapsAreRefused) {
  const auto refuse = [](std::initializer_list<std::string_view> words, auto change,
                         DispatchAlgorithm algorithm = DispatchAlgorithm::kDynamic) {
    SixOnNine six;
    six.placement.algorithm = algorithm;
    ValidatePlacement(six.placement, 6);
    change(six);
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { ValidatePlacement(six.placement, 6); });
  };
  refuse({"num_valid", "expert 1", "1 to 2", "0"}, [](SixOnNine& six) { six.counts[1] = 0; });
  refuse({"num_valid", "expert 5", "3"}, [](SixOnNine& six) { six.counts[5] = 3; });
  refuse({"all_physical", "expert 3", "-1"}, [](SixOnNine& six) { six.counts[3] = 2; });
  refuse({"all_physical", "0 to 8", "9"}, [](SixOnNine& six) { six.all[1] = 9; });
  refuse(
      {"rank_map", "expert 2", "-1"}, [](SixOnNine& six) { six.rank_map[2] = -1; },
      DispatchAlgorithm::kStatic);
  refuse({"num_physical", "6", "5"}, [](SixOnNine& six) { six.placement.num_physical = 5; });
  refuse({"all_physical", "6 x 3"}, [](SixOnNine& six) { six.placement.max_replicas = 3; });
  SixOnNine six;
  six.placement.algorithm = DispatchAlgorithm::kLp;
  ExpectError(ErrorCode::kUnsupported, {"lp"}, [&] {
    Select(RouterConfig(6, 2), {{1, 2, 3, 4, 5, 6}}, six.inputs);
  });
  six.placement.algorithm = DispatchAlgorithm::kDynamic;
  ExpectError(ErrorCode::kInvalidArgument, {"placement", "6 logical", "4 experts"}, [&] {
    Select(RouterConfig(4, 2), {{1, 2, 3, 4}}, six.inputs);
  });
  EXPECT_EQ(Select(RouterConfig(6, 2), {{1, 2, 3, 4, 5, 6}}, six.inputs).ids[0].size(), 2u);
}

TEST(RoutingPadding, Families) {  // contract 2.10
  TopKConfig config = RouterConfig(4, 3);
  config.num_fused_shared_experts = 1;
  const LogitRows logits = {{1, 2, 3, 4}, {kNan, 1, kNan, 2}};
  EXPECT_EQ(Select(config, logits, 1).ids[1], (std::vector<int32_t>{-1, -1, -1}));
  config.padding = PaddingFamily::kHipAiter;
  EXPECT_EQ(Select(config, logits, 1).ids[1], (std::vector<int32_t>{0, 0, 0}));
  config.padding = PaddingFamily::kAscend;
  const Routing ascend = Select(config, logits, 1);
  EXPECT_TRUE(AreDistinct(ascend.ids[1]));
  for (int32_t id : ascend.ids[1]) EXPECT_TRUE(id >= 0 && id <= 4) << id;
  for (PaddingFamily family :
       {PaddingFamily::kDefault, PaddingFamily::kHipAiter, PaddingFamily::kAscend}) {
    config.padding = family;
    const Routing routing = Select(config, logits, 1);
    EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{3, 2, 4}));
    EXPECT_EQ(routing.weights[1], (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(Select(config, logits, size_t{0}).weights[0], (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(Select(config, {}, size_t{0}).ids.size(), 0u);
  }
}

// ---- per call inputs

TEST(RoutingInputs, ABiasPerTokenChoosesOnly) {
  TopKConfig config = RouterConfig(3, 1, ScoringFunc::kSigmoid, false);
  const std::vector<float> bias = {0, 0, 5, 5, 0, 0};
  TopKInputs inputs;
  inputs.dynamic_expert_bias = ConstRows(bias.data(), 2, 3);
  const LogitRows logits = {{1, 0, 0}, {1, 2, 0}};
  const Routing routing = Select(config, logits, inputs);
  EXPECT_EQ(routing.ids[0][0], 2);
  EXPECT_EQ(routing.ids[1][0], 0);
  EXPECT_FLOAT_EQ(routing.weights[0][0], 0.5f);

  ExpectError(ErrorCode::kInvalidArgument, {"bias per token", "[1, 3]", "[2, 3]"}, [&] {
    Select(config, {{1, 0, 0}}, inputs);
  });
  config.scoring_func = ScoringFunc::kSoftmax;
  ExpectError(ErrorCode::kInvalidArgument, {"bias per token", "sigmoid", "softmax"},
              [&] { Select(config, logits, inputs); });
  config.scoring_func = ScoringFunc::kSigmoid;
  const std::vector<float> fixed(3, 0.0f);
  config.correction_bias = fixed;
  ExpectError(ErrorCode::kInvalidArgument, {"bias per token", "correction bias"},
              [&] { Select(config, logits, inputs); });
  config.correction_bias = {};
  EXPECT_EQ(Select(config, logits, inputs).ids, routing.ids);
}

TEST(RoutingInputs, HashReadsTheTable) {
  const std::vector<int32_t> table = DefaultHashTable(5, 2, 4);
  TopKConfig config = RouterConfig(4, 2);
  config.policy = RoutingPolicy::kHash;
  config.tid2eid = table;
  ValidateTopK(config);
  std::vector<int64_t> tokens = {4, 3};
  TopKInputs inputs;
  inputs.input_ids = tokens;
  const LogitRows logits = {{1, 2, 3, 4}, {0, 0, 0, 0}};
  const Routing routing = Select(config, logits, inputs);
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(routing.ids[1], (std::vector<int32_t>{3, 0}));
  EXPECT_FLOAT_EQ(routing.weights[1][0], 0.25f) << "softmax scores are not renormalized";

  for (int64_t bad : {int64_t{-1}, int64_t{5}, INT64_MAX}) {
    tokens[1] = bad;
    ExpectError(ErrorCode::kInvalidArgument, {"input id of token 1", "0 to 4"},
                [&] { Select(config, logits, inputs); });
    inputs.num_token_non_padded = 1;  // padding may hold anything
    config.padding = PaddingFamily::kAscend;
    EXPECT_TRUE(AreDistinct(Select(config, logits, inputs).ids[1]));
    inputs.num_token_non_padded = SIZE_MAX;
    config.padding = PaddingFamily::kDefault;
  }
  inputs.input_ids = {};
  ExpectError(ErrorCode::kInvalidArgument, {"input ids", "2", "0"},
              [&] { Select(config, logits, inputs); });
  ExpectError(ErrorCode::kInvalidArgument, {"hash table"}, [] { DefaultHashTable(4, 3, 2); });
}

TEST(RoutingInputs, ACustomFunctionSeesHiddenStates) {
  int32_t first = 2;
  TopKConfig config = RouterConfig(4, 2);
  config.policy = RoutingPolicy::kFunction;
  config.custom_routing_function = {FirstExperts, &first};
  ValidateTopK(config);
  const std::vector<float> hidden = {0.5f, 0, 0.75f, 0};
  TopKInputs inputs;
  inputs.hidden = ConstRows(hidden.data(), 2, 2);
  const LogitRows logits(2, {1, 2, 3, 4});
  const Routing routing = Select(config, logits, inputs);
  EXPECT_EQ(routing.ids[1], (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(routing.weights[1], (std::vector<float>{0.75f, 0.75f}));
  first = 3;
  ExpectError(ErrorCode::kInvalidArgument, {"token", "expert 4", "0 to 3"},
              [&] { Select(config, logits, inputs); });
  first = -1;
  ExpectError(ErrorCode::kInvalidArgument, {"expert -1"}, [&] { Select(config, logits, inputs); });
  first = 2;
  EXPECT_EQ(Select(config, logits, inputs).ids, routing.ids);
}

class KeepingObserver : public RoutingObserver {
 public:
  void OnLogicalExperts(const RoutedExperts& routed) override {
    logical.assign(routed.ids.begin(), routed.ids.end());
  }
  void OnPhysicalExperts(const RoutedExperts& routed) override {
    physical.assign(routed.ids.begin(), routed.ids.end());
    layer = routed.layer_id;
    columns = routed.num_columns;
  }
  std::vector<int32_t> logical, physical;
  size_t layer = 0, columns = 0;
};

TEST(RoutingInputs, ObserversSeeRoutedColumnsOfRealTokens) {
  SixOnNine six;
  KeepingObserver observer;
  six.placement.algorithm = DispatchAlgorithm::kStatic;
  six.inputs.observer = &observer;
  six.inputs.layer_id = 7;
  six.inputs.num_token_non_padded = 1;
  TopKConfig config = RouterConfig(6, 3);
  config.num_fused_shared_experts = 1;
  config.shared_layout = SharedLayout::kPerRank;
  config.moe_ep_size = 3;
  const LogitRows logits(2, {9, 0, 8, 0, 0, 0});
  for (PaddingFamily family :
       {PaddingFamily::kDefault, PaddingFamily::kHipAiter, PaddingFamily::kAscend}) {
    config.padding = family;
    Select(config, logits, six.inputs);
    EXPECT_EQ(observer.logical, (std::vector<int32_t>{0, 2, -1, -1}));
    EXPECT_EQ(observer.physical, (std::vector<int32_t>{6, 8, -1, -1}));
    EXPECT_EQ(observer.layer, 7u);
    EXPECT_EQ(observer.columns, 2u);
  }
  observer.logical.clear();
  config.allow_routed_experts_capture = false;
  Select(config, logits, six.inputs);
  EXPECT_TRUE(observer.logical.empty()) << "a draft model never writes the capture buffer";
  EXPECT_FALSE(observer.physical.empty());
}

TEST(RoutingSimulated, RoundRobinLoadsEveryExpertAlike) {  // contract 2.12
  TopKConfig config = RouterConfig(12, 5);
  config.simulated_routing = SimulatedRouting::kRoundRobin;
  config.moe_ep_size = 4;
  config.simulated_offset = 3;
  ValidateTopK(config);
  const Routing routing = Select(config, LogitRows(12, std::vector<float>(12, kNan)));
  std::vector<size_t> counts(12, 0);
  for (const auto& ids : routing.ids) {
    EXPECT_TRUE(AreDistinct(ids));
    for (int32_t id : ids) ++counts[static_cast<size_t>(id)];
  }
  EXPECT_EQ(counts, std::vector<size_t>(12, 5));
  EXPECT_EQ(routing.ids[0][0], 9) << "slot 3: the first expert of rank 3";
  for (const auto& weights : routing.weights)
    EXPECT_EQ(weights, std::vector<float>(5, 0.2f)) << "1/K, no NaN of the logits";
  config.moe_ep_size = 5;
  ExpectError(ErrorCode::kInvalidArgument, {"moe_ep_size", "12"}, [&] { ValidateTopK(config); });
}

// ---- methods and refusals

TEST(RoutingMethods, NamesThePolicyExactly) {  // contract 2.9
  using enum RoutingMethodType;
  const std::vector<float> bias(8, 0.0f);
  const auto method = [](TopKConfig config, RoutingPolicy policy = RoutingPolicy::kScores) {
    config.policy = policy;
    return RoutingMethodOf(config);
  };
  EXPECT_EQ(method(RouterConfig(8, 2, ScoringFunc::kSoftmax, false)), kDefault);
  EXPECT_EQ(method(RouterConfig(8, 2)), kRenormalizeNaive);
  EXPECT_EQ(method(RouterConfig(8, 2), RoutingPolicy::kTopKThenSoftmax), kRenormalize);
  EXPECT_EQ(
      method(RouterConfig(8, 2, ScoringFunc::kSoftmax, false), RoutingPolicy::kTopKThenSoftmax),
      kTopK);
  EXPECT_EQ(method(RouterConfig(8, 1), RoutingPolicy::kLlama4), kLlama4);
  EXPECT_EQ(method(RouterConfig(8, 2, ScoringFunc::kSigmoid)), kSigmoidRenorm);
  EXPECT_EQ(method(RouterConfig(8, 2, ScoringFunc::kSigmoid, false)), kSigmoid);
  EXPECT_EQ(method(RouterConfig(8, 2, ScoringFunc::kSqrtSoftplus)), kUnspecified);
  TopKConfig config = RouterConfig(8, 2, ScoringFunc::kSigmoid);
  config.correction_bias = bias;
  EXPECT_EQ(method(config), kMiniMax2);
  config.use_grouped_topk = true;
  config.num_expert_group = 4;
  config.topk_group = 2;
  EXPECT_EQ(method(config), kDeepSeekV3);
  EXPECT_TRUE(RoutingMethodReproduces(kDeepSeekV3, config, {}));
  EXPECT_FALSE(RoutingMethodReproduces(kMiniMax2, config, {}));
  config.group_score_rule = GroupScoreRule::kMax;
  EXPECT_EQ(method(config), kUnspecified);
  config.group_score_rule = GroupScoreRule::kAuto;
  SixOnNine six;
  EXPECT_TRUE(RoutingMethodReproduces(kDeepSeekV3, config, six.inputs)) << "algorithm none";
  six.placement.algorithm = DispatchAlgorithm::kStatic;
  EXPECT_FALSE(RoutingMethodReproduces(kDeepSeekV3, config, six.inputs));
  config.top_k = 3;
  config.num_fused_shared_experts = 1;
  EXPECT_FALSE(RoutingMethodReproduces(kDeepSeekV3, config, {}));
  EXPECT_FALSE(RoutingMethodReproduces(kUnspecified, RouterConfig(8, 2), {}));
}

TEST(RoutingConfig, EveryContradictionIsRefusedAndTheNextConfigWorks) {
  const std::vector<float> seven(7), eight(8);
  const std::vector<int32_t> table = {0, 1, 2, 8}, negative = {0, -1}, twice = {0, 1, 2, 2};
  const auto refuse = [&](std::initializer_list<std::string_view> words, auto change) {
    TopKConfig config = RouterConfig(8, 2);
    change(config);
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { ValidateTopK(config); });
    ValidateTopK(RouterConfig(8, 2));
    EXPECT_EQ(Select(RouterConfig(8, 2), {{0, 1, 2, 3, 4, 5, 6, 7}}).ids[0],
              (std::vector<int32_t>{7, 6}));
  };
  using C = TopKConfig;
  refuse({"num_experts", "0"}, [](C& c) { c.num_experts = 0; });
  refuse({"top_k", "3 to 10", "2"}, [](C& c) { c.num_fused_shared_experts = 2; });
  refuse({"top_k", "2 to 9", "10"}, [](C& c) { c.num_fused_shared_experts = 1, c.top_k = 10; });
  refuse({"use_grouped_topk"}, [](C& c) { c.num_expert_group = 4; });
  refuse({"num_expert_group", "divisor of 8", "3"},
         [](C& c) { c.use_grouped_topk = true, c.num_expert_group = 3, c.topk_group = 1; });
  refuse({"num_expert_group", "0"}, [](C& c) { c.use_grouped_topk = true; });
  refuse({"topk_group", "1 to 4", "5"},
         [](C& c) { c.use_grouped_topk = true, c.num_expert_group = 4, c.topk_group = 5; });
  refuse({"topk_group", "0"}, [](C& c) { c.use_grouped_topk = true, c.num_expert_group = 4; });
  refuse({"bias", "8", "7"}, [&](C& c) { c.correction_bias = seven; });
  refuse({"bias", "cohere2_sigmoid"},
         [&](C& c) { c.correction_bias = eight, c.policy = RoutingPolicy::kCohere2Sigmoid; });
  refuse({"routed_scaling_factor", "0"}, [](C& c) { c.routed_scaling_factor = 0; });
  refuse({"routed_scaling_factor", "nan"}, [](C& c) { c.routed_scaling_factor = kNan; });
  refuse({"softcap", "-1"}, [](C& c) { c.router_logit_softcap = -1; });
  refuse({"softcap", "sigmoid"},
         [](C& c) { c.router_logit_softcap = 1, c.scoring_func = ScoringFunc::kSigmoid; });
  refuse({"log1p", "softmax"}, [](C& c) { c.sqrtsoftplus_log1p = true; });
  refuse({"moe_ep_size"}, [](C& c) { c.moe_ep_size = 0; });
  refuse({"moe_ep_rank", "0 to 1", "2"}, [](C& c) { c.moe_ep_size = 2, c.moe_ep_rank = 2; });
  refuse({"per-rank"}, [](C& c) {
    c.shared_layout = SharedLayout::kPerRank, c.fused_shared_experts_scaling_factor = 0.5;
  });
  refuse({"llama4", "1", "2"}, [](C& c) { c.policy = RoutingPolicy::kLlama4; });
  refuse({"sparsemixer", "2", "3"},
         [](C& c) { c.policy = RoutingPolicy::kPhimoeSparsemixer, c.top_k = 3; });
  refuse({"afmoe", "sqrtsoftplus"}, [](C& c) {
    c.policy = RoutingPolicy::kAfmoe, c.scoring_func = ScoringFunc::kSqrtSoftplus;
  });
  refuse({"router_n_groups", "0"}, [](C& c) { c.policy = RoutingPolicy::kGroupRouter; });
  refuse({"router_n_groups", "2 routed", "4"},
         [](C& c) { c.policy = RoutingPolicy::kGroupRouter, c.router_n_groups = 4; });
  refuse({"router_n_groups", "scores"}, [](C& c) { c.router_n_groups = 2; });
  refuse({"per_expert_scale", "8", "0"}, [](C& c) { c.policy = RoutingPolicy::kGemma4; });
  refuse({"per_expert_scale", "scores"}, [&](C& c) { c.per_expert_scale = eight; });
  refuse({"tid2eid", "0"}, [](C& c) { c.policy = RoutingPolicy::kHash; });
  refuse({"tid2eid", "token id 1", "0 to 7", "8"},
         [&](C& c) { c.policy = RoutingPolicy::kHash, c.tid2eid = table; });
  refuse({"tid2eid", "-1"}, [&](C& c) { c.policy = RoutingPolicy::kHash, c.tid2eid = negative; });
  refuse({"tid2eid", "expert 2 twice"},
         [&](C& c) { c.policy = RoutingPolicy::kHash, c.tid2eid = twice; });
  refuse({"tid2eid", "scores"}, [&](C& c) { c.tid2eid = table; });
  refuse({"custom_routing_function"}, [](C& c) { c.policy = RoutingPolicy::kFunction; });
  TopKConfig config = RouterConfig(8, 2);
  ExpectError(ErrorCode::kInvalidArgument, {"columns", "8", "3"}, [&] {
    ThreadPool pool(1);
    Arena arena;
    ExecContext context{pool, arena};
    SelectExperts(context, config, ConstRows(eight.data(), 2, 3), size_t{2});
  });
}

}  // namespace
}  // namespace switchyard::moe
