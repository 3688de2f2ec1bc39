// What a warm step of every dispatcher asks of MPI and of the arena, with ranks as processes on one
// node: nothing.
#include <gtest/gtest.h>

#include "parallel_mpi/count_calls.h"
#include "testing/ep_ranks.h"
#include "testing/mpi_main.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::MoeCase;
using testing::MoeTokens;

MpiSession* session = nullptr;

struct Path {
  const char* a2a;
  DeepepMode mode;
  bool replicated;
};

constexpr Path kPaths[] = {
    {"none", DeepepMode::kAuto, true},         {"none", DeepepMode::kAuto, false},
    {"deepep", DeepepMode::kNormal, false},    {"deepep", DeepepMode::kLowLatency, false},
    {"mooncake", DeepepMode::kAuto, false},    {"nixl", DeepepMode::kAuto, false},
    {"mori", DeepepMode::kAuto, false},        {"deepep", DeepepMode::kNormal, true},
    {"deepep", DeepepMode::kLowLatency, true},
};

EpSetup SetupOf(const Path& path) {
  EpSetup setup;
  setup.ranks = session->world().size();
  setup.layer.a2a = path.a2a;
  setup.layer.runner = "aiter";
  setup.options.deepep_mode = path.mode;
  setup.options.tokens_are_replicated = path.replicated;
  setup.options.timeout = std::chrono::minutes(1);
  return setup;
}

TEST(EpCalls, AWarmStepOnANodeCallsNobody) {
  std::mt19937_64 random = testing::MakeRandom(17);  // the same on all ranks
  const MoeCase layer(8, 64, 32, DType::kBF16, random);
  const MoeTokens tokens = testing::RandomTokens(12, 2, 8, 64, testing::Spread::kRandom, random);
  for (const Path& path : kPaths) {
    const EpSetup setup = SetupOf(path);
    EpRank rank(session->world(), setup.Config(), setup.options);
    const auto moe = testing::MakeRankLayer(rank, setup, layer, tokens.top_k);
    rank.ep.BeginPass(ForwardPhase::kDecode);
    const auto step = [&](size_t count) {
      rank.arena.Reset();
      const MoeTokens mine = tokens.Slice(0, count);
      moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
    };
    for (int warm = 0; warm < 3; ++warm) step(12);
    const size_t calls = parallel_mpi::NumMpiCalls(), blocks = rank.arena.num_system_allocations();
    for (size_t count : {12u, 3u, 0u, 12u}) step(count);
    EXPECT_EQ(parallel_mpi::NumMpiCalls() - calls, 0u) << setup.Describe();
    EXPECT_EQ(rank.arena.num_system_allocations() - blocks, 0u) << setup.Describe();
  }
  EXPECT_GT(parallel_mpi::NumMpiCalls(), 0u) << "nothing is counted";
}

}  // namespace
}  // namespace switchyard::moe

int main(int argc, char** argv) {
  return switchyard::testing::RunMpiTests(argc, argv, switchyard::moe::session);
}
