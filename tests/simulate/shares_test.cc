// Which experts are chosen, where they are, and whom a token reaches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "switchyard/simulate/routing.h"
#include "testing/errors.h"

namespace switchyard::simulate {
namespace {

using testing::ExpectError;

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// x (1 - C(E - E/x, k) / C(E, k)) with the binomials written out.
double DistinctByBinomials(double x, double e, double k) {
  const auto log_choose = [](double n, double m) {
    return std::lgamma(n + 1) - std::lgamma(m + 1) - std::lgamma(n - m + 1);
  };
  const double rest = e - e / x;
  return rest < k ? x : x * (1 - std::exp(log_choose(rest, k) - log_choose(e, k)));
}

TEST(DistinctGroups, AreTheClosedForm) {
  for (size_t x : {1u, 2u, 4u, 32u, 256u})
    for (size_t k : {1u, 2u, 8u, 64u}) {
      EXPECT_NEAR(DistinctGroups(x, 256, k),
                  DistinctByBinomials(static_cast<double>(x), 256, static_cast<double>(k)), 1e-6)
          << x << " " << k;
    }
  EXPECT_DOUBLE_EQ(DistinctGroups(1, 8, 2), 1);
  EXPECT_DOUBLE_EQ(DistinctGroups(4, 8, 8), 4) << "all experts are chosen";
  EXPECT_NEAR(DistinctGroups(32, 256, 8), 7.27, 0.005) << "the table of the design";
  EXPECT_NEAR(DistinctGroups(4, 256, 8), 3.61, 0.005);
}

TEST(DistinctGroups, RefuseWhatCannotBe) {
  ExpectError(ErrorCode::kInvalidArgument, {"256", "3"}, [] { DistinctGroups(3, 256, 8); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_k", "8", "9"}, [] { DistinctGroups(1, 8, 9); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_k", "0"}, [] { DistinctGroups(1, 8, 0); });
}

TEST(Reach, OfUniformRoutingIsTheClosedForm) {
  const std::vector<double> shares = UniformShares(256, 8).layers[0];
  const Reach reach = ComputeReach(shares, 32, 4, 8);
  EXPECT_EQ(reach.ranks_per_node, 8u);
  EXPECT_NEAR(Sum(reach.rank), DistinctGroups(32, 256, 8), 1e-9);
  EXPECT_NEAR(Sum(reach.node), DistinctGroups(4, 256, 8), 1e-9);
  EXPECT_NEAR(Sum(reach.rows), 8, 1e-9);
}

TEST(Reach, OfOneRankIsCertain) {
  const Reach reach = ComputeReach(UniformShares(8, 2).layers[0], 1, 1, 2);
  EXPECT_EQ(reach.rank, std::vector<double>{1});
  EXPECT_EQ(reach.node, std::vector<double>{1});
}

TEST(Reach, OfSingleExpertsIsTheirShare) {
  const std::vector<double> shares = ZipfShares(64, 8, 1, 1.2, 3).layers[0];
  const Reach reach = ComputeReach(shares, 64, 8, 8);
  for (size_t r = 0; r < 64; ++r) EXPECT_NEAR(reach.rank[r], shares[r], 1e-12) << r;
}

// Draws k distinct experts in proportion to weights and compares what is reached with the estimate
// from the shares that came out.
TEST(Reach, OfSkewedRoutingIsNearToADraw) {
  constexpr size_t kExperts = 64, kTopK = 4, kTokens = 20000, kRanks = 8;
  std::vector<double> weights(kExperts);
  for (size_t e = 0; e < kExperts; ++e) weights[e] = 1 / std::sqrt(1.0 + static_cast<double>(e));
  std::mt19937_64 random(5);
  std::discrete_distribution<size_t> draw(weights.begin(), weights.end());
  std::vector<double> shares(kExperts), reached(kRanks);
  for (size_t t = 0; t < kTokens; ++t) {
    std::set<size_t> experts, ranks;
    while (experts.size() < kTopK) experts.insert(draw(random));
    for (size_t e : experts) {
      shares[e] += 1.0 / kTokens;
      ranks.insert(e / (kExperts / kRanks));
    }
    for (size_t r : ranks) reached[r] += 1.0 / kTokens;
  }
  const Reach reach = ComputeReach(shares, kRanks, 2, kTopK);
  for (size_t r = 0; r < kRanks; ++r) EXPECT_NEAR(reach.rank[r], reached[r], 0.04) << r;
  EXPECT_GT(reached[0], 2 * reached[kRanks - 1]) << "the draw is skewed at all";
}

TEST(Zipf, SharesAddUpAndAreTheSameForTheSameSeed) {
  const ExpertShares a = ZipfShares(128, 8, 3, 1.0, 7), b = ZipfShares(128, 8, 3, 1.0, 7);
  EXPECT_EQ(a.layers, b.layers);
  EXPECT_NE(a.layers, ZipfShares(128, 8, 3, 1.0, 8).layers);
  ASSERT_EQ(a.layers.size(), 3u);
  EXPECT_NE(a.layers[0], a.layers[1]) << "other experts are wanted in every layer";
  for (const std::vector<double>& layer : a.layers) {
    EXPECT_NEAR(Sum(layer), 8, 1e-9);
    for (double share : layer) EXPECT_TRUE(share > 0 && share <= 1) << share;
  }
  const ExpertShares even = ZipfShares(128, 8, 1, 0, 1);
  for (double share : even.layers[0]) EXPECT_NEAR(share, 1.0 / 16, 1e-12);
  const std::vector<double> steep = ZipfShares(16, 4, 1, 8, 1).layers[0];
  EXPECT_NEAR(Sum(steep), 4, 1e-9);
  EXPECT_EQ(*std::max_element(steep.begin(), steep.end()), 1) << "no more than all tokens";
}

TEST(Zipf, RefusesWhatCannotBe) {
  ExpectError(ErrorCode::kInvalidArgument, {"exponent", "-1"}, [] { ZipfShares(8, 2, 1, -1, 0); });
  ExpectError(ErrorCode::kInvalidArgument, {"exponent"}, [] { ZipfShares(8, 2, 1, NAN, 0); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_k", "8"}, [] { ZipfShares(8, 9, 1, 1, 0); });
  ExpectError(ErrorCode::kInvalidArgument, {"top_k"}, [] { UniformShares(8, 0); });
}

constexpr const char* kRecorded = R"({"model": "m", "routing": {"tokens": 10, "experts": 4,
  "experts_per_token": 2, "even_share": 5.0, "layers": [
    {"layer": 0, "tokens": [10, 6, 4, 0]}, {"layer": 2, "tokens": [5, 5, 5, 5]}]}})";

TEST(Recorded, BecomesShares) {
  const ExpertShares shares = ReadShares("routing.json", kRecorded, 4, 2);
  EXPECT_EQ(shares.description, "routing.json");
  EXPECT_EQ(shares.layers,
            (std::vector<std::vector<double>>{{1, 0.6, 0.4, 0}, {0.5, 0.5, 0.5, 0.5}}));
}

TEST(Recorded, RefusesWhatIsNotSuchAFile) {
  const auto refuse = [](ErrorCode code, const std::string& text,
                         std::initializer_list<std::string_view> words) {
    ExpectError(code, words, [&] { ReadShares("r.json", text, 4, 2); });
  };
  const auto with = [](const std::string& from, const std::string& to) {
    std::string text = kRecorded;
    return text.replace(text.find(from), from.size(), to);
  };
  refuse(ErrorCode::kCorruptData, "{", {"r.json"});
  refuse(ErrorCode::kCorruptData, "[]", {"r.json", "routing"});
  refuse(ErrorCode::kCorruptData, R"({"routing": {}})", {"r.json", "tokens"});
  refuse(ErrorCode::kCorruptData, with("[10, 6, 4, 0]", "[10, 6, 4]"), {"layers[0]", "4 counts"});
  refuse(ErrorCode::kCorruptData, with("[10, 6, 4, 0]", "[11, 6, 4, 0]"),
         {"layers[0]", "expert 0", "11", "10"});
  refuse(ErrorCode::kCorruptData, with("[10, 6, 4, 0]", "[-1, 6, 4, 0]"), {"layers[0]", "whole"});
  refuse(ErrorCode::kCorruptData, with("[10, 6, 4, 0]", "7"), {"layers[0]"});
  refuse(ErrorCode::kCorruptData, with("\"tokens\": 10", "\"tokens\": 0"), {"one token"});
  refuse(ErrorCode::kInvalidArgument, with("\"experts\": 4", "\"experts\": 64"), {"r.json", "64"});
  refuse(ErrorCode::kInvalidArgument, with("_token\": 2", "_token\": 1"), {"r.json", "1 of 4"});
}

TEST(Placement, WithoutRedundancyKeepsTheOrder) {
  const std::vector<double> experts = {0.5, 0.2, 0.9, 0.4};
  EXPECT_EQ(PlaceExperts(experts, 2, std::nullopt), experts);
}

TEST(Placement, RedundancyEvensOutTheRanks) {
  const std::vector<double> experts = ZipfShares(64, 8, 1, 1.0, 1).layers[0];
  const auto imbalance = [&](std::optional<size_t> redundant) {
    return MaxOverMean(ComputeReach(PlaceExperts(experts, 16, redundant), 16, 2, 8).rows);
  };
  EXPECT_GT(imbalance(std::nullopt), 1.5);
  EXPECT_LT(imbalance(0), imbalance(std::nullopt)) << "placing by load alone helps";
  EXPECT_LT(imbalance(16), imbalance(0));
  EXPECT_LT(imbalance(64), 1.05);
  EXPECT_NEAR(Sum(PlaceExperts(experts, 16, 32)), 8, 1e-5) << "replicas share, nothing is lost";
}

TEST(Placement, RefusalsSayWhatWouldDo) {
  const std::vector<double> experts = UniformShares(64, 8).layers[0];
  ExpectError(ErrorCode::kInvalidArgument, {"64 experts", "48 ranks", "--redundant 32 "},
              [&] { PlaceExperts(experts, 48, std::nullopt); });
  ExpectError(ErrorCode::kInvalidArgument, {"64 experts", "128 ranks", "--redundant 64 "},
              [&] { PlaceExperts(experts, 128, 0); });
  EXPECT_EQ(FittingRedundancy(64, 48, 0), 32u);
  EXPECT_EQ(FittingRedundancy(64, 32, 0), 0u);
  EXPECT_EQ(FittingRedundancy(64, 32, 1), 32u);
  EXPECT_EQ(FittingRedundancy(64, 4096, 0), 4032u);
  ExpectError(ErrorCode::kInvalidArgument, {"32 ranks", "5 nodes"},
              [&] { ComputeReach(experts, 32, 5, 8); });
}

TEST(MaxOverMean, OfNothingIsOne) {
  EXPECT_EQ(MaxOverMean(std::vector<double>{0, 0}), 1);
  EXPECT_EQ(MaxOverMean(std::vector<double>{1, 3}), 1.5);
}

}  // namespace
}  // namespace switchyard::simulate
