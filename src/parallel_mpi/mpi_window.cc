#include "parallel_mpi/mpi_window.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <chrono>
#include <cstdint>
#include <cstring>

#include "parallel_mpi/mpi_group.h"
#include "switchyard/core/error.h"

namespace switchyard::parallel_mpi {
namespace {

// Where Open MPI and MPICH put windows on Linux.
constexpr const char* kSharedMemory = "/dev/shm";
// How long a rank that frees a window waits for the others; it keeps the memory then.
constexpr std::chrono::milliseconds kFreeLimit{10000};
// Open MPI puts parts on pages of their own, but behind a header. Every process maps the memory at
// a page, so all of them round a part's address up by the same number of bytes.
constexpr size_t kPage = 4096;

std::byte* RoundUp(std::byte* address) {
  return address + (kPage - reinterpret_cast<uintptr_t>(address) % kPage) % kPage;
}

double MiB(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

void CheckSharedMemory(const WindowOptions& options, size_t bytes, size_t ranks,
                       std::string_view where) {
  struct statvfs info {};
  if (statvfs(kSharedMemory, &info) != 0) return;  // not there, so it is not used
  const size_t free = static_cast<size_t>(info.f_bavail) * static_cast<size_t>(info.f_frsize);
  if (bytes + kPage <= free / ranks) return;
  throw Error(ErrorCode::kResourceExhausted,
              fmt::format("{}: window \"{}\": {:.1f} MiB for each of {} ranks on this node exceed "
                          "the {:.1f} MiB that are free in {}; enlarge it (mount -o "
                          "remount,size=..., docker run --shm-size=...) or lower {}",
                          where, options.name, MiB(bytes), ranks, MiB(free), kSharedMemory,
                          options.setting));
}

MpiWindow::MpiWindow(MpiGroup& group, MPI_Comm communicator, size_t bytes, const Deadline& deadline)
    : group_(group) {
  const std::string where = group.Where();
  CheckMpi(MPI_Comm_split(communicator, static_cast<int>(group.node_peers().front()),
                          static_cast<int>(group.rank()), &node_),
           "MPI_Comm_split", where);
  MPI_Comm_set_errhandler(node_, MPI_ERRORS_RETURN);
  // Each part on pages of its own, so that its owner's first touch decides where they are.
  MPI_Info info = MPI_INFO_NULL;
  MPI_Info_create(&info);
  MPI_Info_set(info, "alloc_shared_noncontig", "true");
  std::byte* mine = nullptr;
  const int code = MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes + kPage), 1, info, node_,
                                           static_cast<void*>(&mine), &window_);
  MPI_Info_free(&info);
  CheckMpi(code, "MPI_Win_allocate_shared", where);
  MPI_Win_set_errhandler(window_, MPI_ERRORS_RETURN);

  parts.resize(group.size());
  int node_rank = 0;
  for (size_t peer : group.node_peers()) {
    MPI_Aint size = 0;
    int unit = 0;
    CheckMpi(
        MPI_Win_shared_query(window_, node_rank++, &size, &unit, static_cast<void*>(&parts[peer])),
        "MPI_Win_shared_query", where);
    parts[peer] = RoundUp(parts[peer]);
  }
  std::memset(parts[group.rank()], 0, bytes);
  group.Barrier(deadline);
}

MpiWindow::~MpiWindow() {
  if (!group_.MayFree()) return;
  // MPI_Win_free waits without a limit, so first make sure that all are here; on the window's own
  // communicator, where nothing else can be taken for it.
  try {
    MPI_Request request = MPI_REQUEST_NULL;
    CheckMpi(MPI_Ibarrier(node_, &request), "MPI_Ibarrier", group_.Where());
    const auto done = [&] {
      int all_here = 0;
      CheckMpi(MPI_Test(&request, &all_here, MPI_STATUS_IGNORE), "MPI_Test", group_.Where());
      return all_here != 0;
    };
    group_.WaitUntil(done, Deadline::After(kFreeLimit, "end"), "free a window", nullptr,
                     [] { return std::string("some ranks have not come"); });
  } catch (const Error&) {
    return;
  }
  MPI_Win_free(&window_);
  MPI_Comm_free(&node_);
}

}  // namespace switchyard::parallel_mpi
