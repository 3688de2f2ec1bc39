// Contract 2: scores, choice, order, ties, NaN, padding, renormalisation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "moe/routing_case.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

TopKConfig Config(size_t experts, size_t top_k, ScoringFunc scoring = ScoringFunc::kSoftmax,
                  bool renormalize = true) {
  return RouterConfig(experts, top_k, scoring, renormalize);
}

// Scores plus bias in f64, written independently of the selection.
std::vector<double> ChoiceValues(const TopKConfig& config, const std::vector<float>& logits) {
  std::vector<double> values(logits.begin(), logits.end());
  double sum = 0;
  for (double l : values) sum += std::exp(l);
  for (size_t e = 0; e < values.size(); ++e) {
    values[e] = config.scoring_func == ScoringFunc::kSoftmax ? std::exp(values[e]) / sum
                                                             : 1 / (1 + std::exp(-values[e]));
    if (!config.correction_bias.empty()) values[e] += config.correction_bias[e];
  }
  return values;
}

TEST(Routing, SoftmaxRunsOverAllExpertsBeforeTheChoice) {  // bug-log 1, 2
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f, -1.0f};
  double sum = 0;
  for (float l : logits) sum += std::exp(l);
  const Routing plain = Select(Config(4, 2, ScoringFunc::kSoftmax, false), {logits});
  EXPECT_EQ(plain.ids[0], (std::vector<int32_t>{1, 2}));
  EXPECT_NEAR(plain.weights[0][0], std::exp(3.0) / sum, 1e-6);
  EXPECT_NEAR(plain.weights[0][1], std::exp(2.0) / sum, 1e-6);
  const Routing normal = Select(Config(4, 2), {logits});
  EXPECT_NEAR(normal.weights[0][0], std::exp(3.0) / (std::exp(3.0) + std::exp(2.0)), 1e-6);
  EXPECT_NEAR(normal.weights[0][0] + normal.weights[0][1], 1.0, 1e-6);
}

TEST(Routing, TiesGoToTheLowerIdAndColumnsDescend) {
  const Routing routing = Select(Config(6, 4), {{0.5f, 2.0f, 0.5f, 2.0f, 0.5f, 1.0f}});
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{1, 3, 5, 0}));
  const Routing equal = Select(Config(5, 5), {{0, 0, 0, 0, 0}});
  EXPECT_EQ(equal.ids[0], (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

TEST(Routing, ABiasChoosesAndNeverWeighs) {     // bug-log 3
  const float logit = std::log(0.01f / 0.99f);  // sigmoid = 0.01
  const std::vector<float> bias = {10.0f, 0.0f, 0.0f};
  TopKConfig config = Config(3, 1, ScoringFunc::kSigmoid, false);
  config.correction_bias = bias;
  const Routing routing = Select(config, {{logit, 2.0f, 1.0f}});
  EXPECT_EQ(routing.ids[0][0], 0);
  EXPECT_NEAR(routing.weights[0][0], 0.01, 1e-6);
}

TEST(Routing, TopOneNormalisesOverExpertsNotTokens) {  // bug-log 12
  const std::vector<std::vector<float>> logits = {
      {1, 2, 3}, {3, 2, 1}, {0, 5, 0}, {1, 1, 1}, {-1, -2, -9}};
  const Routing normal = Select(Config(3, 1), logits);
  for (const auto& weights : normal.weights) EXPECT_EQ(weights[0], 1.0f);
  const Routing plain = Select(Config(3, 1, ScoringFunc::kSoftmax, false), logits);
  EXPECT_LT(plain.weights[0][0], 1.0f);
  EXPECT_EQ(Select(Config(3, 1, ScoringFunc::kSoftmax, false), {logits[2]}).weights[0][0],
            plain.weights[2][0]);
}

TEST(Routing, NanRanksLastAndIdsStayDistinct) {  // bug-log 9, contract 2.4
  const float nan = std::numeric_limits<float>::quiet_NaN();
  TopKConfig config = Config(4, 2, ScoringFunc::kSigmoid);
  EXPECT_EQ(Select(config, {{nan, 1.0f, nan, 0.0f}}).ids[0], (std::vector<int32_t>{1, 3}));
  for (ScoringFunc scoring : {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid}) {
    const Routing all = Select(Config(6, 4, scoring), {std::vector<float>(6, nan)});
    EXPECT_EQ(std::set<int32_t>(all.ids[0].begin(), all.ids[0].end()).size(), 4u);
    for (int32_t id : all.ids[0]) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, 6);
    }
  }
}

