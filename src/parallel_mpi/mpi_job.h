// What all groups of one MPI process share: news between ranks, and what must outlive them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parallel/backoff.h"
#include "parallel/group_base.h"
#include "parallel_mpi/mpi_calls.h"

namespace switchyard::parallel_mpi {

// News travel as small messages on a communicator of their own, which is looked at while waiting:
//
//   abort     a group has failed, and why
//   arrived   a rank has been waiting in collective number n of a group for some time; who has sent
//             no such news when a deadline passes is late
//   farewell  a rank has come to the end of the program, with this status
//
// They need no collective call, so they get through when collectives do not.
class MpiJob {
 public:
  // Collective over all processes. Errors: kUnavailable if MPI reports one.
  explicit MpiJob(size_t fake_node_size);
  // The last thing before MPI_Finalize; the job itself is destroyed after it, when MPI uses no
  // memory any more.
  void Close();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  size_t rank() const { return rank_; }
  size_t size() const { return nodes_.size(); }
  // [size] the number of the node of each rank.
  const std::vector<size_t>& nodes() const { return nodes_; }

  // Receives what has come.
  void Poll();

  // Tells `members` (world ranks) that the group has failed; the first reason stays.
  void Abort(uint64_t group, std::span<const size_t> members, std::string reason);
  std::optional<std::string> Failure(uint64_t group) const;

  // Tells `members` that this rank is in collective `number` of the group.
  void TellArrived(uint64_t group, std::span<const size_t> members, uint64_t number);
  // The highest number that `world_rank` has told of the group; 0 if none.
  uint64_t Arrived(uint64_t group, size_t world_rank) const;
  // Drops what has been told of arrivals. Failures stay: groups that came out of it may live on.
  void Forget(uint64_t group);

  // A process that is gone is told nothing and not waited for. One that MPI itself reports as dead
  // counts as marked.
  void MarkLost(size_t world_rank) { lost_.at(world_rank) = true; }
  bool has_lost() const { return std::ranges::find(lost_, true) != lost_.end(); }

  // Whether one of these ranks has said farewell a while ago, and will not come any more.
  std::optional<std::string> HasLeft(std::span<const size_t> members) const;

  // Tells all ranks the status of this one, waits for theirs and returns the highest. Without an
  // answer three seconds after the first status other than 0, nothing.
  std::optional<int> Farewell(int status);

  // Keeps what MPI may still read or write until the process ends.
  void Keep(std::unique_ptr<parallel::Operation::CarrierState> state,
            std::shared_ptr<const void> owner);

 private:
  struct Sent {
    MPI_Request request;
    std::unique_ptr<std::vector<std::byte>> bytes;
  };
  void Send(int tag, size_t to, uint64_t group, std::span<const std::byte> text);
  void SendAll(int tag, std::span<const size_t> to, uint64_t group,
               std::span<const std::byte> text);
  void Receive(int tag, size_t from, std::span<const std::byte> bytes);
  void DropSent();
  // Whether news are here, and from whom.
  bool Probe(MPI_Status& status);
  void AddFailure(uint64_t group, std::string reason);

  MPI_Comm news_ = MPI_COMM_NULL;
  size_t rank_ = 0;
  std::vector<size_t> nodes_;
  std::vector<Sent> sent_;
  std::map<uint64_t, std::string> failures_;
  std::map<std::pair<uint64_t, size_t>, uint64_t> arrived_;  // (group, world rank)
  std::vector<std::optional<int>> farewells_;
  std::vector<parallel::Backoff::Clock::time_point> left_at_;  // of those with a farewell
  std::vector<bool> lost_;
  bool probe_each_ = false;  // a process has died
  std::vector<
      std::pair<std::unique_ptr<parallel::Operation::CarrierState>, std::shared_ptr<const void>>>
      kept_;
};

}  // namespace switchyard::parallel_mpi
