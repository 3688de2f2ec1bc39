#include "parallel_mpi/mpi_group.h"

#include <fmt/format.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "parallel_mpi/mpi_window.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::parallel_mpi {
namespace {

using parallel::Collective;
using parallel::CollectiveName;
using parallel::Operation;
using parallel::RowLayout;

// A rank that has waited this long says so to the others, once per operation: they can tell by it
// who is late, and a few messages cost nothing beside such a wait.
constexpr std::chrono::milliseconds kTellAfter{5};

// Rows as MPI counts them.
struct Counts {
  std::vector<int> rows;
  std::vector<int> starts;

  void Assign(const RowLayout& layout, size_t row_bytes, std::string_view where) {
    rows.resize(layout.rows.size());
    starts.resize(layout.rows.size());
    if (layout.Extent() > INT_MAX || row_bytes > INT_MAX) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} rows of {} bytes exceed what MPI counts; at most {} rows of "
                              "{} bytes can be sent at once",
                              where, layout.Extent(), row_bytes, INT_MAX, INT_MAX));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<int>(layout.rows[i]);
      // The start of no rows means nothing and may lie anywhere.
      starts[i] = rows[i] == 0 ? 0 : static_cast<int>(layout.starts[i]);
    }
  }
};

struct MpiState final : Operation::CarrierState {
  MPI_Request request = MPI_REQUEST_NULL;
  Counts send;
  Counts recv;
  // Copies of the rows, for buffers without an owner.
  bool staged = false;
  std::vector<std::byte> send_copy;
  std::vector<std::byte> recv_copy;
};

void CopyRows(const RowLayout& layout, size_t row_bytes, const std::byte* from, std::byte* to) {
  for (size_t i = 0; i < layout.rows.size(); ++i) {
    const size_t bytes = layout.rows[i] * row_bytes;
    if (bytes == 0) continue;
    std::memcpy(to + layout.starts[i] * row_bytes, from + layout.starts[i] * row_bytes, bytes);
  }
}

// An id that all members of a new group come to, and no other group has (64 bits, well mixed).
uint64_t ChildId(uint64_t parent, uint64_t split, uint64_t index) {
  uint64_t id = parent;
  for (uint64_t part : {split, index}) {
    id = (id ^ part) * 0x9E3779B97F4A7C15u;
    id ^= id >> 29;
    id = id * 0xBF58476D1CE4E5B9u;
    id ^= id >> 32;
  }
  return id;
}

}  // namespace

MpiGroup::MpiGroup(Membership membership, MPI_Comm communicator, std::vector<uint64_t> ids,
                   std::shared_ptr<MpiJob> job)
    : GroupBase(std::move(membership)),
      communicator_(communicator),
      ids_(std::move(ids)),
      job_(std::move(job)) {
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  for (size_t member = 0; member < size(); ++member) members_.push_back(WorldRank(member));
}

std::unique_ptr<MpiGroup> MpiGroup::MakeWorld(std::shared_ptr<MpiJob> job) {
  Membership membership{
      .name = "world", .rank = job->rank(), .world_ranks = {}, .nodes = job->nodes()};
  membership.world_ranks.resize(job->size());
  std::iota(membership.world_ranks.begin(), membership.world_ranks.end(), size_t{0});
  MPI_Comm communicator = MPI_COMM_NULL;
  CheckMpi(MPI_Comm_dup(MPI_COMM_WORLD, &communicator), "MPI_Comm_dup", "start");
  return std::unique_ptr<MpiGroup>(
      new MpiGroup(std::move(membership), communicator, {1}, std::move(job)));
}

MpiGroup::~MpiGroup() {
  job_->Forget(ids_.front());
  if (!MayFree()) return;
  for (auto& [bytes, type] : row_types_) MPI_Type_free(&type);
  MPI_Comm_free(&communicator_);
}

bool MpiGroup::MayFree() {
  return std::uncaught_exceptions() == 0 && !Failure() && !job_->has_lost();
}

void MpiGroup::MarkLost(size_t rank) { job_->MarkLost(members_.at(rank)); }

std::string MpiGroup::Where() const { return fmt::format("group \"{}\"", name()); }

// --- Collectives ------------------------------------------------------------------------------

MPI_Datatype MpiGroup::RowType(size_t row_bytes) {
  const auto [entry, is_new] = row_types_.try_emplace(row_bytes, MPI_DATATYPE_NULL);
  if (is_new) {
    CheckMpi(MPI_Type_contiguous(static_cast<int>(row_bytes), MPI_BYTE, &entry->second),
             "MPI_Type_contiguous", Where());
    CheckMpi(MPI_Type_commit(&entry->second), "MPI_Type_commit", Where());
  }
  return entry->second;
}

