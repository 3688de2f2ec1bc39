// Counts which experts were used, for load balancing and for people. Contract 7.5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// What is kept of each forward pass.
enum class RecorderMode {
  kStat,        // counts per physical expert, from the chosen ids
  kStatApprox,  // the same from what this rank's experts received
  kPerPass,     // as kStat, with the pass's number
  kPerToken,    // the ids of every token as well
};

// Errors: kInvalidArgument listing the names stat, stat_approx, per_pass, per_token.
RecorderMode ParseRecorderMode(std::string_view name);

// Fixed when the recorder is built.
struct RecorderOptions {
  RecorderMode mode = RecorderMode::kStat;
  size_t num_layers = 0;
  size_t num_logical = 0;   // E
  size_t num_physical = 0;  // P, a multiple of ep_size
  size_t ep_size = 1;
  size_t ep_rank = 0;
  int64_t buffer_size = 1000;  // passes kept, the oldest goes first; -1: all
};

// One forward pass.
//
// Shapes: physical_counts i32 [L, P]; token_ids[layer] i32 [tokens, columns] (kPerToken only).
struct RecordedPass {
  uint64_t pass_id = 0;
  std::vector<int32_t> physical_counts;
  std::vector<std::vector<int32_t>> token_ids;
  std::vector<size_t> token_columns;  // [L]
};

// Loads for PlanExperts, in logical experts.
//
// Shapes: tokens_per_expert f32 [S, L, E].
struct RecordedLoads {
  size_t num_steps = 0;
  std::vector<float> tokens_per_expert;
  double mean_utilization = 1;  // over passes and layers (contract 7.4)
};

// Not thread-safe: the thread that runs the forward pass calls it. Ids outside [0, P), -1 among
// them, are ignored; shared slots are never counted. Outside Start/Stop and outside a pass nothing
// is recorded.
class ExpertRecorder : public RoutingObserver {
 public:
  // Shapes: physical_to_logical i32 [L, P].
  // Errors: kInvalidArgument naming the option, or the slot of the map that is out of range.
  ExpertRecorder(const RecorderOptions& options, std::span<const int32_t> physical_to_logical);

  void Start() { is_recording_ = true; }
  void Stop() { is_recording_ = false; }
  bool is_recording() const { return is_recording_; }

  // A new placement; forgets all passes, whose physical ids it would misread.
  // Shapes: physical_to_logical i32 [L, P].
  // Errors: as the constructor; kFailedPrecondition within a pass.
  void SetPlacement(std::span<const int32_t> physical_to_logical);

  // Errors: kFailedPrecondition if a pass begins within a pass or ends without one.
  void BeginPass(uint64_t pass_id);
  void EndPass();
  // Forgets an unfinished pass after an error.
  void AbortPass() { current_.reset(); }

  // Hooks. The source is the chosen ids (OnPhysicalExperts) in every mode but kStatApprox, which
  // counts what arrived instead: rows per local expert, of this rank.
  // Shapes: counts, masked_m i32 [P / ep_size].
  // Errors: kInvalidArgument naming the layer or the size.
  void OnPhysicalExperts(const RoutedExperts& routed) override;
  void OnDispatchNormal(size_t layer, std::span<const int32_t> counts);
  void OnDispatchLowLatency(size_t layer, std::span<const int32_t> masked_m);

  size_t num_passes() const { return passes_.size(); }
  // Oldest first. Errors: kInvalidArgument if there is no such pass.
  const RecordedPass& Pass(size_t index) const;

  // Everything kept, folded to logical experts. Counts of other ranks are added by the caller.
  RecordedLoads Dump() const;
  void Clear();

  // Utilization of the ranks in one layer of a pass: the balancedness figure.
  double Balancedness(const RecordedPass& pass, size_t layer) const;

  // Tokens per rank of one layer, summed over all passes: a row of the heat map.
  // Shapes: returns [ep_size].
  std::vector<double> RankTokens(size_t layer) const;

 private:
  void AddLocal(size_t layer, std::span<const int32_t> counts);
  void CheckLayer(size_t layer) const;
  std::vector<double> RankTokens(const RecordedPass& pass, size_t layer) const;

  RecorderOptions options_;
  std::vector<int32_t> physical_to_logical_;  // [L, P]
  bool is_recording_ = false;
  std::optional<RecordedPass> current_;
  RecordedPass spare_;                // what fell out of the ring: memory of the next pass
  std::vector<RecordedPass> passes_;  // a ring once it is full
  size_t oldest_ = 0;
};

}  // namespace switchyard::moe
