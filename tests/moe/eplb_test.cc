// Contract 7.1 to 7.5: placement algorithms, locations, static dispatch, recorder.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "moe/eplb/packing.h"
#include "moe/routing_case.h"
#include "switchyard/moe/eplb/algorithms.h"
#include "switchyard/moe/eplb/location.h"
#include "switchyard/moe/eplb/recorder.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

// ---- the greedy steps, against loops that look at everything

TEST(EplbPacking, IsThatOfTheObviousLoop) {
  auto random = testing::MakeRandom(61);
  for (int round = 0; round < 100; ++round) {
    const size_t packs = 1 + random() % 6, capacity = 1 + random() % 5;
    std::vector<float> weights(packs * capacity);
    for (float& w : weights) w = static_cast<float>(random() % 5);  // many ties
    const Packing packing = GreedyPacking(weights, packs);
    std::vector<double> sums(packs, 0);
    std::vector<size_t> filled(packs, 0);
    for (size_t item : DescendingOrder(weights)) {
      size_t best = packs;
      for (size_t p = 0; p < packs; ++p)
        if (filled[p] < capacity && (best == packs || sums[p] < sums[best])) best = p;
      ASSERT_EQ(packing.pack[item], best);
      ASSERT_EQ(packing.place[item], filled[best]++);
      sums[best] += weights[item];
    }
  }
  const Packing one_each = BalancedPacking(std::vector<float>{1, 5, 3}, 3);
  EXPECT_EQ(one_each.pack, (std::vector<size_t>{0, 1, 2})) << "one item per pack stays";
}

TEST(EplbPacking, ReplicasGoToTheHeaviestShare) {
  auto random = testing::MakeRandom(62);
  for (int round = 0; round < 100; ++round) {
    const size_t experts = 1 + random() % 9, replicas = experts + random() % 12;
    std::vector<float> loads(experts);
    for (float& load : loads) load = static_cast<float>(random() % 8);
    const Replication replication = Replicate(loads, replicas);
    std::vector<size_t> count(experts, 1);
    for (size_t i = experts; i < replicas; ++i) {
      size_t best = 0;
      for (size_t e = 1; e < experts; ++e)
        if (loads[e] / static_cast<float>(count[e]) > loads[best] / static_cast<float>(count[best]))
          best = e;
      ASSERT_EQ(replication.expert[i], best);
      ASSERT_EQ(replication.place[i], count[best]++);
    }
    EXPECT_EQ(replication.count, count);
  }
}

// ---- plans

EplbRequest Request(std::string_view algorithm, const std::vector<float>& load, size_t layers,
                    size_t logical, size_t physical, size_t devices) {
  EplbRequest request;
  request.policy = ParseEplbAlgorithm(algorithm);
  request.num_layers = layers;
  request.num_logical = logical;
  request.num_physical = physical;
  request.num_devices = devices;
  request.tokens_per_expert = load;
  return request;
}

// The example in the description of the algorithm's authors (deepseek-ai/EPLB).
const std::vector<float> kExampleLoad = {90, 132, 40,  61, 104, 165, 39,  4,   73,  56, 183, 86,
                                         20, 107, 104, 64, 19,  197, 187, 157, 172, 86, 16,  27};

TEST(Eplb, ThePublishedExample) {
  EplbRequest request = Request("deepseek_hierarchical", kExampleLoad, 2, 12, 16, 8);
  request.num_nodes = 2;
  request.num_groups = 4;
  const std::vector<int32_t> expected = {5, 6,  5, 7, 8, 4,  3, 4, 10, 9, 10, 2, 0, 1, 11, 1,
                                         7, 10, 6, 8, 6, 11, 8, 9, 2,  4, 5,  1, 5, 0, 3,  1};
  EXPECT_EQ(PlanExperts(request).physical_to_logical, expected);
  request.policy = ParseEplbAlgorithm("auto");
  EXPECT_EQ(PlanExperts(request).physical_to_logical, expected) << "groups divide: hierarchical";
  request.num_groups = 3;
  const ExpertPlan global = PlanExperts(request);
  request.policy = ParseEplbAlgorithm("deepseek");
  EXPECT_EQ(PlanExperts(request).physical_to_logical, global.physical_to_logical)
      << "groups do not divide: global";
}

