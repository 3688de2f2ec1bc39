// Counts calls of MPI. Not in the library: a test compiles it, and then all of its program's calls
// are counted.
#pragma once

#include <cstddef>

namespace switchyard::parallel_mpi {

// Calls so far that move bytes, or wait for them. MPI_Iprobe is left out: a rank that waits for
// more than 0.1 ms looks for news of the others, with fewer cores than ranks in every step.
size_t NumMpiCalls();

}  // namespace switchyard::parallel_mpi
