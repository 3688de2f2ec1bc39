// Contract 7.4: who sends which expert to whom.
#include "switchyard/moe/eplb/migration.h"

#include <gtest/gtest.h>

#include <set>

#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;
using Map = std::vector<int32_t>;
using Nodes = std::vector<size_t>;

std::vector<std::pair<size_t, size_t>> TransfersOf(const MigrationPlan& plan) {
  std::vector<std::pair<size_t, size_t>> pairs;
  for (const ExpertTransfer& transfer : plan.transfers)
    pairs.emplace_back(transfer.from, transfer.to);
  return pairs;
}

TEST(Migration, EverySourceInItsOrder) {
  // Two nodes of two ranks of three slots.
  const Map before = {0, 1, 2, /**/ 3, 4, 5, /**/ 6, 7, 8, /**/ 6, 9, 10};
  const Map after = {0, 0, 3, /**/ 6, 6, 5, /**/ 8, 1, 7, /**/ 9, 2, 4};
  const MigrationPlan plan = PlanMigration(before, after, Nodes{0, 0, 1, 1});
  const std::pair<SlotSource, size_t> expected[] = {
      {SlotSource::kUnchanged, 0},  {SlotSource::kLocalSlot, 0}, {SlotSource::kSameNode, 3},
      {SlotSource::kOtherNode, 6},  {SlotSource::kFreeRider, 3}, {SlotSource::kUnchanged, 5},
      {SlotSource::kLocalSlot, 8},  {SlotSource::kOtherNode, 1}, {SlotSource::kLocalSlot, 7},
      {SlotSource::kLocalSlot, 10}, {SlotSource::kOtherNode, 2}, {SlotSource::kOtherNode, 4},
  };
  for (size_t slot = 0; slot < after.size(); ++slot) {
    EXPECT_EQ(plan.moves[slot].source, expected[slot].first) << "slot " << slot;
    EXPECT_EQ(plan.moves[slot].from, expected[slot].second) << "slot " << slot;
  }
  EXPECT_EQ(TransfersOf(plan),
            (std::vector<std::pair<size_t, size_t>>{{3, 2}, {6, 3}, {1, 7}, {2, 10}, {4, 11}}));
  EXPECT_TRUE(plan.lost_experts.empty());
}

TEST(Migration, ANodeIsPreferredToABusyOtherOne) {
  // Expert 0 is on ranks 0 (node 0) and 2 (node 1); ranks 1 and 3 want it.
  const MigrationPlan plan = PlanMigration(Map{0, 1, 0, 2}, Map{0, 0, 2, 0}, Nodes{0, 0, 1, 1});
  EXPECT_EQ(plan.moves[1].source, SlotSource::kSameNode);
  EXPECT_EQ(plan.moves[1].from, 0u);
  EXPECT_EQ(plan.moves[3].source, SlotSource::kSameNode);
  EXPECT_EQ(plan.moves[3].from, 2u);
}

TEST(Migration, SendersTakeTurns) {
  // Ranks 0 and 1 hold expert 0, ranks 2 to 5 want it; rank 0 has sent expert 9 to rank 1 before.
  const Map before = {0, 9, /**/ 0, 8, /**/ 1, 2, /**/ 3, 4, /**/ 5, 6, /**/ 7, 10};
  const Map after = {0, 9, /**/ 0, 9, /**/ 0, 2, /**/ 0, 4, /**/ 0, 6, /**/ 0, 10};
  const MigrationPlan plan = PlanMigration(before, after, Nodes(6, 0));
  EXPECT_EQ(TransfersOf(plan),
            (std::vector<std::pair<size_t, size_t>>{{1, 3}, {2, 4}, {0, 6}, {2, 8}, {0, 10}}));
}

