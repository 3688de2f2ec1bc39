// What the layers of a model share when their experts are spread over ranks: groups, limits,
// exchange buffers, and which ranks are alive. Contract 1.7, 3.15.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/parallel/parallel_groups.h"

namespace switchyard::moe {

class FusedMoeBuffer;  // moe/fuseep/fused_moe.h
class RowChannel;
class TokenGather;
struct RowChannelOptions;

// Which half of a two-mode protocol runs (contract 3.6).
enum class DeepepMode { kAuto, kNormal, kLowLatency };
// auto, normal, low_latency. Errors: kInvalidArgument listing them.
DeepepMode ParseDeepepMode(std::string_view name);

// Whether rows between nodes travel once for each node, through the rank with the sender's number
// there, instead of once for each rank. It takes nodes of one size; kAuto: 2 to 16 of them, with
// at least 2 ranks.
enum class Hierarchy { kAuto, kOn, kOff };
// auto, on, off. Errors: kInvalidArgument listing them.
Hierarchy ParseHierarchy(std::string_view name);

// Rows that a rank has sent to other ranks: tokens on their way out, results on their way home.
struct ExchangeStats {
  uint64_t rows_in_node = 0;
  uint64_t rows_between_nodes = 0;
  uint64_t results_in_node = 0;
  uint64_t results_between_nodes = 0;

  ExchangeStats& operator+=(const ExchangeStats& other);
};

// What a rank reads of a pass before it begins: equal on all ranks.
enum class ForwardPhase { kPrefill, kDecode };

// Limits and choices; the same on all ranks. Names of settings in brackets.
struct ExpertParallelOptions {
  // Most tokens of one rank in a pass, for every protocol but the low-latency ones [chunk and
  // sequences].
  size_t max_tokens_per_rank = 1024;
  // Of the low-latency protocols and FuseEP, 1 to 1024
  // [num-max-dispatch-tokens-per-rank].
  size_t num_max_dispatch_tokens_per_rank = 128;
  std::chrono::milliseconds timeout{10000};  // of every wait for other ranks [ep-timeout-ms]
  DeepepMode deepep_mode = DeepepMode::kAuto;
  // Every rank has all tokens of a pass (replicated attention); false: each has its own.
  bool tokens_are_replicated = true;
  // Rows travel home one per route and are added in the order of a token's slots, so that results
  // do not depend on the number of ranks; false: each rank weights and sums what it has, and fewer
  // rows travel [deterministic-combine].
  bool deterministic = true;
  // Up to so many rows for a peer are written into its memory, more are left in the sender's for
  // the peers to read [ep-push-rows].
  size_t push_rows = 512;
  size_t fused_buffer_mb = 0;              // of FuseEP; 0 = its fallbacks [moe-fused-buffer-mb]
  int fuseep_mode = 2;                     // [fuseep-mode]
  Hierarchy hierarchy = Hierarchy::kAuto;  // [ep-hierarchical]
  // Where the count of exchanges begins, modulo 2^32: for tests of its end.
  uint32_t first_epoch = 0;
};

// One per model and rank; outlives the layers. Used by the thread that runs the passes.
class ExpertParallel {
 public:
  // Errors: kInvalidArgument naming the setting that is out of range.
  ExpertParallel(ParallelGroups& groups, const ExpertParallelOptions& options);
  ~ExpertParallel();
  ExpertParallel(const ExpertParallel&) = delete;
  ExpertParallel& operator=(const ExpertParallel&) = delete;

  const ExpertParallelOptions& options() const { return options_; }
  ParallelGroups& groups() const { return groups_; }
  size_t ep_size() const { return groups_.moe_ep().size(); }
  size_t ep_rank() const { return groups_.moe_ep().rank(); }
  size_t moe_tp_size() const { return groups_.config().moe_tp_size(); }
  size_t moe_tp_rank() const { return groups_.position().moe_tp; }

