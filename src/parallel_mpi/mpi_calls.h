// mpi.h without its retired C++ bindings, and its return codes as errors.
#pragma once

// The bindings would make programs need a library that not every MPI has.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <string>
#include <string_view>

namespace switchyard::parallel_mpi {

// The carrier's own text for an MPI return code.
std::string MpiErrorText(int code);

// Whether an MPI return code says that a process has died. Open MPI 5 has such codes, and gives
// them when it was started with --with-ft.
bool SaysProcessFailed(int code);

// Throws kUnavailable naming `call` and `where` unless code is MPI_SUCCESS.
void CheckMpi(int code, std::string_view call, std::string_view where);

}  // namespace switchyard::parallel_mpi
