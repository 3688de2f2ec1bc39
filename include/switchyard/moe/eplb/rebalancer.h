// Keeps the experts of a running model balanced over its ranks: counts, plans, and moves weights
// between forward passes. Contract 7.4.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/core/settings.h"
#include "switchyard/moe/contract/placement.h"
#include "switchyard/moe/eplb/algorithms.h"
#include "switchyard/moe/eplb/expert_mover.h"
#include "switchyard/moe/eplb/location.h"
#include "switchyard/moe/eplb/recorder.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

// The same on all ranks, except mover.max_bytes.
struct RebalancerOptions {
  size_t num_iterations = 1000;  // passes from one look at the loads to the next
  size_t layers_per_chunk = 0;   // moved after one pass; 0 = all
  double min_utilization = 1.0;  // balanced enough above it; 1 = never
  EplbPolicy policy;
  size_t num_groups = 0;  // of experts, 0 = unknown

  RecorderMode recorder_mode = RecorderMode::kStat;
  int64_t recorder_buffer_size = 0;  // passes; 0 = num_iterations, -1 = all since the last look
  // True: every rank routes the same tokens (a2a backend none), and rank 0's counts are the loads.
  // False: each token is routed on one rank, and the counts of all are added. Counts of arrived
  // rows (kStatApprox) are added in both cases.
  bool tokens_are_replicated = false;

  DispatchAlgorithm dispatch = DispatchAlgorithm::kStatic;  // of Placement()
  std::chrono::milliseconds timeout{300'000};               // of one exchange, and of one agreement
  MoverOptions mover;
};

// What the settings say (enable-eplb, ep-num-redundant-experts and init-expert-location are the
// caller's affair).
// Errors: kInvalidArgument naming the setting.
RebalancerOptions RebalancerOptionsOf(const Settings& settings);

// Nodes of a group, if its ranks lie on them as ExpertLocationSizes says: neighbours together,
// equally many on each; else 1.
size_t NumRegularNodes(const ProcessGroup& group);

// An expert that was on lost ranks only.
struct LostExpert {
  size_t layer = 0;
  size_t logical = 0;
};

// What has happened so far.
struct RebalanceStats {
  size_t num_looks = 0;         // at the loads
  size_t num_skipped = 0;       // balanced enough
  size_t num_failed = 0;        // migrations that were given up
  size_t layers_moved = 0;      // switched to a new placement
  size_t experts_received = 0;  // by this rank
  size_t bytes_received = 0;    // by this rank
  double last_utilization = 1;  // mean over passes and layers of the last look
};

// Runs on every rank of a MoE-EP group; the object and its calls are collective. Between two passes
// a layer is switched as a whole, its weights and its placement, on all ranks at the same pass: so
// every pass computes the same answer wherever the experts are, and no pass waits for more than one
// chunk.
//
// A migration that fails on a rank for lack of memory is given up on all of them with a warning:
// layers that were switched stay switched, the others stay where they are, and all goes on. A lost
// peer (kUnavailable) is the caller's to handle.
//
// Used by one thread, the one that runs the forward passes.
class ExpertRebalancer {
 public:
  // Called on every rank after a layer's weights and placement were switched, with the layer's
  // number. Placement(layer) gives the new one; views of the old one end with this call. It may not
  // throw.
  using OnLayer = std::function<void(size_t layer)>;

  // `group`: the ranks of the location, in its order. `layers`: the weights of every layer that the
  // location has, as this rank's slots of it say; they outlive the rebalancer, and so does the
  // group. load_expert is given on all ranks or on none.
  // Errors: kInvalidArgument naming option, layer or list, if options contradict each other (a
  //   recorder buffer larger than num_iterations), the sizes do not fit, or layers are laid out
  //   differently on two ranks. The same error on all ranks.
  ExpertRebalancer(const RebalancerOptions& options, const ExpertLocation& initial,
                   ProcessGroup& group, std::span<ExpertWeights* const> layers,
                   OnLayer on_layer = {}, LoadExpert load_expert = {});

  // Give it to the router.
  RoutingObserver& observer() { return recorder_; }
  // For its other hooks and its figures.
  ExpertRecorder& recorder() { return recorder_; }