TEST(Eplb, EveryPlanIsConsistent) {
  auto random = testing::MakeRandom(63);
  constexpr size_t kLayers = 3, kLogical = 24, kPhysical = 32, kSteps = 4;
  std::vector<float> load(kSteps * kLayers * kLogical);
  for (float& l : load) l = static_cast<float>(random() % 1000);
  for (const char* name :
       {"auto", "deepseek", "deepseek_hierarchical", "deepseek_vec", "deepseek_vec_hierarchical",
        "elasticity_aware", "elasticity_aware_hierarchical"}) {
    EplbRequest request = Request(name, load, kLayers, kLogical, kPhysical, 8);
    request.num_steps = kSteps;
    request.num_nodes = 2;
    request.num_groups = 6;
    const ExpertPlan plan = PlanExperts(request);
    EXPECT_NO_THROW(ExpertLocation::FromPlan(plan, 8, 2)) << name;
    EXPECT_EQ(std::accumulate(plan.logical_count.begin(), plan.logical_count.end(), size_t{0}),
              kLayers * kPhysical);
    std::vector<float> sum(kLayers * kLogical, 0);
    for (size_t i = 0; i < load.size(); ++i) sum[i % sum.size()] += load[i];
    const std::vector<double> balanced = DeviceLoads(plan, sum, 8);
    double total = 0;
    for (double l : balanced) total += l;
    EXPECT_NEAR(total, std::accumulate(sum.begin(), sum.end(), 0.0), 1e-6 * total);
    EXPECT_GT(Utilization(std::span(balanced).first(8)), 0.75) << name;
  }
}

TEST(Eplb, LostDevicesHoldNothing) {
  const std::vector<uint8_t> active = {1, 0, 1};
  const std::vector<float> load = {4, 3, 2, 1};
  EplbRequest request = Request("elasticity_aware", load, 1, 4, 9, 3);
  request.active_devices = active;
  const ExpertPlan plan = PlanExperts(request);
  for (size_t p = 3; p < 6; ++p) EXPECT_EQ(plan.physical_to_logical[p], 0);
  for (int32_t p : plan.logical_to_physical) EXPECT_TRUE(p < 3 || p >= 6) << p;
  EXPECT_EQ(DeviceLoads(plan, load, 3)[1], 0.0);
  const ExpertLocation location = ExpertLocation::FromPlan(plan, 3);
  for (size_t rank = 0; rank < 3; ++rank)
    for (int32_t p : location.RankDispatch(0, rank)) EXPECT_TRUE(p < 3 || p >= 6) << p;
  const std::vector<uint8_t> few = {0, 0, 1};
  request.active_devices = few;
  ExpectError(ErrorCode::kInvalidArgument, {"1 of 3", "hold 3 experts", "4"},
              [&] { PlanExperts(request); });
}

