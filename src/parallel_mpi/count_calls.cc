#include "parallel_mpi/count_calls.h"

#include <atomic>

#include "parallel_mpi/mpi_calls.h"

namespace {

std::atomic<size_t> g_calls{0};

}  // namespace

// MPI's profiling interface: these definitions come before those of the library.
extern "C" {
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  ++g_calls;
  return PMPI_Ibarrier(comm, request);
}
int MPI_Iallgather(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                   int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  ++g_calls;
  return PMPI_Iallgather(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}
int MPI_Iallgatherv(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                    const int recv_counts[], const int starts[], MPI_Datatype recv_type,
                    MPI_Comm comm, MPI_Request* request) {
  ++g_calls;
  return PMPI_Iallgatherv(send, send_count, send_type, recv, recv_counts, starts, recv_type, comm,
                          request);
}
int MPI_Ialltoall(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                  int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  ++g_calls;
  return PMPI_Ialltoall(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}
int MPI_Ialltoallv(const void* send, const int send_counts[], const int send_starts[],
                   MPI_Datatype send_type, void* recv, const int recv_counts[],
                   const int recv_starts[], MPI_Datatype recv_type, MPI_Comm comm,
                   MPI_Request* request) {
  ++g_calls;
  return PMPI_Ialltoallv(send, send_counts, send_starts, send_type, recv, recv_counts, recv_starts,
                         recv_type, comm, request);
}
int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  ++g_calls;
  return PMPI_Test(request, flag, status);
}
}

namespace switchyard::parallel_mpi {

size_t NumMpiCalls() { return g_calls.load(); }

}  // namespace switchyard::parallel_mpi
