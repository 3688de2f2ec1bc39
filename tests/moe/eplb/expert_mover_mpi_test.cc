// The mover with ranks as MPI processes, where experts are sent from and to its own memory.
#include <gtest/gtest.h>

#include "moe/eplb/mover_suite.h"
#include "switchyard/parallel_mpi/mpi_session.h"

namespace switchyard::moe {
namespace {

MpiSession* session = nullptr;

TEST(MpiMover, EverySlotHoldsItsExpertInEveryFormat) { MoveEveryKindAndCompare(session->world()); }

int Run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  MpiSession mpi(&argc, &argv);
  session = &mpi;
  return mpi.End(RUN_ALL_TESTS());
}

}  // namespace
}  // namespace switchyard::moe

int main(int argc, char** argv) { return switchyard::moe::Run(argc, argv); }
