// Contract 7.4: experts move between passes, and no answer changes.
#include "switchyard/moe/eplb/rebalancer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <tuple>

#include "moe/eplb/test_experts.h"
#include "switchyard/parallel/run_ranks.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::AllExpertKinds;
using testing::DigestOf;
using testing::ExpectError;
using testing::ExpertKind;
using testing::TestExperts;

constexpr size_t kLayers = 3, kLogical = 8, kTokens = 24, kTopK = 2;

Deadline Soon() { return Deadline::After(std::chrono::seconds(20), "rebalancer test"); }

// What one expert makes of a token: a small whole number, so that sums in f32 are exact.
float ValueOf(const ExpertWeights& weights, size_t slot, size_t token) {
  return static_cast<float>(DigestOf(weights, slot) % 1000 * (token + 1));
}

// The model of one rank: layers whose experts are bytes, and a router that likes some of them more.
class Rank {
 public:
  Rank(ProcessGroup& group, const ExpertKind& kind, const ExpertLocationSizes& sizes,
       const RebalancerOptions& options, bool can_load = false)
      : sizes_(sizes), per_rank_(sizes.num_physical / sizes.ep_size), ep_rank_(group.rank()) {
    const ExpertLocation initial = ExpertLocation::Trivial(sizes);
    std::vector<ExpertWeights*> pointers;
    for (size_t layer = 0; layer < sizes.num_layers; ++layer) {
      experts_.emplace_back(kind, layer);
      const auto map = initial.PhysicalToLogical(layer);
      weights_.push_back(std::make_unique<ExpertWeights>(
          experts_[layer].Make(map.subspan(ep_rank_ * per_rank_, per_rank_))));
      pointers.push_back(weights_.back().get());
      std::vector<int32_t> all(kLogical);
      for (size_t e = 0; e < kLogical; ++e) all[e] = static_cast<int32_t>(e);
      truth_.push_back(experts_[layer].Make(all));
    }
    LoadExpert load;
    if (can_load)
      load = [this](size_t layer, size_t logical) { return experts_[layer].Load(logical); };
    rebalancer_ = std::make_unique<ExpertRebalancer>(
        options, initial, group, pointers, [this](size_t layer) { switched_.push_back(layer); },
        load);
    replicated_ = options.tokens_are_replicated;
  }

  ExpertRebalancer& rebalancer() { return *rebalancer_; }
  const ExpertWeights& weights(size_t layer) const { return *weights_[layer]; }
  std::vector<size_t>& switched() { return switched_; }

  // One pass through all layers; every answer is compared with that of all experts. `lost` experts
  // are to add nothing.
  void Step(ProcessGroup& group, uint64_t seed, std::span<const LostExpert> lost = {}) {
    rebalancer_->BeginStep();
    std::mt19937_64 random(seed);  // the same on all ranks
    for (size_t layer = 0; layer < sizes_.num_layers; ++layer) {
      std::vector<int32_t> logical;
      for (size_t i = 0; i < kTokens * kTopK; ++i) logical.push_back(PickExpert(random, layer));
      const std::vector<int32_t> physical = Route(group, layer, logical);
      std::vector<float> answer(kTokens, 0.0f), expected(kTokens, 0.0f);
      for (size_t i = 0; i < logical.size(); ++i) {
        const auto slot = static_cast<size_t>(physical[i]);
        const size_t token = i / kTopK;
        if (slot / per_rank_ == ep_rank_)
          answer[token] += ValueOf(*weights_[layer], slot % per_rank_, token);
        if (!IsLost(lost, layer, logical[i]))
          expected[token] += ValueOf(truth_[layer], static_cast<size_t>(logical[i]), token);
      }
      ZeroLost(lost, layer, logical, physical, answer);
      group.AllReduceSum(answer, Soon());
      EXPECT_EQ(answer, expected) << "layer " << layer << ", seed " << seed;
    }
    rebalancer_->EndStep();
  }

