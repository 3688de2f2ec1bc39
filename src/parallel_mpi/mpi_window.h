// Shared memory of a node through MPI.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "parallel/group_base.h"
#include "parallel_mpi/mpi_calls.h"

namespace switchyard::parallel_mpi {

class MpiGroup;

// Throws kResourceExhausted, naming options.name and options.setting, if /dev/shm has no room for
// `ranks` parts of `bytes` bytes. MPI itself does not look: the first write beyond the limit kills
// the process.
void CheckSharedMemory(const WindowOptions& options, size_t bytes, size_t ranks,
                       std::string_view where);

// An MPI window of which only the memory is used: loads, stores and flags, no MPI call after it is
// made.
class MpiWindow final : public parallel::WindowMemory {
 public:
  // Collective over the group.
  MpiWindow(MpiGroup& group, MPI_Comm communicator, size_t bytes, const Deadline& deadline);
  // Collective while the group is well. Else the memory stays mapped until the process ends: a
  // rank that is late may still write there, and MPI_Win_free would wait for it.
  ~MpiWindow() override;

 private:
  MpiGroup& group_;
  MPI_Comm node_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
};

}  // namespace switchyard::parallel_mpi
