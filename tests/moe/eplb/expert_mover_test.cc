// Contract 7.4: after a migration every slot holds its expert, to the byte.
#include "switchyard/moe/eplb/expert_mover.h"

#include <gtest/gtest.h>

#include "moe/eplb/expert_layout.h"
#include "moe/eplb/mover_suite.h"
#include "switchyard/parallel/run_ranks.h"
#include "testing/errors.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

class MoverOnRanks : public ::testing::TestWithParam<size_t> {};

TEST_P(MoverOnRanks, EverySlotHoldsItsExpertInEveryFormat) {
  RunRanks({.num_ranks = GetParam(), .node_size = 2},
           [](ProcessGroup& group) { MoveEveryKindAndCompare(group); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MoverOnRanks, ::testing::Values(1u, 2u, 3u, 4u));

TEST(ExpertMover, AlternatingRowsAlternateWhereTheyArriveToo) {
  const ExpertKind kind = {
      .name = "alternating", .format = {DType::kBF16}, .is_stacked = true, .is_interleaved = true};
  TestExperts experts(kind, kLayer);
  const ExpertWeights weights = experts.Make(Map{0, 1, 2});
  const ExpertLayout layout(weights, 3, kLayer);
  ASSERT_EQ(layout.num_tensors(), 3u);
  constexpr size_t kRow = TestExperts::kHidden * sizeof(BF16);
  EXPECT_EQ(layout.tensors()[0].offset, 0u);
  EXPECT_EQ(layout.tensors()[1].offset, kRow);
  EXPECT_EQ(layout.tensors()[2].offset, 2 * TestExperts::kInner * kRow);
}

TEST(ExpertMover, MemoryLivesAsLongAsASlotUsesIt) {
  const ExpertKind kind = AllExpertKinds()[0];
  RunRanks(2, [&](ProcessGroup& group) {
    const size_t rank = group.rank();
    TestExperts experts(kind, kLayer);
    const Map first = {0, 1, 2, 3, 4, 5};
    ExpertWeights weights = experts.Make(SlotsOf(first, rank, 2));
    const std::byte* const in_checkpoint = weights.w1.data[0];
    ExpertMover mover(weights, 3, kLayer);
    const std::vector<size_t> nodes = {0, 0};
    const auto migrate = [&](const Map& from, const Map& to) {
      mover.Prepare(PlanMigration(from, to, nodes), group, {}, {}, Soon());
      mover.Switch();
      ExpectExperts(kind, weights, SlotsOf(to, rank, 2));
      return mover.owned_bytes() / mover.expert_bytes();
    };
    const Map swapped = {0, 4, 5, 3, 1, 2};
    EXPECT_EQ(migrate(first, swapped), 2u);
    EXPECT_EQ(mover.num_received(), 2u);
    EXPECT_EQ(weights.w1.data[0], in_checkpoint) << "what does not move stays in its mapping";
    const Map shared = {0, 4, 4, 3, 1, 1};
    EXPECT_EQ(migrate(swapped, shared), 1u) << "two slots share one expert, the other is freed";
    EXPECT_EQ(weights.w1.data[1], weights.w1.data[2]);
    const Map one_left = {4, 0, 0, 1, 3, 3};
    EXPECT_EQ(migrate(shared, one_left), 1u);
    EXPECT_EQ(weights.w1.data[1], in_checkpoint);
    EXPECT_EQ(migrate(one_left, Map{0, 0, 0, 3, 3, 3}), 0u);
  });
}

TEST(ExpertMover, FreeRidersReceiveOnce) {
  const ExpertKind kind = AllExpertKinds()[7];
  RunRanks(2, [&](ProcessGroup& group) {
    TestExperts experts(kind, kLayer);
    const Map before = {0, 1, 2, 3}, after = {3, 3, 2, 2};
    ExpertWeights weights = experts.Make(SlotsOf(before, group.rank(), 2));
    ExpertMover mover(weights, 2, kLayer);
    mover.Prepare(PlanMigration(before, after, std::vector<size_t>{0, 0}), group, {}, {}, Soon());
    mover.Switch();
    ExpectExperts(kind, weights, SlotsOf(after, group.rank(), 2));
    EXPECT_EQ(mover.num_received(), group.rank() == 0 ? 1u : 0u);
    EXPECT_EQ(mover.owned_bytes(), mover.num_received() * mover.expert_bytes());
  });
}

TEST(ExpertMover, OneRankWithoutMemoryStopsAllAndNothingChanges) {
  const ExpertKind kind = AllExpertKinds()[4];
  RunRanks(3, [&](ProcessGroup& group) {
    TestExperts experts(kind, kLayer);
    const Map before = {0, 1, 2}, after = {1, 2, 0};
    ExpertWeights weights = experts.Make(SlotsOf(before, group.rank(), 3));
    ExpertMover mover(weights, 1, kLayer, {.max_bytes = group.rank() == 1 ? 1u : 0u});
    const MigrationPlan plan = PlanMigration(before, after, std::vector<size_t>(3, 0));
    ExpectError(ErrorCode::kResourceExhausted, {"layer 7", "1 are allowed"},
                [&] { mover.Prepare(plan, group, {}, {}, Soon()); });
    mover.Switch();
    ExpectExperts(kind, weights, SlotsOf(before, group.rank(), 3));
    EXPECT_EQ(mover.owned_bytes(), 0u);
    group.Barrier(Soon());  // the group is still in order
  });
}

TEST(ExpertMover, WhatWasPreparedIsSwitchedOrDiscarded) {
  const ExpertKind kind = AllExpertKinds()[0];
  RunRanks(2, [&](ProcessGroup& group) {
    TestExperts experts(kind, kLayer);
    const Map before = {0, 1}, after = {1, 0};
    ExpertWeights weights = experts.Make(SlotsOf(before, group.rank(), 2));
    ExpertMover mover(weights, 1, kLayer);
    const MigrationPlan plan = PlanMigration(before, after, std::vector<size_t>(2, 0));
    mover.Prepare(plan, group, {}, {}, Soon());
    mover.Discard();
    mover.Switch();
    ExpectExperts(kind, weights, SlotsOf(before, group.rank(), 2));
    mover.Prepare(plan, group, {}, {}, Soon());
    ExpectError(ErrorCode::kFailedPrecondition, {"layer 7", "not switched"},
                [&] { mover.Prepare(plan, group, {}, {}, Soon()); });
    const MigrationPlan other =
        PlanMigration(Map{0, 1, 2, 3}, Map{0, 1, 2, 3}, std::vector<size_t>(2, 0));
    ExpectError(ErrorCode::kInvalidArgument, {"layer 7", "4 slots"},
                [&] { mover.Prepare(other, group, {}, {}, Soon()); });
  });
}

TEST(ExpertMover, LostExpertsAreLoadedAgainOrAddNothing) {
  for (const ExpertKind& kind : AllExpertKinds()) {
    for (const bool can_load : {true, false}) {
      // Rank 1 of three is lost, and with it expert 1.
      RunRanks(3, [&](ProcessGroup& world) {
        const std::vector<size_t> ep_ranks = {0, 2};
        const auto alive = world.Split(world.rank() == 1 ? ProcessGroup::kNoGroup : 0, world.rank(),
                                       "alive", Soon());
        if (!alive) return;
        TestExperts experts(kind, kLayer);
        const Map before = {0, 0, 1, 1, 2, 2}, after = {1, 2, 0, 0, 0, 1};
        ExpertWeights weights = experts.Make(SlotsOf(before, world.rank(), 3));
        ExpertMover mover(weights, 2, kLayer);
        const MigrationPlan plan =
            PlanMigration(before, after, std::vector<size_t>(3, 0), std::vector<uint8_t>{1, 0, 1});
        LoadExpert load;
        if (can_load) load = [&](size_t, size_t logical) { return experts.Load(logical); };
        mover.Prepare(plan, *alive, ep_ranks, load, Soon());
        mover.Switch();
        const auto mine = SlotsOf(after, world.rank(), 3);
        if (can_load) {
          ExpectExperts(kind, weights, mine);
        } else {
          const size_t lost = world.rank() == 0 ? 0 : 1;
          const std::byte* zeros = weights.w2.data[lost];
          for (size_t i = 0; i < BytesOf(kind.format.dtype, weights.w2.cols); ++i)
            EXPECT_EQ(zeros[i], std::byte{0});
          if (kind.has_bias) {
            EXPECT_EQ(weights.w2.bias[lost][0], 0.0f);
          }
          EXPECT_EQ(DigestOf(weights, 1 - lost), DigestOfExpert(kind, mine[1 - lost]));
        }
      });
    }
  }
}

TEST(ExpertMover, ALoaderThatFailsStopsAll) {
  const ExpertKind kind = AllExpertKinds()[2];
  RunRanks(2, [&](ProcessGroup& group) {
    TestExperts experts(kind, kLayer);
    const Map before = {-1, 1}, after = {0, 1};
    ExpertWeights weights = experts.Make(Map{1});
    ExpertMover mover(weights, 1, kLayer);
    const MigrationPlan plan = PlanMigration(before, after, std::vector<size_t>(2, 0));
    ExpectError(ErrorCode::kNotFound, {"no such shard"}, [&] {
      mover.Prepare(
          plan, group, {},
          [](size_t, size_t) -> LoadedExpert {
            throw Error(ErrorCode::kNotFound, "no such shard");
          },
          Soon());
    });
    ExpectError(ErrorCode::kInvalidArgument, {"expert 0", "without its biases of w1"}, [&] {
      mover.Prepare(
          plan, group, {},
          [&](size_t, size_t logical) {
            LoadedExpert expert = experts.Load(logical);
            expert.w1.bias = nullptr;
            return expert;
          },
          Soon());
    });
    ExpectExperts(kind, weights, Map{1});
  });
}

TEST(ExpertMover, RefusesBanksThatContradictThemselves) {
  constexpr ErrorCode kCode = ErrorCode::kInvalidArgument;
  TestExperts experts(AllExpertKinds()[4], kLayer);
  const ExpertWeights good = experts.Make(Map{0, 1});
  const auto refuse = [&](std::initializer_list<std::string_view> words, const auto& change) {
    ExpertWeights weights = good;
    change(weights);
    ExpectError(kCode, words, [&] { ExpertMover(weights, 2, kLayer); });
  };
  refuse({"layer 7", "scales of w2", "2 local experts", "found 1"},
         [](ExpertWeights& w) { w.w2.scale.pop_back(); });
  refuse({"layer 7", "weights of w3", "expert 1"},
         [](ExpertWeights& w) { w.w3.data[1] = nullptr; });
  refuse({"layer 7", "weights of w1", "8 rows of 16 bytes", "3 bytes apart"},
         [](ExpertWeights& w) { w.w1.stride = 3; });
  ExpertWeights weights = good;
  ExpectError(kCode, {"experts_per_batch"},
              [&] { ExpertMover(weights, 2, kLayer, {.experts_per_batch = 0}); });
}

}  // namespace
}  // namespace switchyard::moe