  // Whether all ranks have the same placement.
  void ExpectAgreement(ProcessGroup& group) const {
    std::vector<int32_t> mine = rebalancer_->MapOfAllLayers();
    std::vector<int32_t> all(mine.size() * group.size());
    group.AllGather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), Soon());
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], mine[i % mine.size()]);
  }

 private:
  // Half of the choices go to one expert, another one in each layer.
  static int32_t PickExpert(std::mt19937_64& random, size_t layer) {
    const uint64_t draw = random();
    return static_cast<int32_t>(draw % 2 == 0 ? (layer + 1) % kLogical : draw / 2 % kLogical);
  }

  static bool IsLost(std::span<const LostExpert> lost, size_t layer, int32_t expert) {
    return std::ranges::any_of(lost, [&](const LostExpert& l) {
      return l.layer == layer && l.logical == static_cast<size_t>(expert);
    });
  }

  // A digest of zeros is no zero; what a real product makes of them is.
  void ZeroLost(std::span<const LostExpert> lost, size_t layer, std::span<const int32_t> logical,
                std::span<const int32_t> physical, std::span<float> answer) const {
    for (size_t i = 0; i < logical.size(); ++i) {
      const auto slot = static_cast<size_t>(physical[i]);
      if (!IsLost(lost, layer, logical[i]) || slot / per_rank_ != ep_rank_) continue;
      EXPECT_EQ(weights_[layer]->w2.data[slot % per_rank_][0], std::byte{0});
      answer[i / kTopK] -= ValueOf(*weights_[layer], slot % per_rank_, i / kTopK);
    }
  }

  // Physical experts of all tokens. Replicated: every rank routes them all, by row. Else token t is
  // routed by one rank, to its nearest replica.
  std::vector<int32_t> Route(ProcessGroup& group, size_t layer, std::span<const int32_t> logical) {
    const ExpertPlacement placement = rebalancer_->Placement(layer);
    std::vector<int32_t> ids(logical.size(), 0);
    std::vector<int32_t> mine;
    for (size_t i = 0; i < logical.size(); ++i) {
      const auto e = static_cast<size_t>(logical[i]);
      const size_t token = i / kTopK;
      if (!replicated_ && token % group.size() != group.rank()) continue;
      const size_t row = token % static_cast<size_t>(placement.num_valid[e]);
      ids[i] = replicated_ ? placement.all_physical[e * placement.max_replicas + row]
                           : placement.rank_map[e];
      mine.push_back(ids[i]);
    }
    rebalancer_->observer().OnPhysicalExperts(
        {layer, mine.size() / kTopK, kTopK, std::span<const int32_t>(mine)});
    if (replicated_) return ids;
    std::vector<float> sum(ids.begin(), ids.end());
    group.AllReduceSum(sum, Soon());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(sum[i]);
    return ids;
  }

  ExpertLocationSizes sizes_;
  size_t per_rank_, ep_rank_;
  bool replicated_ = false;
  std::deque<TestExperts> experts_;  // their bytes stay where they are
  std::vector<std::unique_ptr<ExpertWeights>> weights_;
  std::vector<ExpertWeights> truth_;  // all experts of each layer
  std::vector<size_t> switched_;
  std::unique_ptr<ExpertRebalancer> rebalancer_;
};

// As few slots as hold all experts and at least `redundant` more.
ExpertLocationSizes SizesFor(size_t num_ranks, size_t redundant) {
  const size_t slots = (kLogical + redundant + num_ranks - 1) / num_ranks * num_ranks;
  return {kLayers, kLogical, slots, num_ranks, 1};
}

RebalancerOptions EveryFiveSteps() {
  RebalancerOptions options;
  options.num_iterations = 5;
  options.layers_per_chunk = 1;
  options.timeout = std::chrono::seconds(20);
  return options;
}

class RebalancerOnRanks : public ::testing::TestWithParam<std::tuple<size_t, bool, const char*>> {};

