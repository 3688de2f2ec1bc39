// Ranks as MPI processes, started with mpirun.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "switchyard/parallel/process_group.h"

namespace switchyard {

// MPI from its start to its end; one per process, for the whole life of the program. Started
// without mpirun, it is a world of one rank.
//
// Groups in a session: exchanges are non-blocking MPI collectives on communicators of their own,
// windows are MPI's shared memory. SWITCHYARD_FAKE_NODE_SIZE=p makes p neighbouring ranks of a host
// a node, to test what crosses nodes on one machine. All groups of a process are used by one thread
// at a time. Calls are those of MPI 3.1; none of them is ULFM's. When a process dies, mpirun ends
// the job, unless it was started with --enable-recovery (Open MPI 4.1) or --with-ft ulfm (Open MPI
// 5): then the others go on with what needs no collective call, which is all that happens in shared
// windows, and after MarkLost the session ends the process without MPI_Finalize, which would wait
// for the dead one.
class MpiSession {
 public:
  // Errors: kUnavailable if MPI does not start or cannot be called from changing threads;
  //   kInvalidArgument if SWITCHYARD_FAKE_NODE_SIZE is not a number, on all ranks;
  //   kFailedPrecondition for a second session.
  MpiSession(int* argc, char*** argv);
  // Ends with status 1 if End was not called.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  ProcessGroup& world();

  // Waits until every rank has called it and returns the highest status that a rank gave, the same
  // everywhere. If that is not 0 and some rank does not come within three seconds, mpirun is told
  // to end the job. Destroy all groups before; nothing but the destructor may follow.
  int End(int status);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The main of a program with MPI: runs body(world) on every rank and returns the exit status, the
// same on all: 0, or 1 if a rank threw. A rank that throws aborts the world, so that the others
// fail with its message instead of waiting. report(rank, message) is called on every rank that
// failed, before MPI ends.
// Errors: those of MpiSession's constructor.
int RunMpi(int* argc, char*** argv, const std::function<void(ProcessGroup&)>& body,
           const std::function<void(size_t rank, std::string_view message)>& report);

// "Open MPI v4.1.4, …": the library that is linked.
std::string_view MpiLibraryVersion();

}  // namespace switchyard