void MpiGroup::Call(Operation& operation, const std::byte* send, std::byte* recv) {
  auto& state = static_cast<MpiState&>(*operation.carrier);
  MPI_Request* request = &state.request;
  const auto check = [&](int code, const char* call) { CheckMpi(code, call, Where()); };
  if (operation.collective == Collective::kBarrier)
    return check(MPI_Ibarrier(communicator_, request), "MPI_Ibarrier");

  const MPI_Datatype row = RowType(operation.row_bytes);
  switch (operation.collective) {
    case Collective::kBarrier: return;
    case Collective::kAllGather:
      return check(MPI_Iallgather(send, 1, row, recv, 1, row, communicator_, request),
                   "MPI_Iallgather");
    case Collective::kAllToAll:
      return check(MPI_Ialltoall(send, 1, row, recv, 1, row, communicator_, request),
                   "MPI_Ialltoall");
    case Collective::kAllToAllV:
      return check(MPI_Ialltoallv(send, state.send.rows.data(), state.send.starts.data(), row, recv,
                                  state.recv.rows.data(), state.recv.starts.data(), row,
                                  communicator_, request),
                   "MPI_Ialltoallv");
    case Collective::kAllGatherV:
      return check(MPI_Iallgatherv(send, state.send.rows[0], row, recv, state.recv.rows.data(),
                                   state.recv.starts.data(), row, communicator_, request),
                   "MPI_Iallgatherv");
  }
}

void MpiGroup::Start(Operation& operation) {
  if (!operation.carrier) operation.carrier = std::make_unique<MpiState>();
  auto& state = static_cast<MpiState&>(*operation.carrier);
  state.request = MPI_REQUEST_NULL;
  state.send.Assign(operation.send_layout, operation.row_bytes, Where());
  state.recv.Assign(operation.recv_layout, operation.row_bytes, Where());
  state.staged = operation.owner == nullptr;
  if (!state.staged) return Call(operation, operation.send, operation.recv);
  state.send_copy.resize(operation.send_layout.Extent() * operation.row_bytes);
  state.recv_copy.resize(operation.recv_layout.Extent() * operation.row_bytes);
  CopyRows(operation.send_layout, operation.row_bytes, operation.send, state.send_copy.data());
  Call(operation, state.send_copy.data(), state.recv_copy.data());
}

bool MpiGroup::Progress(Operation& operation) {
  auto& state = static_cast<MpiState&>(*operation.carrier);
  int done = 0;
  CheckMpi(MPI_Test(&state.request, &done, MPI_STATUS_IGNORE), CollectiveName(operation.collective),
           Where());
  if (done == 0) return false;
  if (state.staged)
    CopyRows(operation.recv_layout, operation.row_bytes, state.recv_copy.data(), operation.recv);
  return true;
}

void MpiGroup::Abandon(Operation& operation) noexcept {
  if (operation.carrier) job_->Keep(std::move(operation.carrier), std::move(operation.owner));
}

// --- News -------------------------------------------------------------------------------------

void MpiGroup::Abort(std::string_view message) {
  job_->Abort(ids_.front(), members_,
              fmt::format("rank {} of group \"{}\" failed: {}", rank(), name(), message));
}

std::optional<std::string> MpiGroup::FailureOfOthers() {
  for (uint64_t id : ids_) {
    if (auto reason = job_->Failure(id)) return reason;
  }
  return job_->HasLeft(members_);
}

void MpiGroup::Poll(const Operation* operation, parallel::Backoff::Clock::duration waited) {
  job_->Poll();
  if (operation == nullptr || waited < kTellAfter || told_arrived_ >= operation->number) return;
  told_arrived_ = operation->number;
  job_->TellArrived(ids_.front(), members_, operation->number);
}

std::vector<size_t> MpiGroup::LateRanks(const Operation& operation) {
  std::vector<size_t> late;
  for (size_t other = 0; other < size(); ++other) {
    // A rank that shares no rows with this one may well be through already.
    const bool matters = operation.collective != Collective::kAllToAllV ||
                         operation.send_layout.rows[other] != 0 ||
                         operation.recv_layout.rows[other] != 0;
    if (other == rank() || !matters) continue;
    if (job_->Arrived(ids_.front(), members_[other]) < operation.number) late.push_back(other);
  }
  return late;
}

// --- New groups and windows -------------------------------------------------------------------

std::unique_ptr<ProcessGroup> MpiGroup::MakeChild(Membership membership, size_t index) {
  std::vector<uint64_t> ids{ChildId(ids_.front(), ++num_splits_, index)};
  ids.insert(ids.end(), ids_.begin(), ids_.end());
  MPI_Comm communicator = MPI_COMM_NULL;
  CheckMpi(MPI_Comm_split(communicator_, static_cast<int>(index), static_cast<int>(membership.rank),
                          &communicator),
           "MPI_Comm_split", Where());
  return std::unique_ptr<MpiGroup>(
      new MpiGroup(std::move(membership), communicator, std::move(ids), job_));
}

void MpiGroup::NoChild() {
  ++num_splits_;
  MPI_Comm none = MPI_COMM_NULL;
  CheckMpi(MPI_Comm_split(communicator_, MPI_UNDEFINED, 0, &none), "MPI_Comm_split", Where());
}

void MpiGroup::CheckWindow(const WindowOptions& options, size_t bytes) {
  // One rank per node looks: the memory is the node's.
  if (node_peers().front() != rank()) return;
  CheckSharedMemory(options, bytes, node_peers().size(), Where());
}

std::unique_ptr<parallel::WindowMemory> MpiGroup::MakeWindowMemory(const WindowOptions&,
                                                                   size_t bytes,
                                                                   const Deadline& deadline) {
  return std::make_unique<MpiWindow>(*this, communicator_, bytes, deadline);
}

}  // namespace switchyard::parallel_mpi