TEST_P(RebalancerOnRanks, NoAnswerChangesInFiftyStepsOfMigration) {
  const auto [num_ranks, replicated, algorithm] = GetParam();
  for (const size_t kind : {0u, 7u}) {
    RunRanks(num_ranks, [&, replicated = replicated, algorithm = algorithm,
                         num_ranks = num_ranks](ProcessGroup& group) {
      RebalancerOptions options = EveryFiveSteps();
      options.policy = ParseEplbAlgorithm(algorithm);
      options.tokens_are_replicated = replicated;
      options.dispatch = replicated ? DispatchAlgorithm::kDynamicByRow : DispatchAlgorithm::kStatic;
      Rank rank(group, AllExpertKinds()[kind], SizesFor(num_ranks, 4), options);
      std::vector<size_t> migrating;
      for (uint64_t step = 0; step < 50; ++step) {
        rank.Step(group, step);
        rank.ExpectAgreement(group);
        if (rank.rebalancer().is_migrating()) migrating.push_back(step);
      }
      const RebalanceStats& stats = rank.rebalancer().stats();
      // Five steps to a look, then one per layer.
      EXPECT_EQ(stats.num_looks, 6u);
      EXPECT_EQ(stats.layers_moved, 6 * kLayers);
      EXPECT_EQ(stats.num_failed + stats.num_skipped, 0u);
      EXPECT_EQ(std::vector<size_t>(migrating.begin(), migrating.begin() + 4),
                (std::vector<size_t>{4, 5, 6, 12}));
      EXPECT_EQ(std::vector<size_t>(rank.switched().begin(), rank.switched().begin() + 4),
                (std::vector<size_t>{0, 1, 2, 0}));
      // Nothing is kept that no slot uses.
      EXPECT_LE(rank.rebalancer().owned_bytes(),
                SizesFor(num_ranks, 4).num_physical / num_ranks * kLayers * size_t{4096});
      EXPECT_EQ(stats.experts_received == 0, num_ranks == 1);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RebalancerOnRanks,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u), ::testing::Bool(),
                                            ::testing::Values("auto", "deepseek_vec")));

TEST(Rebalancer, TheHeavyExpertGetsTheReplicasAndRanksAreUsedMoreEvenly) {
  RunRanks(4, [](ProcessGroup& group) {
    RebalancerOptions options = EveryFiveSteps();
    options.layers_per_chunk = 0;
    Rank rank(group, AllExpertKinds()[0], SizesFor(4, 4), options);
    for (uint64_t step = 0; step < 5; ++step) rank.Step(group, step);
    EXPECT_FALSE(rank.rebalancer().is_migrating()) << "all layers move at once";
    const double before = rank.rebalancer().stats().last_utilization;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const auto map = rank.rebalancer().PhysicalToLogical(layer);
      EXPECT_GE(std::ranges::count(map, static_cast<int32_t>(layer + 1)), 3);
    }
    for (uint64_t step = 5; step < 10; ++step) rank.Step(group, step);
    EXPECT_GT(rank.rebalancer().stats().last_utilization, before);
    EXPECT_EQ(rank.rebalancer().stats().num_looks, 2u);
  });
}

TEST(Rebalancer, BalancedEnoughStaysWhereItIs) {
  RunRanks(2, [](ProcessGroup& group) {
    RebalancerOptions options = EveryFiveSteps();
    options.min_utilization = 0.01;
    Rank rank(group, AllExpertKinds()[0], SizesFor(2, 2), options);
    const std::vector<int32_t> before = rank.rebalancer().MapOfAllLayers();
    for (uint64_t step = 0; step < 12; ++step) rank.Step(group, step);
    EXPECT_EQ(rank.rebalancer().stats().num_looks, 2u);
    EXPECT_EQ(rank.rebalancer().stats().num_skipped, 2u);
    EXPECT_EQ(rank.rebalancer().MapOfAllLayers(), before);
    rank.rebalancer().RebalanceNow();
    EXPECT_EQ(rank.rebalancer().stats().layers_moved, kLayers);
    rank.Step(group, 12);
  });
}