TEST(Routing, InfiniteAndHugeLogitsStayFinite) {
  const Routing routing = Select(Config(4, 2), {{1e30f, -1e30f, 88.0f, 3e38f}});
  EXPECT_EQ(routing.ids[0][0], 3);
  EXPECT_NEAR(routing.weights[0][0], 1.0, 1e-6);
  const Routing small = Select(Config(3, 2, ScoringFunc::kSigmoid), {{-1e4f, -2e4f, -3e4f}});
  for (float weight : small.weights[0])
    EXPECT_EQ(weight, 0.0f) << "all scores underflow: 0, not NaN";
}

TEST(Routing, PaddedRowsAreMinusOneWithWeightZero) {
  const Routing routing = Select(Config(3, 2), {{1, 2, 3}, {NAN, NAN, NAN}}, 1);
  EXPECT_EQ(routing.ids[0], (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(routing.ids[1], (std::vector<int32_t>{-1, -1}));
  EXPECT_EQ(routing.weights[1], (std::vector<float>{0, 0}));
}

TEST(Routing, NoTokens) { EXPECT_TRUE(Select(Config(3, 2), {}).ids.empty()); }

// Bug-log 5, 20: odd numbers of experts, every k, any batch length, against the f64 selection.
TEST(Routing, SweepAgainstTheReference) {
  auto random = testing::MakeRandom(31);
  for (size_t experts : {1u, 2u, 6u, 8u, 60u, 64u, 72u, 128u, 160u, 256u, 384u}) {
    for (size_t top_k : {1u, 2u, 4u, 6u, 8u, 10u, 16u, 17u, 33u}) {
      if (top_k > experts) continue;
      for (ScoringFunc scoring : {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid}) {
        for (bool with_bias : {false, true}) {
          const std::vector<float> bias = testing::RandomFloats(random, experts, 0.1f);
          TopKConfig config = Config(experts, top_k, scoring, random() % 2 == 0);
          if (with_bias) config.correction_bias = bias;
          std::vector<std::vector<float>> logits;
          for (int t = 0; t < 19; ++t)
            logits.push_back(testing::RandomFloats(random, experts, 2.0f));
          const Routing many = Select(config, logits, SIZE_MAX, 3);
          EXPECT_EQ(Select(config, {logits[0]}).weights[0], many.weights[0]) << "row 0 alone";
          for (size_t t = 0; t < logits.size(); ++t) {
            std::vector<int32_t> ids(top_k);
            std::vector<double> weights(top_k);
            SelectExpertsReference(config, logits[t].data(), ids.data(), weights.data());
            // Two experts whose scores differ by less than f32 can tell may change places.
            const std::vector<double> choice = ChoiceValues(config, logits[t]);
            for (size_t k = 0; k < top_k; ++k) {
              const int32_t id = many.ids[t][k];
              ASSERT_NEAR(choice[static_cast<size_t>(id)], choice[static_cast<size_t>(ids[k])],
                          1e-6)
                  << experts << " experts, top " << top_k;
              if (id == ids[k]) {
                ASSERT_NEAR(many.weights[t][k], weights[k], 3e-6);
              }
            }
            ASSERT_EQ(std::set<int32_t>(many.ids[t].begin(), many.ids[t].end()).size(), top_k);
          }
        }
      }
    }
  }
}

// The selection itself, against a sort that shares no code with it.
TEST(Routing, TheChoiceIsThatOfAStableSort) {
  auto random = testing::MakeRandom(32);
  for (int round = 0; round < 300; ++round) {
    const size_t experts = 1 + random() % 40;
    const size_t top_k = 1 + random() % experts;
    std::vector<float> logits(experts);
    for (float& l : logits) l = static_cast<float>(random() % 7);  // many ties
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    order.resize(top_k);
    ASSERT_EQ(Select(Config(experts, top_k), {logits}).ids[0], order);
  }
}

TEST(Routing, ImpossibleConfigsAreRefusedByName) {  // bug-log 11
  testing::ExpectError(ErrorCode::kInvalidArgument, {"top_k", "1 to 8", "9"},
                       [] { ValidateTopK(Config(8, 9)); });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"top_k", "found 0"},
                       [] { ValidateTopK(Config(8, 0)); });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"num_experts"},
                       [] { ValidateTopK(Config(0, 0)); });
  const std::vector<float> bias(7);
  TopKConfig config = Config(8, 2);
  config.correction_bias = bias;
  testing::ExpectError(ErrorCode::kInvalidArgument, {"bias", "8", "7"},
                       [&] { ValidateTopK(config); });
}

}  // namespace
}  // namespace switchyard::moe
