// What a warm step of every dispatcher asks of MPI and of the arena, with ranks as processes on one
// node: nothing. MPI's profiling interface counts: these definitions come before the library's.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <string>

#include "testing/ep_ranks.h"
#include "testing/mpi_main.h"
#include "testing/random.h"

namespace {

size_t g_mpi_calls = 0;

}  // namespace

// All that the carrier moves bytes with. MPI_Iprobe is left out: a rank that waits for more than
// 0.1 ms looks for news of the others, on a machine with fewer cores than ranks in every step.
extern "C" {
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  ++g_mpi_calls;
  return PMPI_Ibarrier(comm, request);
}
int MPI_Iallgather(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                   int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  ++g_mpi_calls;
  return PMPI_Iallgather(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}
int MPI_Iallgatherv(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                    const int recv_counts[], const int starts[], MPI_Datatype recv_type,
                    MPI_Comm comm, MPI_Request* request) {
  ++g_mpi_calls;
  return PMPI_Iallgatherv(send, send_count, send_type, recv, recv_counts, starts, recv_type, comm,
                          request);
}
int MPI_Ialltoall(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                  int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  ++g_mpi_calls;
  return PMPI_Ialltoall(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}
int MPI_Ialltoallv(const void* send, const int send_counts[], const int send_starts[],
                   MPI_Datatype send_type, void* recv, const int recv_counts[],
                   const int recv_starts[], MPI_Datatype recv_type, MPI_Comm comm,
                   MPI_Request* request) {
  ++g_mpi_calls;
  return PMPI_Ialltoallv(send, send_counts, send_starts, send_type, recv, recv_counts, recv_starts,
                         recv_type, comm, request);
}
int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  ++g_mpi_calls;
  return PMPI_Test(request, flag, status);
}
}

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
    const size_t calls = g_mpi_calls, blocks = rank.arena.num_system_allocations();
    for (size_t count : {12u, 3u, 0u, 12u}) step(count);
    EXPECT_EQ(g_mpi_calls - calls, 0u) << setup.Describe();
    EXPECT_EQ(rank.arena.num_system_allocations() - blocks, 0u) << setup.Describe();
  }
  EXPECT_GT(g_mpi_calls, 0u) << "nothing is counted";
}

}  // namespace
}  // namespace switchyard::moe

int main(int argc, char** argv) {
  return switchyard::testing::RunMpiTests(argc, argv, switchyard::moe::session);
}
