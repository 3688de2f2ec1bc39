// The layouts of the dispatch protocols, as pure functions.
#include <gtest/gtest.h>

#include "moe/dispatchers/layout.h"
#include "testing/errors.h"

namespace switchyard::moe::dispatchers {
namespace {

using testing::ExpectError;
using Ints = std::vector<int32_t>;

// Ids with weights 1, 2, 3, … by route.
struct Tokens {
  Tokens(Ints ids_in, size_t top_k_in) : ids(std::move(ids_in)), top_k(top_k_in) {
    for (size_t i = 0; i < ids.size(); ++i) weights.push_back(static_cast<float>(i + 1));
  }
  operator RoutedTokens() const { return {ids, weights, top_k}; }

  Ints ids;
  std::vector<float> weights;
  size_t top_k;
};

TEST(ExpertPartition, DividesExpertsInBlocks) {
  const ExpertPartition partition(6, 3);
  EXPECT_EQ(partition.num_local(), 2u);
  EXPECT_EQ(partition.RankOf(3), 1u);
  EXPECT_EQ(partition.LocalId(3, 1), 1);
  EXPECT_EQ(partition.LocalId(3, 0), -1);
  EXPECT_EQ(partition.LocalId(-1, 0), -1);
}

TEST(ExpertPartition, RefusesWhatCannotBeDivided) {
  for (const auto& [experts, ranks] : {std::pair<size_t, size_t>{7, 2}, {0, 1}, {4, 0}, {2, 4}}) {
    ExpectError(ErrorCode::kInvalidArgument,
                {std::to_string(experts) + " experts", std::to_string(ranks) + " ranks"},
                [&] { ExpertPartition(experts, ranks); });
  }
}

TEST(DispatchLayout, CountsATokenOncePerRank) {
  const ExpertPartition partition(4, 2);
  const DispatchLayout layout = ComputeDispatchLayout(partition, Tokens({0, 1,   //
                                                                         1, 3,   //
                                                                         -1, 2,  //
                                                                         -1, -1},
                                                                        2));
  EXPECT_EQ(layout.num_tokens_per_rank, (Ints{2, 2}));
  EXPECT_EQ(layout.num_tokens_per_expert, (Ints{1, 2, 1, 1}));
  EXPECT_EQ(layout.is_token_in_rank, (std::vector<uint8_t>{1, 0, 1, 1, 0, 1, 0, 0}));
  EXPECT_EQ(TokensForRank(layout, 0), (Ints{0, 1}));
  EXPECT_EQ(TokensForRank(layout, 1), (Ints{1, 2}));
}

TEST(DispatchLayout, OfNoTokensIsZero) {
  const DispatchLayout layout = ComputeDispatchLayout(ExpertPartition(4, 2), Tokens({}, 2));
  EXPECT_EQ(layout.num_tokens_per_rank, (Ints{0, 0}));
  EXPECT_EQ(layout.num_tokens_per_expert, (Ints{0, 0, 0, 0}));
  EXPECT_TRUE(layout.is_token_in_rank.empty());
  EXPECT_TRUE(TokensForRank(layout, 1).empty());
}

TEST(DispatchLayout, AllTokensToOneRank) {
  const DispatchLayout layout = ComputeDispatchLayout(ExpertPartition(4, 4), Tokens({2, 2, 2}, 1));
  EXPECT_EQ(layout.num_tokens_per_rank, (Ints{0, 0, 3, 0}));
  EXPECT_EQ(TokensForRank(layout, 2), (Ints{0, 1, 2}));
}

TEST(DispatchLayout, RefusesBadIdsAndSizes) {
  const ExpertPartition partition(4, 2);
  for (int32_t bad : {4, -2, 1 << 30}) {
    ExpectError(ErrorCode::kInvalidArgument, {"token 1, slot 0", std::to_string(bad), "0 to 3"},
                [&] {
                  ComputeDispatchLayout(partition, Tokens({0, 1, bad, 2}, 2));
                });
  }
  ExpectError(ErrorCode::kInvalidArgument, {"3 ids", "top_k 2"}, [&] {
    ComputeDispatchLayout(partition, Tokens({0, 1, 2}, 2));
  });
  ExpectError(ErrorCode::kInvalidArgument, {"top_k 0"},
              [&] { ComputeDispatchLayout(partition, Tokens({0}, 0)); });
  const Ints ids{0, 1};
  const std::vector<float> one{1};
  ExpectError(ErrorCode::kInvalidArgument, {"2 ids and 1 weights"}, [&] {
    ComputeDispatchLayout(partition, RoutedTokens{ids, one, 2});
  });
}

// Three ranks of two experts; the second rank has no tokens.
class ReceiveTest : public ::testing::Test {
 protected:
  const ExpertPartition partition_{6, 3};
  const Tokens first_{{0, 1,  //
                       5, 2,  //
                       -1, 4},
                      2};
  const Tokens none_{{}, 2};
  const Tokens last_{{1, 4}, 2};
  const std::vector<RoutedTokens> sources_{first_, none_, last_};
};

TEST_F(ReceiveTest, RowsComeBySourceRankWithLocalIds) {
  const ReceivedRows rows = ReceiveRows(partition_, 2, sources_, IdSpace::kLocal);
  EXPECT_EQ(rows.src_rank, (Ints{0, 0, 2}));
  EXPECT_EQ(rows.src_token, (Ints{1, 2, 0}));
  EXPECT_EQ(rows.topk_ids, (Ints{1, -1, -1, 0, -1, 0}));
  EXPECT_EQ(rows.topk_weights, (std::vector<float>{3, 0, 0, 6, 0, 2}));
  EXPECT_EQ(rows.per_expert, (Ints{2, 1}));
}

TEST_F(ReceiveTest, GlobalIdsKeepEverySlot) {
  const ReceivedRows rows = ReceiveRows(partition_, 2, sources_, IdSpace::kGlobal);
  EXPECT_EQ(rows.num_rows(), 3u);
  EXPECT_EQ(rows.topk_ids, (Ints{5, 2, -1, 4, 1, 4}));
  EXPECT_EQ(rows.topk_weights, (std::vector<float>{3, 4, 5, 6, 1, 2}));
  EXPECT_EQ(rows.per_expert, (Ints{2, 1}));
}

TEST_F(ReceiveTest, ATokenWithTwoExpertsOfARankComesOnce) {
  const ReceivedRows rows = ReceiveRows(partition_, 0, sources_, IdSpace::kLocal);
  EXPECT_EQ(rows.src_token, (Ints{0, 0}));
  EXPECT_EQ(rows.per_expert, (Ints{1, 2}));
}

TEST_F(ReceiveTest, LowLatencySendsEachSlot) {
  const LowLatencyRows rows = ReceiveLowLatency(partition_, 0, sources_, 3);
  EXPECT_EQ(rows.masked_m, (Ints{1, 2}));
  EXPECT_EQ(rows.recv_from, (Ints{1, 0, 0, 1, 0, 1}));
  EXPECT_EQ(rows.src_rank, (Ints{0, 0, 2}));
  EXPECT_EQ(rows.src_token, (Ints{0, 0, 0}));
  EXPECT_EQ(rows.src_column, (Ints{0, 1, 0}));
}

TEST_F(ReceiveTest, LowLatencyRefusesMoreTokensThanItsBuffer) {
  ExpectError(ErrorCode::kInvalidArgument,
              {"rank 0 has 3 tokens", "num_max_dispatch_tokens_per_rank", "2"},
              [&] { ReceiveLowLatency(partition_, 0, sources_, 2); });
}

TEST_F(ReceiveTest, RefusesSourcesThatDoNotFit) {
  const std::vector<RoutedTokens> two{first_, none_};
  ExpectError(ErrorCode::kInvalidArgument, {"2 sources", "3 ranks"},
              [&] { ReceiveRows(partition_, 0, two, IdSpace::kLocal); });
  ExpectError(ErrorCode::kInvalidArgument, {"rank 3"},
              [&] { ReceiveRows(partition_, 3, sources_, IdSpace::kLocal); });
  const Tokens wide({0, 1, 2}, 3), outside({6, 0}, 2);
  ExpectError(ErrorCode::kInvalidArgument, {"top_k 3", "2"}, [&] {
    ReceiveLowLatency(partition_, 0, std::vector<RoutedTokens>{first_, none_, wide}, 8);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"expert id 6"}, [&] {
    ReceiveRows(partition_, 0, std::vector<RoutedTokens>{first_, none_, outside}, IdSpace::kLocal);
  });
}

TEST_F(ReceiveTest, ExpectedRowsAreAHintOfTheLocalCount) {
  EXPECT_EQ(ExpectedRowsPerExpert(0, 2, partition_), 1u);
  EXPECT_EQ(ExpectedRowsPerExpert(3, 2, partition_), 4u);
}

TEST(AlignCounts, RoundsUpAndKeepsZero) {
  EXPECT_EQ(AlignCounts(Ints{0, 1, 128, 129}, 128), (Ints{0, 128, 128, 256}));
  EXPECT_EQ(AlignCounts(Ints{5}, 1), (Ints{5}));
  ExpectError(ErrorCode::kInvalidArgument, {"expert_alignment"}, [] { AlignCounts(Ints{1}, 0); });
}

TEST(LocalExpertMap, GivesLocalIdsOrMinusOne) {
  const Ints map = LocalExpertMap(ExpertPartition(4, 2), 1);
  EXPECT_EQ(map, (Ints{-1, -1, 0, 1}));
  EXPECT_EQ(MapIds(map, Ints{3, -1, 0, 2}), (Ints{1, -1, -1, 0}));
  ExpectError(ErrorCode::kInvalidArgument, {"expert id 4"}, [&] { MapIds(map, Ints{4}); });
}

TEST(SortRoutes, IsStableAndLeavesEmptySlotsOut) {
  const SortedRoutes routes = SortRoutes(Ints{2, 0, -1, 2, 0, 3}, 5);
  EXPECT_EQ(routes.counts, (Ints{2, 0, 2, 1, 0}));
  EXPECT_EQ(routes.cumulative, (Ints{2, 2, 4, 5, 5}));
  EXPECT_EQ(routes.sorted_route, (Ints{1, 4, 0, 3, 5}));
  EXPECT_EQ(routes.route_to_row, (Ints{2, 0, -1, 3, 1, 4}));
}

TEST(SortRoutes, OfNothing) {
  const SortedRoutes routes = SortRoutes(Ints{}, 2);
  EXPECT_EQ(routes.cumulative, (Ints{0, 0}));
  EXPECT_TRUE(routes.sorted_route.empty());
  EXPECT_TRUE(SortRoutes(Ints{-1, -1}, 2).sorted_route.empty());
  ExpectError(ErrorCode::kInvalidArgument, {"expert id 2"}, [] { SortRoutes(Ints{2}, 2); });
}

}  // namespace
}  // namespace switchyard::moe::dispatchers