TEST(Eplb, ImpossibleRequestsAreRefusedAndTheNextWorks) {
  const auto refuse = [](std::initializer_list<std::string_view> words, auto change,
                         std::string_view algorithm = "deepseek_hierarchical") {
    std::vector<float> load = kExampleLoad;
    EplbRequest request = Request(algorithm, load, 2, 12, 16, 8);
    request.num_nodes = 2;
    request.num_groups = 4;
    PlanExperts(request);
    change(request, load);
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { PlanExperts(request); });
  };
  using R = EplbRequest;
  using V = std::vector<float>;
  refuse({"num_physical", "12", "11"}, [](R& r, V&) { r.num_physical = 11; });
  refuse({"num_physical", "num_devices", "16", "5"}, [](R& r, V&) { r.num_devices = 5; });
  refuse({"num_devices", "0"}, [](R& r, V&) { r.num_devices = 0; });
  refuse({"num_nodes", "0"}, [](R& r, V&) { r.num_nodes = 0; });
  refuse({"num_groups", "num_nodes"}, [](R& r, V&) { r.num_groups = 3; });
  refuse({"num_logical", "num_groups"}, [](R& r, V&) { r.num_groups = 0; });
  refuse({"tokens_per_expert", "3 layers", "24"}, [](R& r, V&) { r.num_layers = 3; });
  refuse({"steps"}, [](R& r, V&) { r.num_steps = 0; });
  refuse({"layer 1 expert 2", "-1"}, [](R&, V& load) { load[14] = -1; });
  refuse({"layer 0 expert 3", "nan"},
         [](R&, V& load) { load[3] = std::numeric_limits<float>::quiet_NaN(); });
  refuse({"inf"}, [](R&, V& load) { load[0] = std::numeric_limits<float>::infinity(); });
  const std::vector<uint8_t> active(8, 1), short_active(7, 1);
  refuse({"active_devices"}, [&](R& r, V&) { r.active_devices = active; });
  refuse(
      {"active_devices", "8", "7"}, [&](R& r, V&) { r.active_devices = short_active; },
      "elasticity_aware");
  ExpectError(ErrorCode::kInvalidArgument, {"best", "deepseek_vec", "auto"},
              [] { ParseEplbAlgorithm("best"); });
}

TEST(Eplb, Utilization) {  // contract 7.4
  EXPECT_DOUBLE_EQ(Utilization(std::vector<double>{2, 2}), 1.0);
  EXPECT_DOUBLE_EQ(Utilization(std::vector<double>{0, 0}), 1.0);
  EXPECT_NEAR(Utilization(std::vector<double>{3, 1}), 2.0 / 3.0, 1e-5);
  EXPECT_DOUBLE_EQ(Utilization({}), 1.0);
}

// ---- locations

TEST(ExpertLocation, TrivialIsModulo) {
  const ExpertLocation location = ExpertLocation::Trivial({2, 4, 6, 3});
  EXPECT_EQ(location.max_replicas(), 2u);
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t p = 0; p < 6; ++p)
      EXPECT_EQ(location.PhysicalToLogical(layer)[p], static_cast<int32_t>(p % 4));
    EXPECT_EQ(location.NumValid(layer)[0], 2);
    EXPECT_EQ(location.NumValid(layer)[2], 1);
    EXPECT_EQ(location.LogicalToAllPhysical(layer)[1], 4);
    EXPECT_EQ(location.LogicalToAllPhysical(layer)[5], -1);
  }
  using enum DispatchAlgorithm;
  for (DispatchAlgorithm algorithm : {kNone, kStatic, kDynamic, kDynamicByRow, kFake})
    EXPECT_NO_THROW(ValidatePlacement(location.Placement(1, 2, algorithm), 4));
}