  // The ranks that together hold one copy of all experts: moe_ep, or moe_ep and moe_tp where
  // experts are split too. In order of (EP index, MoE-TP index).
  ProcessGroup& block() const;

  // A pass begins; every rank says the same phase. Counts passes for messages.
  void BeginPass(ForwardPhase phase);
  ForwardPhase phase() const { return phase_; }
  uint64_t pass() const { return pass_; }

  // The exchange buffer with these options: made at the first call, collectively; later calls with
  // equal options (every layer of a model) get the same one.
  // Errors: those of ProcessGroup::MakeWindow.
  RowChannel& Channel(ProcessGroup& group, const RowChannelOptions& options);
  // Of all channels.
  ExchangeStats stats() const;

  // FuseEP's group, a duplicate of moe_ep, and the buffer on it that all layers share (null until
  // the first layer makes it). The first call is collective.
  ProcessGroup& fuse_ep();
  std::shared_ptr<FusedMoeBuffer>& fused_buffer() { return fused_buffer_; }

  // The tokens [first, first + count) of `num_tokens` replicated ones that a rank of the TP group
  // owns: routes, sends and sums.
  struct Slice {
    size_t first = 0;
    size_t count = 0;
  };
  // Of a rank of the TP group, and of this one.
  Slice SliceOf(size_t num_tokens, size_t tp_rank) const;
  Slice MySlice(size_t num_tokens) const { return SliceOf(num_tokens, groups_.tp().rank()); }

  // The rows of all slices in order, on every rank.
  // Shapes: mine [slice, H]; returns [num_tokens, H] in context.arena.
  // Errors: kUnavailable naming the layer and the ranks.
  Rows GatherSlices(ExecContext& context, ConstRows mine, size_t num_tokens, size_t layer_id);

  // 1 = alive, of the ranks of moe_ep; cleared by the elastic protocols (contract 3.15).
  std::span<const int32_t> active_ranks() const { return active_ranks_; }
  // Takes a rank out, or back in. Every rank says the same, between passes.
  void SetActive(size_t ep_rank, bool active);
  // Called with the rank of moe_ep when a wait has taken it out.
  void SetOnRankLost(std::function<void(size_t ep_rank, std::string_view why)> callback);
  // For the elastic protocols: takes a rank out in the middle of a pass.
  void MarkLost(size_t ep_rank, std::string_view why);
  // Whether the process of a rank of the world has ended, as far as this host can tell: looked at
  // while waiting. Unset: never.
  void SetIsDead(std::function<bool(size_t world_rank)> probe) { is_dead_ = std::move(probe); }
  // The same of a rank of any group.
  bool IsDead(const ProcessGroup& group, size_t rank) const {
    return is_dead_ && is_dead_(group.WorldRank(rank));
  }

  // No wait has a limit until the first combine of an elastic protocol has completed.
  void SetWarm() { is_warm_ = true; }
  bool is_warm() const { return is_warm_; }

 private:
  // What carries the rows of a group and batch between nodes: its rails, or all of it.
  struct Net {
    ProcessGroup* of;
    size_t batch;
    std::unique_ptr<ProcessGroup> made;  // null: the group itself
  };
  ProcessGroup* NetOf(ProcessGroup& group, size_t batch);

  ParallelGroups& groups_;
  ExpertParallelOptions options_;
  std::unique_ptr<ProcessGroup> block_;  // null: moe_ep
  std::vector<Net> nets_;
  std::vector<std::unique_ptr<RowChannel>> channels_;
  std::unique_ptr<ProcessGroup> fuse_ep_;
  std::shared_ptr<FusedMoeBuffer> fused_buffer_;
  std::unique_ptr<TokenGather> gather_;
  ForwardPhase phase_ = ForwardPhase::kPrefill;
  uint64_t pass_ = 0;
  std::vector<int32_t> active_ranks_;
  std::function<void(size_t, std::string_view)> on_rank_lost_;
  std::function<bool(size_t)> is_dead_;
  bool is_warm_ = false;
};

}  // namespace switchyard::moe
