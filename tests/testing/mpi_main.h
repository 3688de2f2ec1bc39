// The main of a test program that mpirun starts: every rank runs the same tests in the same order.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "switchyard/parallel_mpi/mpi_session.h"
#include "testing/random.h"

namespace switchyard::testing {

// Rank 0 prints as usual, the others only what fails.
class FailuresOnly final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailuresOnly(size_t rank) : rank_(rank) {}

 private:
  void OnTestStart(const ::testing::TestInfo& info) override { test_ = info.name(); }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("rank %zu: %s: %s:%d: %s\n", rank_, test_.c_str(), result.file_name(),
                result.line_number(), result.message());
  }
  size_t rank_;
  std::string test_;
};

// Runs all tests of the program, with `session` pointing to the rank's session meanwhile; returns
// the exit status.
inline int RunMpiTests(int argc, char** argv, MpiSession*& session) {
  ::testing::InitGoogleTest(&argc, argv);
  MpiSession mpi(&argc, &argv);
  session = &mpi;
  if (mpi.world().rank() == 0) {
    std::printf("SWITCHYARD_TEST_SEED=%llu\n%zu ranks, %s\n",
                static_cast<unsigned long long>(TestSeed()), mpi.world().size(),
                std::string(MpiLibraryVersion()).c_str());
  } else {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly(mpi.world().rank()));
  }
  return mpi.End(RUN_ALL_TESTS());
}

}  // namespace switchyard::testing
