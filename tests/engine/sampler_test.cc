#include "switchyard/engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard {
namespace {

std::map<int32_t, int> Draws(SamplingOptions options, const std::vector<float>& logits,
                             int count = 4000, const std::vector<int32_t>& history = {}) {
  options.seed = 5;
  Sampler sampler(options);
  std::map<int32_t, int> counts;
  for (int i = 0; i < count; ++i) ++counts[sampler.Sample(logits, history)];
  return counts;
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowerIdOfATie) {
  Sampler sampler({});
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, 5, 5, 2}, {}), 1);
  EXPECT_EQ(sampler.Sample(std::vector<float>{NAN, -3, NAN}, {}), 1) << "NaN is never chosen";
  EXPECT_EQ(sampler.Sample(std::vector<float>{-INFINITY, -INFINITY}, {}), 0);
  testing::ExpectError(ErrorCode::kCorruptData, {"NaN"}, [&] {
    sampler.Sample(std::vector<float>{NAN, NAN}, {});
  });
}

TEST(Sampler, FrequenciesFollowTheSoftmaxAtItsTemperature) {
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f};
  for (double temperature : {0.5, 1.0, 2.0}) {
    const auto counts = Draws({.temperature = temperature}, logits, 20000);
    double sum = 0;
    for (float l : logits) sum += std::exp(l / temperature);
    for (int32_t id = 0; id < 3; ++id) {
      EXPECT_NEAR(counts.at(id) / 20000.0,
                  std::exp(logits[static_cast<size_t>(id)] / temperature) / sum, 0.015);
    }
  }
}

TEST(Sampler, TopKTopPAndMinPDropTheUnlikely) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f),
                                     std::log(0.05f)};
  EXPECT_EQ(Draws({.temperature = 1, .top_k = 2}, logits).size(), 2u);
  EXPECT_EQ(Draws({.temperature = 1, .top_k = 99}, logits).size(), 4u);
  EXPECT_EQ(Draws({.temperature = 1, .top_p = 0.6}, logits).size(), 2u)
      << "0.5 is not enough, 0.8 is";
  EXPECT_EQ(Draws({.temperature = 1, .top_p = 1e-9}, logits).size(), 1u)
      << "the most likely always stays";
  EXPECT_EQ(Draws({.temperature = 1, .min_p = 0.25}, logits).size(), 3u);
}

// A vocabulary of which few are looked at: the draws are those of a plain walk down the sorted
// candidates.
TEST(Sampler, DrawsAreThoseOfAFullSort) {
  auto random = testing::MakeRandom(3);
  std::vector<float> logits = testing::RandomFloats(random, 3000, 3.0f);
  logits[2999] = logits[17];  // a tie
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = 1}, SamplingOptions{.temperature = 2, .top_p = 0.99},
        SamplingOptions{.temperature = 1, .top_p = 0.9, .min_p = 0.01},
        SamplingOptions{.temperature = 50, .top_p = 0.999}}) {
    std::vector<double> weights;
    for (size_t id : order)
      weights.push_back(
          std::exp((double{logits[id]} - double{logits[order[0]]}) / options.temperature));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    size_t keep = 0;
    double sum = 0;
    while (keep < order.size() &&
           (keep == 0 || (sum < options.top_p * total - 1e-9 && weights[keep] >= options.min_p)))
      sum += weights[keep++];
    Sampler sampler(options);
    std::mt19937_64 numbers(options.seed);
    for (int draw = 0; draw < 200; ++draw) {
      double target = static_cast<double>(numbers() >> 11) * 0x1p-53 * sum;
      size_t i = 0;
      while (i + 1 < keep && (target -= weights[i]) >= 0) ++i;
      ASSERT_EQ(sampler.Sample(logits, {}), static_cast<int32_t>(order[i])) << draw;
    }
  }
}

TEST(Sampler, PenaltiesLowerWhatOccurred) {
  Sampler repeat({.repeat_penalty = 4.0});
  EXPECT_EQ(repeat.Sample(std::vector<float>{8, 3, -1}, std::vector<int32_t>{0}), 1);
  Sampler negative({.repeat_penalty = 2.0});
  EXPECT_EQ(negative.Sample(std::vector<float>{-1, -1.5f}, std::vector<int32_t>{0}), 1)
      << "negative logits are multiplied";
  Sampler presence({.presence_penalty = 2.0});
  EXPECT_EQ(presence.Sample(std::vector<float>{5, 4}, std::vector<int32_t>{0, 0, 0}), 1);
  Sampler frequency({.frequency_penalty = 0.6});
  EXPECT_EQ(frequency.Sample(std::vector<float>{5, 4}, std::vector<int32_t>{0}), 0);
  EXPECT_EQ(frequency.Sample(std::vector<float>{5, 4}, std::vector<int32_t>{0, 0}), 1);
}

TEST(Sampler, OneSeedOneSequence) {  // bug-log 86
  const std::vector<float> logits = {0, 1, 2, 3, 2, 1};
  Sampler a({.temperature = 1, .seed = 7});
  Sampler other({.temperature = 1, .seed = 8});
  Sampler b({.temperature = 1, .seed = 7});
  int differs = 0;
  for (int i = 0; i < 100; ++i) {
    const int32_t drawn = a.Sample(logits, {});
    differs += drawn != other.Sample(logits, {});
    EXPECT_EQ(b.Sample(logits, {}), drawn);
  }
  EXPECT_GT(differs, 10);
}

TEST(Sampler, OptionsOutOfRangeAreNamed) {
  using testing::ExpectError;
  ExpectError(ErrorCode::kInvalidArgument, {"temperature", "-1"},
              [] { Sampler({.temperature = -1}); });
  ExpectError(ErrorCode::kInvalidArgument, {"temperature"}, [] { Sampler({.temperature = NAN}); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_p", "0"}, [] { Sampler({.top_p = 0}); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_p", "1.5"}, [] { Sampler({.top_p = 1.5}); });
  ExpectError(ErrorCode::kInvalidArgument, {"min_p"}, [] { Sampler({.min_p = 1}); });
  ExpectError(ErrorCode::kInvalidArgument, {"repeat_penalty"},
              [] { Sampler({.repeat_penalty = 0}); });
}

}  // namespace
}  // namespace switchyard