TEST(Rebalancer, ReplicatedTokensAreCountedOnRankZero) {
  RunRanks(2, [](ProcessGroup& group) {
    RebalancerOptions options = EveryFiveSteps();
    options.tokens_are_replicated = true;
    options.dispatch = DispatchAlgorithm::kDynamicByRow;
    Rank rank(group, AllExpertKinds()[0], SizesFor(2, 2), options);
    rank.rebalancer().BeginStep();
    // Rank 0 sees slot 3; the other one, which may not count, slot 5 many times.
    const std::vector<int32_t> ids(group.rank() == 0 ? 4 : 400, group.rank() == 0 ? 3 : 5);
    for (size_t layer = 0; layer < kLayers; ++layer)
      rank.rebalancer().observer().OnPhysicalExperts({layer, ids.size(), 1, ids});
    rank.rebalancer().EndStep();
    rank.rebalancer().RebalanceNow();
    EXPECT_EQ(std::ranges::count(rank.rebalancer().PhysicalToLogical(0), 3), 3);
    rank.Step(group, 1);
  });
}

TEST(Rebalancer, OneRankWithoutMemoryLeavesTheOldPlacementInForce) {
  RunRanks(3, [](ProcessGroup& group) {
    RebalancerOptions options = EveryFiveSteps();
    options.mover.max_bytes = group.rank() == 2 ? 1 : 0;
    Rank rank(group, AllExpertKinds()[2], SizesFor(3, 1), options);
    const std::vector<int32_t> before = rank.rebalancer().MapOfAllLayers();
    for (uint64_t step = 0; step < 15; ++step) rank.Step(group, step);
    const RebalanceStats& stats = rank.rebalancer().stats();
    EXPECT_GE(stats.num_failed, 2u);
    EXPECT_EQ(stats.layers_moved, 0u);
    EXPECT_EQ(rank.rebalancer().MapOfAllLayers(), before);
    EXPECT_FALSE(rank.rebalancer().is_migrating());
    EXPECT_TRUE(rank.switched().empty());
    EXPECT_EQ(rank.rebalancer().owned_bytes(), 0u);
  });
}

TEST(Rebalancer, AfterALossTheOthersCarryOn) {
  for (const bool can_load : {true, false}) {
    RunRanks(4, [&](ProcessGroup& world) {
      RebalancerOptions options = EveryFiveSteps();
      Rank rank(world, AllExpertKinds()[2], SizesFor(4, 4), options, can_load);
      auto alive = world.Split(world.rank() == 2 ? ProcessGroup::kNoGroup : 0, world.rank(),
                               "alive", Soon());
      auto alive_for_steps = world.Split(world.rank() == 2 ? ProcessGroup::kNoGroup : 0,
                                         world.rank(), "steps", Soon());
      for (uint64_t step = 0; step < 3; ++step) rank.Step(world, step);
      if (world.rank() == 2) return;  // as far as the others can tell, it has died
      const std::vector<LostExpert> lost =
          rank.rebalancer().Rebalance(std::vector<uint8_t>{1, 1, 0, 1}, std::move(alive));
      EXPECT_FALSE(rank.rebalancer().is_migrating());
      // Rank 2 held the experts 6, 7 and 0, of which rank 0 has another copy.
      ASSERT_EQ(lost.size(), 2 * kLayers);
      for (size_t i = 0; i < lost.size(); ++i) {
        EXPECT_EQ(lost[i].layer, i / 2);
        EXPECT_EQ(lost[i].logical, 6 + i % 2);
      }
      for (size_t layer = 0; layer < kLayers; ++layer) {
        const ExpertPlacement placement = rank.rebalancer().Placement(layer);
        for (size_t e = 0; e < kLogical; ++e)
          EXPECT_NE(placement.rank_map[e] / 3, 2) << "no token goes to the lost rank";
      }
      const auto missing = can_load ? std::span<const LostExpert>() : std::span(lost);
      for (uint64_t step = 20; step < 40; ++step) rank.Step(*alive_for_steps, step, missing);
      EXPECT_EQ(rank.rebalancer().stats().num_looks, 2u) << "the loop goes on among the others";
    });
  }
}

