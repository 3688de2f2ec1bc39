// A ProcessGroup whose ranks are MPI processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/group_base.h"
#include "parallel_mpi/mpi_calls.h"
#include "parallel_mpi/mpi_job.h"

namespace switchyard::parallel_mpi {

// Collectives are MPI's non-blocking ones on a communicator of the group, driven by MPI_Test so
// that every wait can end: by its deadline, or by news of a failure. Once one has been given up,
// its communicator is never used again nor freed.
class MpiGroup final : public parallel::GroupBase {
 public:
  static std::unique_ptr<MpiGroup> MakeWorld(std::shared_ptr<MpiJob> job);
  ~MpiGroup() override;

  std::string_view carrier() const override { return "mpi"; }
  void Abort(std::string_view message) override;
  void MarkLost(size_t rank) override;

  // Whether MPI objects may still be freed, which takes all ranks: false when the group has failed,
  // a rank is lost, or this rank is leaving it by an exception.
  bool MayFree();
  // For messages about MPI calls.
  std::string Where() const;

 protected:
  void Start(parallel::Operation& operation) override;
  bool Progress(parallel::Operation& operation) override;
  void Abandon(parallel::Operation& operation) noexcept override;
  std::vector<size_t> LateRanks(const parallel::Operation& operation) override;
  void Poll(const parallel::Operation* operation,
            parallel::Backoff::Clock::duration waited) override;
  std::optional<std::string> FailureOfOthers() override;
  std::unique_ptr<ProcessGroup> MakeChild(Membership membership, size_t index) override;
  void NoChild() override;
  void CheckWindow(const WindowOptions& options, size_t bytes) override;
  std::unique_ptr<parallel::WindowMemory> MakeWindowMemory(const WindowOptions& options,
                                                           size_t bytes,
                                                           const Deadline& deadline) override;

 private:
  // ids are of this group, then of those that it came out of.
  MpiGroup(Membership membership, MPI_Comm communicator, std::vector<uint64_t> ids,
           std::shared_ptr<MpiJob> job);

  MPI_Datatype RowType(size_t row_bytes);
  void Call(parallel::Operation& operation, const std::byte* send, std::byte* recv);

  MPI_Comm communicator_;
  const std::vector<uint64_t> ids_;
  const std::shared_ptr<MpiJob> job_;
  std::vector<size_t> members_;  // world ranks
  std::map<size_t, MPI_Datatype> row_types_;
  uint64_t num_splits_ = 0;
  uint64_t told_arrived_ = 0;  // the last operation of which the others were told
};

}  // namespace switchyard::parallel_mpi
