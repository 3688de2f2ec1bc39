// A whole step: shapes, layouts, sweeps.
#include "switchyard/simulate/predict.h"

#include <gtest/gtest.h>

#include <cmath>

#include "switchyard/model/shapes.h"
#include "testing/errors.h"

namespace switchyard::simulate {
namespace {

using testing::ExpectError;

SimulationRequest Request(std::string_view shape, size_t ranks, size_t nodes) {
  SimulationRequest request;
  request.shape = FindShape(shape);
  request.link = DefaultLink();
  request.routing = UniformShares(request.shape.num_experts, request.shape.top_k);
  request.num_ranks = ranks;
  request.num_nodes = nodes;
  return request;
}

double TotalParams(const ModelShape& shape) {
  const double moe = static_cast<double>(shape.moe_layers);
  const double dense = static_cast<double>(shape.dense_layers);
  return moe * (static_cast<double>(shape.num_experts) * shape.expert_params() +
                shape.shared_params) +
         dense * shape.dense_params + (moe + dense) * shape.attention_params +
         2 * shape.head_params;
}

TEST(Shape, HaveTheParametersOfTheirNames) {
  EXPECT_NEAR(TotalParams(FindShape("olmoe-1b-7b")) / 1e9, 6.9, 0.1);
  EXPECT_NEAR(TotalParams(FindShape("qwen3-30b-a3b")) / 1e9, 30.5, 0.2);
  EXPECT_NEAR(TotalParams(FindShape("qwen3-235b-a22b")) / 1e9, 235, 1);
  EXPECT_NEAR(TotalParams(FindShape("mixtral-8x7b")) / 1e9, 46.7, 0.2);
  EXPECT_NEAR(TotalParams(FindShape("deepseek-v3")) / 1e9, 671, 2);
}

TEST(Shape, SchemesChangeTheBytesOfExperts) {
  EXPECT_EQ(FindShape("olmoe-1b-7b").scheme, "bf16");
  EXPECT_EQ(FindShape("olmoe-1b-7b").expert_bytes(), 2.0 * 3 * 2048 * 1024);
  EXPECT_EQ(FindShape("olmoe-1b-7b:w4a8_int").expert_bytes(), 0.5 * 3 * 2048 * 1024);
  EXPECT_NEAR(FindShape("deepseek-v3:fp8_block").expert_bytes() / 1e6, 44.05, 0.01);
  for (const std::string_view name : KnownShapes()) EXPECT_EQ(FindShape(name).name, name);
}

TEST(Shape, RefusalsListWhatThereIs) {
  ExpectError(ErrorCode::kNotFound,
              {"\"olmo-1b-7b\"", "did you mean \"olmoe-1b-7b\"", "deepseek-v3", "mixtral-8x7b"},
              [] { FindShape("olmo-1b-7b"); });
  ExpectError(ErrorCode::kNotFound, {"known:"}, [] { FindShape(""); });
  ExpectError(ErrorCode::kUnsupported, {"int3", "bf16", "fp8_block"},
              [] { FindShape("olmoe-1b-7b:int3"); });
}

TEST(Predict, OneRankExchangesNothing) {
  const Prediction one = Predict(Request("olmoe-1b-7b", 1, 1));
  for (const StepPrediction& step : one.steps) {
    EXPECT_EQ(step.exchange_us, 0);
    EXPECT_NEAR(step.step_us, 16 * step.experts_us + one.other_us, 1e-6);
    EXPECT_NEAR(step.tokens_per_s, 128 / step.step_us * 1e6, 1e-6);
  }
  EXPECT_EQ(one.experts_per_rank, 64u);
  EXPECT_NEAR(one.weight_bytes / 1e9, 13.8, 0.2);
}

// Few tokens read every wanted expert once; many are a matter of arithmetic.
TEST(Predict, ExpertsAreBoundByBytesOrOperations) {
  SimulationRequest request = Request("olmoe-1b-7b", 1, 1);
  const double bytes = request.shape.expert_bytes();
  request.tokens = 1;
  const double row = 4.0 * 2048;  // read and written, bf16
  EXPECT_NEAR(Predict(request).steps[0].experts_us, 8 * (bytes + row) / 48e3, 0.01);
  request.tokens = 4096;
  EXPECT_NEAR(Predict(request).steps[0].experts_us,
              4096 * 8 * 2 * request.shape.expert_params() / 300e3, 1);
}

TEST(Predict, AnIdleStepStillExchangesCounts) {
  SimulationRequest request = Request("olmoe-1b-7b", 8, 2);
  request.tokens = 0;
  const Prediction idle = Predict(request);
  EXPECT_EQ(idle.other_us, 0);
  EXPECT_EQ(idle.balance.mean, 1);
  for (const StepPrediction& step : idle.steps) {
    EXPECT_EQ(step.experts_us, 0);
    EXPECT_EQ(step.dispatch.off_rank_bytes, 0);
    EXPECT_EQ(step.tokens_per_s, 0);
    EXPECT_GT(step.step_us, 0);
  }
}

TEST(Predict, StepsAreTheSumOfTheirParts) {
  const SimulationRequest request = Request("deepseek-v3:fp8_block", 32, 4);
  const Prediction prediction = Predict(request);
  ASSERT_EQ(prediction.steps.size(), 2u);
  EXPECT_EQ(prediction.dispatch_row_bytes, 7488u);
  EXPECT_EQ(prediction.experts_per_rank, 8u);
  for (const StepPrediction& step : prediction.steps) {
    EXPECT_NEAR(step.step_us, 58 * step.moe_layer_us() + prediction.other_us, 1e-6);
    EXPECT_NEAR(step.exchange_us, 58 * (step.dispatch.total_us() + step.combine.total_us()), 1e-6);
  }
  EXPECT_NEAR(prediction.steps[0].dispatch.total_us(), 2217, 0.51) << "the table of the design";
  EXPECT_NEAR(prediction.steps[1].dispatch.total_us(), 1372, 0.51);
  EXPECT_GT(prediction.steps[1].tokens_per_s, prediction.steps[0].tokens_per_s);
}

TEST(Predict, LowLatencyHasSlotsOnly) {
  SimulationRequest request = Request("deepseek-v3", 32, 4);
  request.low_latency = true;
  const Prediction prediction = Predict(request);
  ASSERT_EQ(prediction.steps.size(), 1u);
  EXPECT_EQ(prediction.steps[0].scheme, ExchangeScheme::kSlots);
  EXPECT_NEAR(prediction.steps[0].dispatch.total_us(), 2431, 0.51);
  EXPECT_EQ(prediction.steps[0].dispatch.counts_us, 0);
}

TEST(Predict, SkewSlowsDownAndReplicasHelp) {
  SimulationRequest request = Request("qwen3-30b-a3b", 32, 4);
  const double even = Predict(request).steps[0].step_us;
  request.routing = ZipfShares(128, 8, 48, 0.8, 1);
  const Prediction skewed = Predict(request);
  request.redundant = 32;
  const Prediction balanced = Predict(request);
  EXPECT_GT(skewed.balance.mean, 1.5);
  EXPECT_GE(skewed.balance.worst, skewed.balance.mean);
  EXPECT_LT(balanced.balance.mean, 1.3);
  EXPECT_GT(skewed.steps[0].step_us, balanced.steps[0].step_us);
  EXPECT_GT(balanced.steps[0].step_us, even);
  EXPECT_EQ(balanced.experts_per_rank, 5u);
  EXPECT_NEAR(skewed.balance.rows, 128 * 8, 1e-6) << "skew moves rows, it makes none";
}

// A file of fewer layers than the model goes round.
TEST(Predict, LayersOfTheRoutingAreWeighted) {
  SimulationRequest request = Request("tiny-qwen3moe", 4, 1);
  const std::vector<double> even(8, 0.25), hot = {1, 1, 0, 0, 0, 0, 0, 0};
  request.routing.layers = {hot};
  EXPECT_NEAR(Predict(request).balance.mean, 4, 1e-9);
  request.routing.layers = {hot, even};
  EXPECT_NEAR(Predict(request).balance.mean, 2.5, 1e-9);
  EXPECT_NEAR(Predict(request).balance.worst, 4, 1e-9);
  request.routing.layers = {even, even, hot};
  EXPECT_NEAR(Predict(request).balance.worst, 1, 1e-9) << "the model has two layers";
}

TEST(Predict, ReplicatedAttentionComputesAllTokensAndGathersThem) {
  SimulationRequest request = Request("qwen3-30b-a3b", 16, 2);
  const Prediction own = Predict(request);
  request.attention = AttentionMode::kReplicated;
  const Prediction all = Predict(request);
  EXPECT_EQ(own.gather_us, 0);
  EXPECT_GT(all.gather_us, 0);
  EXPECT_GT(all.other_us, 5 * own.other_us);
  EXPECT_EQ(all.steps[0].dispatch.total_us(), own.steps[0].dispatch.total_us());
}

TEST(Predict, RefusesWhatCannotBe) {
  const auto refuse = [](auto change, std::initializer_list<std::string_view> words) {
    SimulationRequest request = Request("olmoe-1b-7b", 8, 2);
    change(request);
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { Predict(request); });
  };
  using Q = SimulationRequest;
  refuse([](Q& q) { q.num_ranks = 0; }, {"--ep", "1 to 4096", "found 0"});
  refuse([](Q& q) { q.num_ranks = 8192; }, {"--ep", "4096", "8192"});
  refuse([](Q& q) { q.num_nodes = 0; }, {"--nodes", "1 to 8"});
  refuse([](Q& q) { q.num_nodes = 16; }, {"--nodes", "1 to 8"});
  refuse([](Q& q) { q.num_nodes = 3; }, {"8 ranks", "3 nodes"});
  refuse([](Q& q) { q.num_ranks = 6; }, {"64 experts", "6 ranks", "--redundant 2 "});
  refuse([](Q& q) { q.redundant = 1; }, {"64 experts", "1 redundant", "--redundant 8 "});
  refuse([](Q& q) { q.redundant = 1u << 30; }, {"--redundant"});
  refuse([](Q& q) { q.tokens = size_t{1} << 40; }, {"--tokens"});
  refuse([](Q& q) { q.context = size_t{1} << 40; }, {"--context"});
  refuse([](Q& q) { q.shape.top_k = 65; }, {"olmoe-1b-7b", "1 to 64", "65"});
  refuse([](Q& q) { q.shape.top_k = 0; }, {"olmoe-1b-7b", "1 to 64"});
  refuse([](Q& q) { q.routing = UniformShares(128, 8); }, {"128 experts", "64"});
  refuse([](Q& q) { q.routing.layers.clear(); }, {"no layers"});
}

TEST(Sweep, GoesFromTwoRanksTo4096) {
  const std::vector<Prediction> points = Sweep(Request("olmoe-1b-7b", 16, 2), kMaxRanks);
  ASSERT_EQ(points.size(), 12u);
  EXPECT_EQ(points[0].num_ranks, 2u);
  EXPECT_EQ(points[0].num_nodes, 1u);
  EXPECT_EQ(points[3].num_nodes, 2u) << "8 ranks on a node";
  EXPECT_EQ(points[11].num_ranks, 4096u);
  EXPECT_EQ(points[11].num_nodes, 512u);
  EXPECT_EQ(points[11].redundant, 4032u);
  EXPECT_EQ(points[11].experts_per_rank, 1u);
  for (size_t i = 1; i < points.size(); ++i) {
    EXPECT_GT(points[i].steps[0].tokens_per_s, points[i - 1].steps[0].tokens_per_s) << i;
    EXPECT_NEAR(points[i].balance.worst, 1, 1e-5);
    EXPECT_GE(points[i].steps[0].exchange_share(), 0);
    EXPECT_LE(points[i].steps[0].exchange_share(), 1);
  }
}

TEST(Sweep, NodesNeedNotBePowersOfTwo) {
  const std::vector<Prediction> points = Sweep(Request("qwen3-30b-a3b", 12, 2), 48);
  std::vector<size_t> ranks;
  for (const Prediction& point : points) ranks.push_back(point.num_ranks);
  EXPECT_EQ(ranks, (std::vector<size_t>{2, 4, 6, 12, 24, 48}));
  EXPECT_EQ(points[2].num_nodes, 1u);
  EXPECT_EQ(points[5].num_nodes, 8u);
}

TEST(Sweep, RefusesWhatCannotBe) {
  ExpectError(ErrorCode::kInvalidArgument, {"2 to 4096", "1"},
              [] { Sweep(Request("olmoe-1b-7b", 8, 1), 1); });
  ExpectError(ErrorCode::kInvalidArgument, {"2 to 4096"},
              [] { Sweep(Request("olmoe-1b-7b", 8, 1), 5000); });
}

TEST(Assumptions, NameWhatWasAssumed) {
  SimulationRequest request = Request("olmoe-1b-7b", 8, 1);
  request.link.dispatch_fixed_us = 42;
  std::string all;
  for (const std::string& line : Assumptions(request)) all += line + "\n";
  for (const char* word : {"built-in", "25 GB/s", "per node", "13 GB/s", "300 GFLOP/s", "48 GB/s",
                           "128 tokens", "1024 keys", "uniform", "fp8", "42 us"})
    EXPECT_NE(all.find(word), std::string::npos) << word;
}

}  // namespace
}  // namespace switchyard::simulate