TEST(Migration, LostRanksNeitherSendNorReceive) {
  // Rank 1 is lost: expert 3 has gone with it, expert 2 lives on rank 2 too.
  const Map before = {0, 1, /**/ 2, 3, /**/ 2, 4};
  const Map after = {2, 3, /**/ 0, 0, /**/ 3, 3};
  const std::vector<uint8_t> active = {1, 0, 1};
  const MigrationPlan plan = PlanMigration(before, after, Nodes(3, 0), active);
  EXPECT_EQ(plan.moves[0].source, SlotSource::kSameNode);
  EXPECT_EQ(plan.moves[0].from, 4u);
  EXPECT_EQ(plan.moves[1].source, SlotSource::kLost);
  EXPECT_EQ(plan.moves[2].source, SlotSource::kIdle);
  EXPECT_EQ(plan.moves[3].source, SlotSource::kIdle);
  EXPECT_EQ(plan.moves[4].source, SlotSource::kLost);
  EXPECT_EQ(plan.moves[5].source, SlotSource::kFreeRider) << "one load serves both slots";
  EXPECT_EQ(plan.lost_experts, (std::vector<int32_t>{3}));
}

TEST(Migration, SlotsWithoutAnExpertAreNoSource) {
  const MigrationPlan plan = PlanMigration(Map{-1, 1}, Map{1, 0}, Nodes{0, 0});
  EXPECT_EQ(plan.moves[0].source, SlotSource::kSameNode);
  EXPECT_EQ(plan.moves[1].source, SlotSource::kLost);
}

TEST(Migration, RandomPlansAreSoundAndFair) {
  auto random = testing::MakeRandom(71);
  for (int round = 0; round < 200; ++round) {
    const size_t ranks = 1 + random() % 6, per_rank = 1 + random() % 5;
    const size_t experts = 1 + random() % (ranks * per_rank);
    Map before, after;
    for (size_t i = 0; i < ranks * per_rank; ++i) {
      before.push_back(static_cast<int32_t>(i < experts ? i : random() % experts));
      after.push_back(static_cast<int32_t>(random() % experts));
    }
    std::shuffle(before.begin(), before.end(), random);
    Nodes nodes;
    for (size_t rank = 0; rank < ranks; ++rank) nodes.push_back(random() % 2);
    const MigrationPlan plan = PlanMigration(before, after, nodes);
    std::set<std::pair<size_t, int32_t>> received;
    size_t transfers = 0;
    for (size_t slot = 0; slot < after.size(); ++slot) {
      const SlotMove& move = plan.moves[slot];
      const size_t from_rank = plan.RankOf(move.from), rank = plan.RankOf(slot);
      const bool is_remote =
          move.source == SlotSource::kSameNode || move.source == SlotSource::kOtherNode;
      const Map& source_map = move.source == SlotSource::kFreeRider ? after : before;
      ASSERT_EQ(source_map[move.from], after[slot]);
      ASSERT_EQ(from_rank != rank, is_remote);
      if (move.source == SlotSource::kFreeRider) {
        ASSERT_LT(move.from, slot);
      }
      if (!is_remote) continue;
      ASSERT_EQ(nodes[from_rank] == nodes[rank], move.source == SlotSource::kSameNode);
      ASSERT_EQ(plan.transfers[transfers].from, move.from);
      ASSERT_EQ(plan.transfers[transfers++].to, slot);
      ASSERT_TRUE(received.emplace(rank, after[slot]).second) << "an expert came twice";
    }
    ASSERT_EQ(plan.transfers.size(), transfers);
    ASSERT_TRUE(plan.lost_experts.empty());
  }
}

TEST(Migration, RefusesSizesThatDoNotFit) {
  constexpr ErrorCode kCode = ErrorCode::kInvalidArgument;
  ExpectError(kCode, {"multiple of the 2 ranks", "3"}, [] {
    PlanMigration(Map{0, 1, 2}, Map{0, 1, 2}, Nodes{0, 0});
  });
  ExpectError(kCode, {"found 2 and 4"}, [] {
    PlanMigration(Map{0, 1}, Map{0, 1, 2, 3}, Nodes{0, 0});
  });
  ExpectError(kCode, {"slot 1", "-1"}, [] { PlanMigration(Map{0, 1}, Map{0, -1}, Nodes{0, 0}); });
  ExpectError(kCode, {"mask", "2 entries"}, [] {
    PlanMigration(Map{0, 1}, Map{1, 0}, Nodes{0, 0}, std::vector<uint8_t>{1});
  });
}

}  // namespace
}  // namespace switchyard::moe