TEST(Rebalancer, LostExpertsAreListed) {
  RunRanks(2, [](ProcessGroup& world) {
    ExpertLocationSizes sizes{kLayers, kLogical, 2 * kLogical, 2, 1};
    Rank rank(world, AllExpertKinds()[0], sizes, EveryFiveSteps());
    // Both ranks hold every expert, so that either can go; rank 1 is only masked and still calls.
    const auto lost = rank.rebalancer().Rebalance(std::vector<uint8_t>{1, 0});
    EXPECT_TRUE(lost.empty());
    rank.Step(world, 1);
    // All experts end on rank 0: it has them already.
    EXPECT_EQ(rank.rebalancer().stats().experts_received, 0u);
    rank.rebalancer().Rebalance(std::vector<uint8_t>{1, 1});
    rank.Step(world, 2);
    ExpectError(ErrorCode::kInvalidArgument, {"mask of 3 ranks"}, [&] {
      rank.rebalancer().Rebalance(std::vector<uint8_t>{1, 1, 1});
    });
  });
  RunRanks(2, [](ProcessGroup& world) {
    Rank rank(world, AllExpertKinds()[0], SizesFor(2, 0), EveryFiveSteps());
    ExpectError(ErrorCode::kInvalidArgument, {"alive"}, [&] {
      rank.rebalancer().Rebalance(std::vector<uint8_t>{1, 0});
    });
  });
}

TEST(Rebalancer, AFailedStepCountsForNothing) {
  RunRanks(2, [](ProcessGroup& group) {
    Rank rank(group, AllExpertKinds()[0], SizesFor(2, 2), EveryFiveSteps());
    ExpertRebalancer& rebalancer = rank.rebalancer();
    rebalancer.BeginStep();
    ExpectError(ErrorCode::kFailedPrecondition, {"within"}, [&] { rebalancer.BeginStep(); });
    ExpectError(ErrorCode::kFailedPrecondition, {"within a step"},
                [&] { rebalancer.RebalanceNow(); });
    rebalancer.AbortStep();
    ExpectError(ErrorCode::kFailedPrecondition, {"not begun"}, [&] { rebalancer.EndStep(); });
    for (uint64_t step = 0; step < 4; ++step) rank.Step(group, step);
    EXPECT_EQ(rebalancer.stats().num_looks, 0u);
    rank.Step(group, 4);
    EXPECT_EQ(rebalancer.stats().num_looks, 1u);
  });
}

TEST(Rebalancer, RanksThatCountStepsDifferentlyAreTold) {
  RunRanks(2, [](ProcessGroup& group) {
    Rank rank(group, AllExpertKinds()[0], SizesFor(2, 2), EveryFiveSteps());
    rank.Step(group, 0);
    if (group.rank() == 1) {
      rank.rebalancer().BeginStep();
      rank.rebalancer().EndStep();
    }
    ExpectError(ErrorCode::kFailedPrecondition, {"rank 0 has recorded 1 passes, rank 1 2"},
                [&] { rank.rebalancer().RebalanceNow(); });
  });
}

