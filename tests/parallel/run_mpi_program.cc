// run_mpi_program fine|throw|late|leave: a program with RunMpi, one rank of which misbehaves.
// Prints what every rank ends with; run_mpi_test.cmake looks at it.
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "switchyard/core/error.h"
#include "switchyard/parallel_mpi/mpi_session.h"

int main(int argc, char** argv) {
  using switchyard::Deadline;
  using switchyard::ProcessGroup;
  const std::string mode = argc > 1 ? argv[1] : "fine";
  size_t rank = 0;
  const int status = switchyard::RunMpi(
      &argc, &argv,
      [&](ProcessGroup& world) {
        rank = world.rank();
        const auto group = world.Duplicate("ep", Deadline::Never("start"));
        const auto window =
            group->MakeWindow({.name = "w", .bytes_per_rank = 4096, .num_flags = 1, .setting = ""},
                              Deadline::Never("start"));
        group->Barrier(Deadline::Never("start"));
        if (rank == 1 && mode == "throw")
          throw switchyard::Error(switchyard::ErrorCode::kNotFound, "expert 7 has no weights");
        if (rank == 1 && mode == "late") std::this_thread::sleep_for(std::chrono::seconds(2));
        if (rank == 1 && mode == "leave") return;
        const auto limit = std::chrono::milliseconds(mode == "fine" ? 30000 : 500);
        group->Barrier(mode == "throw" ? Deadline::Never("layer 3 dispatch")
                                       : Deadline::After(limit, "layer 3 dispatch"));
      },
      [](size_t failed, std::string_view message) {
        std::printf("rank %zu reports: %.*s\n", failed, static_cast<int>(message.size()),
                    message.data());
        std::fflush(stdout);
      });
  std::printf("rank %zu ends with status %d\n", rank, status);
  return status;
}
