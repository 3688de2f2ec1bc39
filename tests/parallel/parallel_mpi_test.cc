// The group suite with ranks as MPI processes: mpirun starts this program, every rank runs the same
// tests in the same order.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <string>

#include "parallel/group_suite.h"
#include "switchyard/parallel_mpi/mpi_session.h"
#include "testing/errors.h"
#include "testing/mpi_main.h"

namespace switchyard::testing {
namespace {

MpiSession* session = nullptr;

Deadline Soon() { return Deadline::After(std::chrono::milliseconds(60000), "test"); }

class MpiRanks : public ::testing::TestWithParam<GroupCase> {};

TEST_P(MpiRanks, Suite) {
  // A group of its own, so that a test that fails on one rank does not fail the next test.
  const auto group = session->world().Duplicate(GetParam().name, Soon());
  try {
    GetParam().run(*group);
  } catch (const std::exception& exception) {
    group->Abort(exception.what());
    ADD_FAILURE() << exception.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, MpiRanks,
                         ::testing::ValuesIn(GroupCases().begin(), GroupCases().end()),
                         GroupCaseName);

TEST(MpiWindow, ThatExceedsSharedMemoryIsRefusedBeforeItIsMade) {
  ExpectError(ErrorCode::kResourceExhausted,
              {"world", "\"fuse_ep\"", "/dev/shm", "moe_fused_buffer_mb", "16777216.0 MiB"}, [] {
                session->world().MakeWindow({.name = "fuse_ep",
                                             .bytes_per_rank = size_t{1} << 44,
                                             .num_flags = 0,
                                             .setting = "moe_fused_buffer_mb"},
                                            Soon());
              });
}

TEST(MpiGroup, RowsBeyondWhatMpiCountsAreRefused) {
  const auto group = session->world().Duplicate("counts", Soon());
  const std::vector<size_t> rows(group->size(), size_t{1} << 31);
  RowExchange exchange;
  exchange.send_rows = exchange.recv_rows = rows;
  exchange.owner = std::make_shared<int>(0);
  ExpectError(ErrorCode::kInvalidArgument, {"counts", "exceed what MPI counts"},
              [&] { group->StartAllToAllV(exchange); });
}

TEST(MpiSession, ThereIsOnlyOne) {
  ExpectError(ErrorCode::kFailedPrecondition, {"one MpiSession"},
              [] { MpiSession second(nullptr, nullptr); });
  EXPECT_FALSE(MpiLibraryVersion().empty());
}

}  // namespace
}  // namespace switchyard::testing

int main(int argc, char** argv) {
  return switchyard::testing::RunMpiTests(argc, argv, switchyard::testing::session);
}
