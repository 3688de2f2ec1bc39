#include "switchyard/parallel_mpi/mpi_session.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "parallel_mpi/mpi_calls.h"
#include "parallel_mpi/mpi_group.h"
#include "parallel_mpi/mpi_job.h"
#include "switchyard/core/error.h"

namespace switchyard {

using parallel_mpi::MpiGroup;
using parallel_mpi::MpiJob;

struct MpiSession::Impl {
  std::shared_ptr<MpiJob> job;
  std::unique_ptr<ProcessGroup> world;
  bool ended = false;
  int status = 1;
};

MpiSession::MpiSession(int* argc, char*** argv) : impl_(std::make_unique<Impl>()) {
  int started = 0;
  MPI_Initialized(&started);
  if (started != 0) {
    throw Error(ErrorCode::kFailedPrecondition,
                "MPI was started before: there is one MpiSession per process");
  }
  // Open MPI 5 built with UCX prints an error for every window about a component that none of ours
  // uses. What the user sets stays.
  setenv("OMPI_MCA_osc", "^ucx", 0);
  int provided = 0;
  parallel_mpi::CheckMpi(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided),
                         "MPI_Init_thread", "start");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  try {
    if (provided < MPI_THREAD_SERIALIZED) {
      throw Error(ErrorCode::kUnavailable,
                  "this MPI library cannot be called from changing threads "
                  "(MPI_THREAD_SERIALIZED); install Debian's libopenmpi-dev or build yours with "
                  "thread support");
    }
    impl_->job = std::make_shared<MpiJob>(parallel::FakeNodeSize());
    impl_->world = MpiGroup::MakeWorld(impl_->job);
  } catch (...) {
    // The same happens on all ranks, which have the same environment and library.
    MPI_Finalize();
    throw;
  }
}

MpiSession::~MpiSession() {
  if (!impl_->ended) End(1);
  if (impl_->job->has_lost()) {
    // MPI_Finalize waits for all processes, and one is gone.
    std::fflush(nullptr);
    _exit(impl_->status);
  }
  impl_->world.reset();
  impl_->job->Close();
  MPI_Finalize();
}

ProcessGroup& MpiSession::world() { return *impl_->world; }

int MpiSession::End(int status) {
  impl_->ended = true;
  const std::optional<int> highest = impl_->job->Farewell(status);
  if (!highest) MPI_Abort(MPI_COMM_WORLD, status == 0 ? 1 : status);
  impl_->status = highest.value_or(1);
  return impl_->status;
}

int RunMpi(int* argc, char*** argv, const std::function<void(ProcessGroup&)>& body,
           const std::function<void(size_t rank, std::string_view message)>& report) {
  MpiSession session(argc, argv);
  ProcessGroup& world = session.world();
  const auto fail = [&](std::string_view message) {
    world.Abort(message);
    report(world.rank(), message);
    return session.End(1);
  };
  try {
    body(world);
  } catch (const std::exception& exception) {
    return fail(exception.what());
  } catch (...) {
    return fail("an exception that is no std::exception");
  }
  return session.End(0);
}

std::string_view MpiLibraryVersion() {
  static const std::string version = [] {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    return std::string(text.data(), static_cast<size_t>(length));
  }();
  return version;
}

}  // namespace switchyard
