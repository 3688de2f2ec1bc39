// The ranks that mpirun has started, and what a model spread over them needs.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "switchyard/core/settings.h"
#include "switchyard/model/model.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/parallel/peer_watch.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::cli {

// The world of this program, or null without mpirun. Set by main.
ProcessGroup* World();
void SetWorld(ProcessGroup* world);

// Whether this rank owns stdin, stdout and error messages.
bool IsFirstRank();

// This rank's number among those on its host, and how many they are; {0, 1} without mpirun.
struct HostPlace {
  size_t rank = 0;
  size_t size = 1;
};
HostPlace PlaceOnHost();

// What ends a rank that has followed rank 0 to its end; caught by main.
struct FollowerDone {};

// The groups of a model and what its layers share. Lives as long as the model.
class ModelRanks {
 public:
  // Null for a model on one rank with backend none. Collective over the world.
  // Errors: those of MakeGroups and ExpertParallel; kFailedPrecondition for a backend without
  //   mpirun.
  static std::unique_ptr<ModelRanks> Make(const Settings& settings, size_t max_sequences);

  ~ModelRanks();
  ModelRanks(const ModelRanks&) = delete;
  ModelRanks& operator=(const ModelRanks&) = delete;

  moe::ExpertParallel& ep() { return *ep_; }
  // Whether the process of a rank of the world is gone. Errors: kCancelled if this job is being
  //   ended.
  bool IsDead(size_t rank);
  // Most tokens of one pass that buffers were made for.
  size_t max_pass_tokens() const { return max_pass_tokens_; }

 private:
  ModelRanks() = default;
  void Watch();

  size_t max_pass_tokens_ = 0;
  std::unique_ptr<PeerWatch> watch_;
  std::unique_ptr<ParallelGroups> groups_;
  std::unique_ptr<moe::ExpertParallel> ep_;
};

// What the settings say about exchanges between ranks; limits on tokens are left as they are.
// Errors: kInvalidArgument naming the setting.
moe::ExpertParallelOptions ExchangeOptions(const Settings& settings);

// Runs body on every rank and makes sure that it succeeded everywhere: one rank without the file,
// or without memory, ends all with its message.
void OnAllRanks(const std::function<void()>& body);

// What this build and its launcher can do: the MPI library, and whether ranks may be lost.
std::string DescribeMpi();

// Starts the ranks if mpirun has started this program, runs body on each, and returns the exit
// status, the same on all.
int RunOnRanks(int argc, char** argv, const std::function<int()>& body);

}  // namespace switchyard::cli