  // Around every forward pass, on every rank, also where it has no tokens. EndStep looks at the
  // loads when it is time, and migrates the next chunk.
  // Errors: kFailedPrecondition if steps nest, or ranks have made different numbers of them;
  //   kUnavailable if a peer is lost.
  void BeginStep();
  void EndStep();
  // In place of EndStep, on every rank, if the pass failed; it counts for nothing.
  void AbortStep();

  // Whether layers wait for their turn.
  bool is_migrating() const { return target_ != nullptr; }
  // Plans and moves all layers now, whatever the utilization and the period.
  // Errors: as EndStep; kFailedPrecondition within a step.
  void RebalanceNow();

  // After ranks were lost (or came back, holding the experts that they held): places all experts on
  // the active ranks and moves all layers at once. The algorithm is elasticity_aware from now on.
  // `alive`: a group of the active ranks, ascending; only they call, and all later exchanges are
  // theirs. Null: every rank of the location calls, also those that are only masked. Experts that
  // no active rank holds are listed in a warning and returned; load_expert brings them back, else
  // they are zeros and add nothing.
  //
  // Shapes: active_ranks [R], 0 = lost.
  // Errors: kInvalidArgument if the mask or the group does not fit, or the active ranks cannot hold
  //   all experts; kFailedPrecondition within a step; the failure of a migration: layers that were
  //   switched before stay so. All of these on all ranks that call; the mask stays in force.
  std::vector<LostExpert> Rebalance(std::span<const uint8_t> active_ranks,
                                    std::unique_ptr<ProcessGroup> alive = nullptr);

  // What the router of this rank needs; refers to the rebalancer, until the layer is switched.
  ExpertPlacement Placement(size_t layer) const;
  // The placement in force, [P].
  std::span<const int32_t> PhysicalToLogical(size_t layer) const;
  // The same of all layers, [L, P].
  std::vector<int32_t> MapOfAllLayers() const;

  const RebalanceStats& stats() const { return stats_; }
  // Memory of the experts that came to this rank.
  size_t owned_bytes() const;

 private:
  struct Loads {
    size_t num_passes = 0;  // that were recorded
    double utilization = 1;
    size_t num_steps = 1;  // S that the algorithm looks at: all passes, or their sum
    std::vector<float> tokens_per_expert;  // [S, L, E]
  };

  ProcessGroup& group() const { return alive_ ? *alive_ : *group_; }
  Deadline Limit(std::string_view stage) const { return Deadline::After(options_.timeout, stage); }
  bool AddsCounts() const;
  size_t FirstActive() const;
  bool IsActive(size_t rank) const { return active_.empty() || active_[rank] != 0; }

  void CheckLayouts();
  void RequireNoStep() const;
  void LookAtLoads();
  Loads CollectLoads();
  void CountRankTokens(std::span<float> rank_tokens) const;
  double MeanUtilization(std::span<const float> rank_tokens, size_t num_steps) const;
  void PlanTarget(const Loads& loads);
  void TryMigrate(size_t num_layers);
  void MigrateLayers(size_t count);
  void MigrateLayer(size_t layer);
  void UpdateHeld(size_t layer, const MigrationPlan& plan);
  void NoteLost(size_t layer, std::span<const int32_t> experts);
  void EndMigration();

  RebalancerOptions options_;
  ExpertLocationSizes sizes_;
  size_t ep_rank_;
  std::unique_ptr<ProcessGroup> group_;  // of all ranks, our own
  std::unique_ptr<ProcessGroup> alive_;  // of the active ones, if given
  std::vector<size_t> ep_ranks_;         // [group().size()]
  std::vector<size_t> node_of_rank_;     // [R]
  std::vector<uint8_t> active_;          // [R], or empty
  OnLayer on_layer_;
  LoadExpert load_expert_;

  std::vector<ExpertMover> movers_;                           // [L]
  std::vector<std::shared_ptr<const ExpertLocation>> where_;  // [L], several may share one
  std::vector<std::vector<int32_t>> held_;
  ExpertRecorder recorder_;

  uint64_t next_pass_ = 0;
  bool in_step_ = false;
  size_t passes_since_ = 0;                       // the last look or the end of its migration
  std::shared_ptr<const ExpertLocation> target_;  // of the migration under way
  size_t next_layer_ = 0;                         // the first that is still to be moved to it
  std::vector<LostExpert> lost_;                  // found by the migration under way
  RebalanceStats stats_;
};

}  // namespace switchyard::moe