TEST(ExpertLocation, BadMapsAreRefused) {
  ExpectError(ErrorCode::kInvalidArgument, {"multiple", "6", "4"}, [] {
    ExpertLocation::Trivial({1, 4, 6, 4});
  });
  ExpectError(ErrorCode::kInvalidArgument, {"nodes", "2"}, [] {
    ExpertLocation::Trivial({1, 4, 6, 3, 2});
  });
  ExpectError(ErrorCode::kInvalidArgument, {"4 logical", "3 physical"}, [] {
    ExpertLocation::Trivial({1, 4, 3, 1});
  });
  const std::vector<int32_t> out = {0, 1, 2, 3}, missing = {0, 1, 1, 0}, shorter = {0, 1, 2};
  ExpectError(ErrorCode::kInvalidArgument, {"physical expert 3", "0 to 2", "3"}, [&] {
    ExpertLocation::FromMap({1, 3, 4, 2}, out);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"logical expert 2", "no replica"}, [&] {
    ExpertLocation::FromMap({1, 3, 4, 2}, missing);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"physical_to_logical", "3"}, [&] {
    ExpertLocation::FromMap({1, 3, 4, 2}, shorter);
  });
  ExpertPlan plan{1, 2, 2, 1, {0, 1}, {0, 1}, {1, 1}};
  EXPECT_NO_THROW(ExpertLocation::FromPlan(plan, 1));
  plan.logical_to_physical = {0, 0};
  ExpectError(ErrorCode::kInvalidArgument, {"logical expert 1", "physical expert 0"},
              [&] { ExpertLocation::FromPlan(plan, 1); });
  plan.logical_to_physical = {0, -1};
  ExpectError(ErrorCode::kInvalidArgument, {"physical expert -1"},
              [&] { ExpertLocation::FromPlan(plan, 1); });
}