TEST(Rebalancer, RefusesOptionsThatCannotWork) {
  RunRanks(2, [](ProcessGroup& group) {
    const auto refuse = [&](std::initializer_list<std::string_view> words, const auto& change) {
      RebalancerOptions options = EveryFiveSteps();
      ExpertLocationSizes sizes = SizesFor(2, 2);
      change(options, sizes);
      ExpectError(ErrorCode::kInvalidArgument, words,
                  [&] { Rank(group, AllExpertKinds()[0], sizes, options); });
    };
    using Options = RebalancerOptions;
    using Sizes = ExpertLocationSizes;
    refuse({"eplb-rebalance-num-iterations", "5 and 6"},
           [](Options& o, Sizes&) { o.recorder_buffer_size = 6; });
    refuse({"eplb-rebalance-num-iterations", "0"},
           [](Options& o, Sizes&) { o.num_iterations = 0, o.recorder_buffer_size = -1; });
    refuse({"utilization-threshold", "1.5"}, [](Options& o, Sizes&) { o.min_utilization = 1.5; });
    refuse({"dispatch algorithm"},
           [](Options& o, Sizes&) { o.dispatch = DispatchAlgorithm::kNone; });
    refuse({"num_groups"}, [](Options& o, Sizes&) {
      o.policy = ParseEplbAlgorithm("deepseek_hierarchical");
      o.num_groups = 3;
    });
    refuse({"experts_per_batch"},
           [&](Options& o, Sizes&) { o.mover.experts_per_batch = group.rank() == 0 ? 32 : 0; });
  });
  RunRanks(2, [](ProcessGroup& group) {
    const ExpertKind kind = AllExpertKinds()[group.rank() == 0 ? 0 : 3];
    ExpectError(ErrorCode::kInvalidArgument, {"layer 0", "rank 1", "laid out"},
                [&] { Rank(group, kind, SizesFor(2, 2), EveryFiveSteps()); });
  });
}

TEST(Rebalancer, NodesAreRegularWhereNeighboursShareThem) {
  const auto nodes_of = [](size_t ranks, size_t node_size) {
    size_t nodes = 0;
    RunRanks({.num_ranks = ranks, .node_size = node_size}, [&](ProcessGroup& group) {
      if (group.rank() == 0) nodes = NumRegularNodes(group);
    });
    return nodes;
  };
  EXPECT_EQ(nodes_of(4, 2), 2u);
  EXPECT_EQ(nodes_of(4, 4), 1u);
  EXPECT_EQ(nodes_of(3, 2), 1u) << "two and one";
}

TEST(Rebalancer, OptionsComeFromTheSettings) {
  Settings settings;
  const RebalancerOptions defaults = RebalancerOptionsOf(settings);
  EXPECT_EQ(defaults.num_iterations, 1000u);
  EXPECT_EQ(defaults.layers_per_chunk, 0u);
  EXPECT_EQ(defaults.min_utilization, 1.0);
  EXPECT_EQ(defaults.recorder_buffer_size, 0);
  settings.Set("eplb-rebalance-num-iterations", "20", "test");
  settings.Set("eplb-rebalance-layers-per-chunk", "3", "test");
  settings.Set("eplb-min-rebalancing-utilization-threshold", "0.75", "test");
  settings.Set("eplb-algorithm", "deepseek_vec", "test");
  settings.Set("expert-distribution-recorder-buffer-size", "-1", "test");
  settings.Set("expert-distribution-recorder-mode", "stat_approx", "test");
  settings.Set("ep-num-redundant-experts", "0", "test");
  const RebalancerOptions options = RebalancerOptionsOf(settings);
  EXPECT_EQ(options.num_iterations, 20u);
  EXPECT_EQ(options.layers_per_chunk, 3u);
  EXPECT_EQ(options.min_utilization, 0.75);
  EXPECT_EQ(options.policy.algorithm, EplbAlgorithm::kDeepseekVec);
  EXPECT_EQ(options.recorder_buffer_size, -1);
  EXPECT_EQ(options.recorder_mode, RecorderMode::kStatApprox);
  ExpectError(ErrorCode::kInvalidArgument, {"0 to 1", "1.5"},
              [&] { settings.Set("eplb-min-rebalancing-utilization-threshold", "1.5", "test"); });
  ExpectError(ErrorCode::kInvalidArgument, {"all or a whole number of at least 1", "\"0\""},
              [&] { settings.Set("eplb-rebalance-layers-per-chunk", "0", "test"); });
}

}  // namespace
}  // namespace switchyard::moe
