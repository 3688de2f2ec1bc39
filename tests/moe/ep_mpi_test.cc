// Layers spread over processes: another carrier, the same bits. With SWITCHYARD_FAKE_NODE_SIZE also
// what crosses nodes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "switchyard/core/error.h"
#include "testing/ep_ranks.h"
#include "testing/errors.h"
#include "testing/mpi_main.h"

namespace switchyard::moe {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::ExpectError;
using testing::MoeCase;
using testing::MoeTokens;

constexpr size_t kExperts = 16, kTopK = 8, kTokens = 32;  // of each rank

MpiSession* session = nullptr;

class EpOverMpi : public ::testing::Test {
 protected:
  EpOverMpi() : random_(testing::MakeRandom(7)), layer_({.experts = kExperts}, random_) {}

  EpSetup SetupOf(const std::string& a2a, Hierarchy hierarchy, bool deterministic) const {
    EpSetup setup;
    setup.ranks = session->world().size();
    setup.layer.a2a = a2a;
    setup.layer.runner = "aiter";
    setup.layer.act_dtype = "f32";
    setup.options.tokens_are_replicated = false;
    setup.options.max_tokens_per_rank = kTokens;
    setup.options.num_max_dispatch_tokens_per_rank = kTokens;
    setup.options.hierarchy = hierarchy;
    setup.options.deterministic = deterministic;
    return setup;
  }
  MoeTokens Tokens() {
    return testing::RandomTokens(kTokens * session->world().size(), kTopK, kExperts,
                                 layer_.hidden(), testing::Spread::kRandom, random_);
  }

  std::mt19937_64 random_;  // the same on all ranks
  MoeCase layer_;
};

TEST_F(EpOverMpi, EveryWayHasTheBitsOfOneRank) {
  const MoeTokens tokens = Tokens();
  const std::vector<float> all = testing::RunOneRank(layer_, tokens, "aiter");
  for (const char* a2a : {"none", "deepep", "mori", "mooncake"}) {
    for (Hierarchy hierarchy : {Hierarchy::kAuto, Hierarchy::kOff}) {
      SCOPED_TRACE(a2a);
      const EpSetup setup = SetupOf(a2a, hierarchy, true);
      EpRank rank(session->world(), setup.Config(), setup.options);
      const size_t me = rank.world.rank();
      const MoeTokens mine = tokens.Slice(me * kTokens, kTokens);
      const auto moe = testing::MakeRankLayer(rank, setup, layer_, kTopK);
      for (size_t step = 0; step < 3; ++step) {
        rank.ep.BeginPass(step % 2 == 0 ? ForwardPhase::kPrefill : ForwardPhase::kDecode);
        rank.arena.Reset();
        const Rows rows = moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
        ASSERT_EQ(rows.rows, kTokens);
        for (size_t i = 0; i < kTokens * rows.cols; ++i) {
          ASSERT_EQ(rows.Row(i / rows.cols)[i % rows.cols], all[me * kTokens * rows.cols + i])
              << "value " << i;
        }
      }
    }
  }
}

// What travels, of a step of all ranks; printed for those who want to know.
TEST_F(EpOverMpi, RowsThatTravel) {
  const MoeTokens tokens = Tokens();
  const auto run = [&](Hierarchy hierarchy, bool deterministic) {
    const EpSetup setup = SetupOf("deepep", hierarchy, deterministic);
    EpRank rank(session->world(), setup.Config(), setup.options);
    const MoeTokens mine = tokens.Slice(rank.world.rank() * kTokens, kTokens);
    const auto moe = testing::MakeRankLayer(rank, setup, layer_, kTopK);
    moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
    ExchangeStats sum;
    for (const ExchangeStats& one :
         AllGatherValue(rank.world, rank.ep.stats(), Deadline::Never("sum up")))
      sum += one;
    if (rank.world.rank() == 0) {
      std::printf("%s, %s: rows %zu in nodes, %zu between; results %zu in nodes, %zu between\n",
                  hierarchy == Hierarchy::kOff ? "flat" : "over rails",
                  deterministic ? "routewise" : "summed", size_t{sum.rows_in_node},
                  size_t{sum.rows_between_nodes}, size_t{sum.results_in_node},
                  size_t{sum.results_between_nodes});
    }
    return sum;
  };
  for (const bool deterministic : {true, false}) {
    const ExchangeStats flat = run(Hierarchy::kOff, deterministic);
    const ExchangeStats rails = run(Hierarchy::kAuto, deterministic);
    EXPECT_LE(rails.rows_between_nodes, flat.rows_between_nodes);
    if (deterministic) {
      EXPECT_EQ(rails.results_between_nodes, flat.results_between_nodes);
    } else {
      EXPECT_EQ(rails.results_between_nodes, rails.rows_between_nodes);
    }
  }
}

TEST_F(EpOverMpi, WhoGivesUpTellsTheOthers) {
  if (session->world().size() < 2) GTEST_SKIP() << "nobody to tell";
  const MoeTokens tokens = Tokens().Slice(0, 3);
  for (Hierarchy hierarchy : {Hierarchy::kAuto, Hierarchy::kOff}) {
    const EpSetup setup = SetupOf("deepep", hierarchy, true);
    EpRank rank(session->world(), setup.Config(), setup.options);
    const auto moe = testing::MakeRankLayer(rank, setup, layer_, kTopK);
    if (rank.world.rank() == 1) {
      moe->dispatcher().DispatchA(rank.context, tokens.Hidden(), tokens.TopK());
      moe->dispatcher().Abort();
    } else {
      // By this rank, or by one that has heard of it before.
      ExpectError(ErrorCode::kUnavailable, {"given"},
                  [&] { moe->ForwardRouted(rank.context, tokens.Hidden(), tokens.TopK()); });
    }
  }
}

}  // namespace
}  // namespace switchyard::moe

int main(int argc, char** argv) {
  return switchyard::testing::RunMpiTests(argc, argv, switchyard::moe::session);
}