TEST(ExpertLocation, StaticDispatchPrefersTheNear) {  // contract 7.3
  // 2 nodes of 2 ranks, 2 slots each. Expert 0 on ranks 0, 1, 2; expert 1 on rank 3 alone; expert 2
  // on ranks 0, 1; expert 3 on ranks 2, 3.
  const std::vector<int32_t> map = {0, 2, 0, 2, 0, 3, 1, 3};
  const ExpertLocation location = ExpertLocation::FromMap({1, 4, 8, 4, 2}, map);
  const auto choice = [&](size_t rank, size_t expert) {
    return location.RankDispatch(0, rank)[expert];
  };
  EXPECT_EQ(choice(0, 0), 0) << "its own";
  EXPECT_EQ(choice(1, 0), 2);
  EXPECT_EQ(choice(2, 0), 4);
  EXPECT_EQ(choice(3, 0), 4) << "its node's";
  for (size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(choice(rank, 1), 6) << "the only one";
  // Nothing near: both replicas are drawn once.
  EXPECT_EQ((std::set<int32_t>{choice(2, 2), choice(3, 2)}), (std::set<int32_t>{1, 3}));
  EXPECT_EQ((std::set<int32_t>{choice(0, 3), choice(1, 3)}), (std::set<int32_t>{5, 7}));
}

TEST(ExpertLocation, DrawnRanksAreSpreadEvenly) {
  auto random = testing::MakeRandom(64);
  for (int round = 0; round < 30; ++round) {
    const size_t ranks = 2 + random() % 14, logical = 1 + random() % (ranks * 2);
    std::vector<int32_t> map(ranks * 2);
    for (size_t p = 0; p < map.size(); ++p)
      map[p] = static_cast<int32_t>(p < logical ? p : random() % logical);
    const ExpertLocation location = ExpertLocation::FromMap({1, logical, map.size(), ranks}, map);
    for (size_t e = 0; e < logical; ++e) {
      std::vector<size_t> uses(map.size(), 0);
      for (size_t rank = 0; rank < ranks; ++rank) {
        const auto p = static_cast<size_t>(location.RankDispatch(0, rank)[e]);
        ASSERT_EQ(map[p], static_cast<int32_t>(e));
        const bool has_own = map[rank * 2] == map[p] || map[rank * 2 + 1] == map[p];
        if (has_own) {
          ASSERT_EQ(p / 2, rank);
        } else {
          ++uses[p];
        }
      }
      size_t least = SIZE_MAX, most = 0;
      for (size_t p = 0; p < map.size(); ++p) {
        if (map[p] != static_cast<int32_t>(e)) continue;
        least = std::min(least, uses[p]);
        most = std::max(most, uses[p]);
      }
      EXPECT_LE(most - least, 1u);
    }
  }
}

// ---- recorder

RecorderOptions Options(RecorderMode mode, int64_t buffer_size = 3) {
  RecorderOptions options;
  options.mode = mode;
  options.num_layers = 2;
  options.num_logical = 3;
  options.num_physical = 4;
  options.ep_size = 2;
  options.ep_rank = 1;
  options.buffer_size = buffer_size;
  return options;
}
const std::vector<int32_t> kPlaces = {0, 1, 2, 0, 2, 1, 0, 1};  // [2, 4]

void Record(ExpertRecorder& recorder, size_t layer, const std::vector<int32_t>& ids) {
  recorder.OnPhysicalExperts({layer, ids.size(), 1, ids});
}

TEST(ExpertRecorder, FoldsPhysicalCountsAndIgnoresOtherIds) {
  ExpertRecorder recorder(Options(RecorderMode::kStat), kPlaces);
  recorder.Start();
  recorder.BeginPass(1);
  Record(recorder, 0, {0, 3, 3, 1, -1, 4, 1000, -7});
  Record(recorder, 1, {1, 3});
  recorder.OnDispatchNormal(0, std::vector<int32_t>{9, 9});  // not the source in this mode
  recorder.EndPass();
  const RecordedLoads loads = recorder.Dump();
  ASSERT_EQ(loads.num_steps, 1u);
  EXPECT_EQ(loads.tokens_per_expert, (std::vector<float>{3, 1, 0, 0, 2, 0}));
  EXPECT_EQ(recorder.Pass(0).physical_counts, (std::vector<int32_t>{1, 1, 0, 2, 0, 1, 0, 1}));
  EXPECT_NEAR(recorder.Balancedness(recorder.Pass(0), 0), 1.0, 1e-9);
  EXPECT_EQ(recorder.RankTokens(0), (std::vector<double>{2, 2}));
  EXPECT_NEAR(loads.mean_utilization, 1.0, 1e-9);
}

TEST(ExpertRecorder, TheBufferIsARing) {
  for (int64_t size : {int64_t{1}, int64_t{3}, int64_t{-1}}) {
    ExpertRecorder recorder(Options(RecorderMode::kPerPass, size), kPlaces);
    recorder.Start();
    for (uint64_t pass = 0; pass < 8; ++pass) {
      recorder.BeginPass(pass);
      Record(recorder, 0, std::vector<int32_t>(pass, 2));
      recorder.EndPass();
    }
    const size_t kept = size < 0 ? 8 : static_cast<size_t>(size);
    ASSERT_EQ(recorder.num_passes(), kept);
    for (size_t i = 0; i < kept; ++i) {
      EXPECT_EQ(recorder.Pass(i).pass_id, 8 - kept + i);
      EXPECT_EQ(recorder.Pass(i).physical_counts[2], static_cast<int32_t>(8 - kept + i));
    }
    ExpectError(ErrorCode::kInvalidArgument, {"pass"}, [&] { recorder.Pass(kept); });
    recorder.Clear();
    EXPECT_EQ(recorder.Dump().num_steps, 0u);
  }
}

TEST(ExpertRecorder, ApproximateStatisticsCountWhatArrived) {
  ExpertRecorder recorder(Options(RecorderMode::kStatApprox), kPlaces);
  recorder.Start();
  recorder.BeginPass(0);
  Record(recorder, 0, {0, 0});
  recorder.OnDispatchNormal(0, std::vector<int32_t>{5, 7});
  recorder.OnDispatchLowLatency(1, std::vector<int32_t>{1, 2});
  ExpectError(ErrorCode::kInvalidArgument, {"layer 0", "3 counts", "2"}, [&] {
    recorder.OnDispatchNormal(0, std::vector<int32_t>{1, 2, 3});
  });
  recorder.EndPass();
  EXPECT_EQ(recorder.Pass(0).physical_counts, (std::vector<int32_t>{0, 0, 5, 7, 0, 0, 1, 2}));
}

TEST(ExpertRecorder, PerTokenKeepsIdsOfTheRouter) {
  ExpertRecorder recorder(Options(RecorderMode::kPerToken), kPlaces);
  recorder.Start();
  const ExpertLocation location = ExpertLocation::FromMap({2, 3, 4, 2}, kPlaces);
  const ExpertPlacement placement = location.Placement(1, 1, DispatchAlgorithm::kStatic);
  TopKConfig config = RouterConfig(3, 3);
  config.num_fused_shared_experts = 1;
  config.shared_layout = SharedLayout::kPerRank;
  config.moe_ep_size = 2;
  TopKInputs inputs;
  inputs.placement = &placement;
  inputs.observer = &recorder;
  inputs.layer_id = 1;
  inputs.num_token_non_padded = 1;
  recorder.BeginPass(0);
  Select(config, {{3, 0, 2}, {0, 0, 0}}, inputs);
  recorder.EndPass();
  const RecordedPass& pass = recorder.Pass(0);
  EXPECT_EQ(pass.token_columns[1], 2u);
  EXPECT_EQ(pass.token_ids[1], (std::vector<int32_t>{2, 0, -1, -1}));
  EXPECT_EQ(recorder.Dump().tokens_per_expert, (std::vector<float>{0, 0, 0, 1, 0, 1}));
}

TEST(ExpertRecorder, RecordsOnlyWhenAsked) {
  ExpertRecorder recorder(Options(RecorderMode::kStat), kPlaces);
  recorder.BeginPass(0);
  Record(recorder, 0, {1});
  recorder.EndPass();
  EXPECT_EQ(recorder.num_passes(), 0u);
  recorder.Start();
  Record(recorder, 0, {1});  // outside a pass
  ExpectError(ErrorCode::kFailedPrecondition, {"not begun"}, [&] { recorder.EndPass(); });
  recorder.BeginPass(1);
  ExpectError(ErrorCode::kFailedPrecondition, {"pass 2", "pass 1"}, [&] { recorder.BeginPass(2); });
  ExpectError(ErrorCode::kFailedPrecondition, {"placement"},
              [&] { recorder.SetPlacement(kPlaces); });
  ExpectError(ErrorCode::kInvalidArgument, {"layer 2"}, [&] { Record(recorder, 2, {1}); });
  recorder.AbortPass();
  recorder.BeginPass(3);
  recorder.EndPass();
  EXPECT_EQ(recorder.num_passes(), 1u);
  recorder.SetPlacement(kPlaces);
  EXPECT_EQ(recorder.num_passes(), 0u) << "physical ids of another placement would be misread";
}

TEST(ExpertRecorder, OptionsAreChecked) {
  const auto refuse = [](std::initializer_list<std::string_view> words, auto change) {
    RecorderOptions options = Options(RecorderMode::kStat);
    std::vector<int32_t> places = kPlaces;
    change(options, places);
    ExpectError(ErrorCode::kInvalidArgument, words,
                [&] { ExpertRecorder recorder(options, places); });
  };
  using O = RecorderOptions;
  using V = std::vector<int32_t>;
  refuse({"rank 2 of 2"}, [](O& o, V&) { o.ep_rank = 2; });
  refuse({"multiple"}, [](O& o, V&) { o.ep_size = 3; });
  refuse({"buffer_size", "0"}, [](O& o, V&) { o.buffer_size = 0; });
  refuse({"buffer_size", "-2"}, [](O& o, V&) { o.buffer_size = -2; });
  refuse({"physical_to_logical", "7"}, [](O&, V& places) { places.pop_back(); });
  refuse({"layer 1", "physical expert 0", "3"}, [](O&, V& places) { places[4] = 3; });
  EXPECT_EQ(ParseRecorderMode("stat_approx"), RecorderMode::kStatApprox);
  ExpectError(ErrorCode::kInvalidArgument, {"all", "per_token"}, [] { ParseRecorderMode("all"); });
}

}  // namespace
}  // namespace switchyard::moe
