// The group suite with ranks as threads, and what is special to them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/group_suite.h"
#include "switchyard/parallel/parallel_groups.h"
#include "switchyard/parallel/run_ranks.h"
#include "testing/errors.h"

namespace switchyard::testing {
namespace {

Deadline Soon() { return Deadline::After(std::chrono::milliseconds(60000), "test"); }

class ThreadRanks : public ::testing::TestWithParam<std::tuple<RankOptions, GroupCase>> {};

TEST_P(ThreadRanks, Suite) {
  const auto& [ranks, group_case] = GetParam();
  RunRanks(ranks, group_case.run);
}

// On one node, and on nodes of two, the last of which is not full with three ranks.
constexpr RankOptions kLayouts[] = {{1}, {2}, {3}, {4}, {8}, {3, 2}, {4, 2}};

std::string CaseName(const ::testing::TestParamInfo<ThreadRanks::ParamType>& info) {
  const auto& [ranks, group_case] = info.param;
  const std::string nodes = ranks.node_size == 0 ? "" : fmt::format("_by_{}", ranks.node_size);
  return fmt::format("{}_{}{}", group_case.name, ranks.num_ranks, nodes);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadRanks,
                         ::testing::Combine(::testing::ValuesIn(kLayouts),
                                            ::testing::ValuesIn(GroupCases().begin(),
                                                                GroupCases().end())),
                         CaseName);

TEST(RunRanks, TheOthersFailWithTheMessageOfTheOneThatThrows) {
  std::atomic<int> told{0};
  ExpectError(ErrorCode::kNotFound, {"expert 7 has no weights"}, [&] {
    RunRanks(4, [&](ProcessGroup& world) {
      auto half = world.Split(world.rank() / 2, 0, "half", Soon());
      world.Barrier(Soon());
      if (world.rank() == 2) throw Error(ErrorCode::kNotFound, "expert 7 has no weights");
      // Ranks 0 and 1 wait for it in the world, rank 3 in a group that came out of it.
      ProcessGroup& waits_in = world.rank() == 3 ? *half : world;
      ExpectError(ErrorCode::kUnavailable, {"rank 2 of group \"world\"", "expert 7 has no weights"},
                  [&] { waits_in.Barrier(Soon()); });
      ++told;
    });
  });
  EXPECT_EQ(told, 3);
}

TEST(RunRanks, PassesOnWhatIsThrown) {
  EXPECT_THROW(RunRanks(3,
                        [](ProcessGroup& world) {
                          if (world.rank() == 1) throw std::out_of_range("far away");
                          world.Barrier(Soon());
                        }),
               std::out_of_range);
  EXPECT_THROW(RunRanks(2,
                        [](ProcessGroup& world) {
                          if (world.rank() == 1) throw 7;
                          world.Barrier(Soon());
                        }),
               int);
  // Who aborts need not throw.
  ExpectError(ErrorCode::kUnavailable, {"rank 1 of group \"world\" failed: enough"}, [] {
    RunRanks(2, [](ProcessGroup& world) {
      if (world.rank() == 1) return world.Abort("enough");
      world.Barrier(Soon());
    });
  });
}

TEST(RunRanks, RefusesNoRanksAndStrangeNodes) {
  ExpectError(ErrorCode::kInvalidArgument, {"at least 1"}, [] { RunRanks(0, [](auto&) {}); });
  for (const char* value : {"0", "two", "2x", "-1"}) {
    setenv("SWITCHYARD_FAKE_NODE_SIZE", value, 1);
    ExpectError(ErrorCode::kInvalidArgument, {"SWITCHYARD_FAKE_NODE_SIZE", value},
                [] { RunRanks(2, [](auto&) {}); });
  }
  setenv("SWITCHYARD_FAKE_NODE_SIZE", "2", 1);
  RunRanks(5, [](ProcessGroup& world) { EXPECT_EQ(world.NodeOf(4), 2u); });
  unsetenv("SWITCHYARD_FAKE_NODE_SIZE");
}

TEST(ThreadGroup, DifferentCollectivesAreAnError) {
  ExpectError(ErrorCode::kInternal, {"number 1", "Barrier", "AllToAll", "rank 0", "rank 1"}, [] {
    RunRanks(2, [](ProcessGroup& world) {
      std::vector<uint32_t> numbers(2), room(2);
      if (world.rank() == 0) {
        world.Barrier(Soon());
      } else {
        world.AllToAll(numbers, room, Soon());
      }
    });
  });
}

TEST(ThreadGroup, AWrongCountIsAnError) {
  const std::string message = ExpectError(ErrorCode::kInternal, {"AllToAllV", "bytes"}, [] {
    RunRanks(2, [](ProcessGroup& world) {
      const std::vector<std::byte> send(64);
      std::vector<std::byte> recv(64);
      // Rank 1 sends three rows to rank 0, which expects two.
      const std::vector<size_t> send_rows{world.rank() == 0 ? 0u : 3u, 0};
      const std::vector<size_t> recv_rows{0, world.rank() == 0 ? 2u : 0u};
      RowExchange exchange;
      exchange.row_bytes = 8;
      exchange.send = send.data();
      exchange.recv = recv.data();
      exchange.send_rows = send_rows;
      exchange.recv_rows = recv_rows;
      world.AllToAllV(exchange, Soon());
      world.Barrier(Soon());
    });
  });
  EXPECT_NE(message.find("rank 0 expects 16 bytes from rank 1, which sends 24"), std::string::npos)
      << message;
}

TEST(ParallelConfig, NamesTheSettingsThatContradictEachOther) {
  const auto refused = [](const ParallelConfig& config, size_t ranks,
                          std::initializer_list<std::string_view> words) {
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { config.Check(ranks); });
  };
  refused({.tp_size = 0}, 1, {"tp_size", "moe_ep_size", "moe_dp_size", "at least 1"});
  refused({.tp_size = 2, .moe_ep_size = 0}, 2, {"moe_ep_size", "2, 0 and 1"});
  refused({.tp_size = 2, .moe_dp_size = 0}, 2, {"moe_dp_size", "2, 1 and 0"});
  refused({.tp_size = 4}, 2, {"tp_size 4", "found 2", "mpirun -n 4"});
  refused({.tp_size = 4, .moe_ep_size = 4, .moe_dp_size = 2}, 4,
          {"moe_ep_size 4", "moe_dp_size 2", "exceeds tp_size 4"});
  refused({.tp_size = 8, .moe_ep_size = 3}, 8, {"tp_size 8", "not a multiple", "moe_ep_size 3"});
  refused({.tp_size = 2, .moe_ep_size = SIZE_MAX, .moe_dp_size = SIZE_MAX}, 2, {"exceeds"});
  ParallelConfig{.tp_size = 8, .moe_ep_size = 2, .moe_dp_size = 2}.Check(8);
  EXPECT_EQ((ParallelConfig{.tp_size = 4}.attention_tp_size()), 4u);
  EXPECT_EQ((ParallelConfig{.tp_size = 4, .dp_attention = true}.attention_tp_size()), 1u);
}

// The members of this rank's groups, as TP ranks.
struct Members {
  std::vector<size_t> ep, tp, dp;
};

std::vector<Members> MembersOfAll(const ParallelConfig& config) {
  std::vector<Members> members(config.tp_size);
  RunRanks(config.tp_size, [&](ProcessGroup& world) {
    const ParallelGroups groups = MakeGroups(world, config, "", Soon());
    const size_t rank = world.rank();
    members[rank] = {.ep = AllGatherValue(groups.moe_ep(), rank, Soon()),
                     .tp = AllGatherValue(groups.moe_tp(), rank, Soon()),
                     .dp = AllGatherValue(groups.moe_dp(), rank, Soon())};
    const MoePosition position = groups.position();
    EXPECT_EQ(groups.moe_ep().rank(), position.moe_ep);
    EXPECT_EQ(groups.moe_tp().rank(), position.moe_tp);
    EXPECT_EQ(groups.moe_dp().rank(), position.moe_dp);
  });
  return members;
}

using Ranks = std::vector<size_t>;

// Both examples of contract 1.7.
TEST(ParallelGroups, EightRanksInTwoCopiesOfFour) {
  const auto members = MembersOfAll({.tp_size = 8, .moe_ep_size = 4, .moe_dp_size = 2});
  for (size_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(members[rank].ep, rank < 4 ? Ranks({0, 1, 2, 3}) : Ranks({4, 5, 6, 7}));
    EXPECT_EQ(members[rank].dp, Ranks({rank % 4, rank % 4 + 4}));
    EXPECT_EQ(members[rank].tp, Ranks({rank}));
  }
}

TEST(ParallelGroups, EightRanksWithExpertsInHalves) {
  const auto members = MembersOfAll({.tp_size = 8, .moe_ep_size = 4});
  for (size_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(members[rank].ep, rank % 2 == 0 ? Ranks({0, 2, 4, 6}) : Ranks({1, 3, 5, 7}));
    EXPECT_EQ(members[rank].tp, Ranks({rank / 2 * 2, rank / 2 * 2 + 1}));
    EXPECT_EQ(members[rank].dp, Ranks({rank}));
  }
}

TEST(ParallelGroups, AllThreeWaysAtOnce) {
  const auto members = MembersOfAll({.tp_size = 8, .moe_ep_size = 2, .moe_dp_size = 2});
  EXPECT_EQ(members[5].ep, Ranks({5, 7}));
  EXPECT_EQ(members[5].tp, Ranks({4, 5}));
  EXPECT_EQ(members[5].dp, Ranks({1, 5}));
}

TEST(ParallelGroups, OnlyTheExpertGroupIsNeverTheTpGroup) {
  RunRanks(4, [](ProcessGroup& world) {
    const ParallelGroups split = MakeGroups(world, {.tp_size = 4}, "", Soon());
    EXPECT_EQ(&split.moe_tp(), &split.tp());
    EXPECT_EQ(split.moe_ep().size(), 1u);
    const ParallelGroups copies = MakeGroups(world, {.tp_size = 4, .moe_dp_size = 4}, "", Soon());
    EXPECT_EQ(&copies.moe_dp(), &copies.tp());
    const ParallelGroups experts = MakeGroups(world, {.tp_size = 4, .moe_ep_size = 4}, "", Soon());
    EXPECT_NE(&experts.moe_ep(), &experts.tp());
    EXPECT_EQ(experts.moe_ep().size(), 4u);
  });
}

}  // namespace
}  // namespace switchyard::testing
