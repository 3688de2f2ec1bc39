// The groups of a model that is spread over ranks: tensor parallelism and, inside it, the three
// ways to spread experts.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard {

// How a model is spread. Names are those of the settings (--tp-size, …).
struct ParallelConfig {
  size_t tp_size = 1;         // ranks of the tensor-parallel group; without pipelines, all ranks
  size_t moe_ep_size = 1;     // ranks that share the experts of a layer among them
  size_t moe_dp_size = 1;     // copies of all experts
  bool dp_attention = false;  // every rank has sequences of its own (attention is not split)

  // Ranks that split the matrices of each expert: what the other two leave of tp_size.
  size_t moe_tp_size() const { return tp_size / (moe_ep_size * moe_dp_size); }
  // Ranks that share one token's attention.
  size_t attention_tp_size() const { return dp_attention ? 1 : tp_size; }

  // Errors: kInvalidArgument naming the settings that contradict each other: a size of 0, tp_size
  //   other than num_ranks, or not a multiple of moe_ep_size * moe_dp_size.
  void Check(size_t num_ranks) const;
};

// A TP rank's place among the experts:
//   rank = moe_dp * (moe_ep_size * moe_tp_size) + moe_ep * moe_tp_size + moe_tp
// so MoE-TP groups are neighbours, MoE-EP groups take every moe_tp_size-th rank of one copy, and
// MoE-DP groups hold the same place in every copy.
// Source: contract 1.7.
struct MoePosition {
  size_t moe_dp = 0;
  size_t moe_ep = 0;
  size_t moe_tp = 0;
};
// The place of one rank under a config that has passed its Check.
MoePosition PositionOf(const ParallelConfig& config, size_t tp_rank);

// The groups of one rank. moe_tp and moe_dp are the TP group itself where they hold all its ranks;
// moe_ep never is: buffers and windows of the expert exchange are sized and failed on their own,
// whatever TP does (contract 1.7, "why FuseEP has its own group").
class ParallelGroups {
 public:
  const ParallelConfig& config() const { return config_; }
  const MoePosition& position() const { return position_; }

  ProcessGroup& tp() const { return *tp_; }
  ProcessGroup& moe_ep() const { return *moe_ep_; }
  ProcessGroup& moe_tp() const { return *moe_tp_; }
  ProcessGroup& moe_dp() const { return *moe_dp_; }

 private:
  friend ParallelGroups MakeGroups(ProcessGroup&, const ParallelConfig&, std::string_view,
                                   const Deadline&);
  ParallelConfig config_;
  MoePosition position_;
  std::vector<std::unique_ptr<ProcessGroup>> owned_;
  ProcessGroup* tp_ = nullptr;
  ProcessGroup* moe_ep_ = nullptr;
  ProcessGroup* moe_tp_ = nullptr;
  ProcessGroup* moe_dp_ = nullptr;
};

// Makes them; collective over `world`, which outlives them. To be called before the first forward.
// `fingerprint` is what else all ranks have to have in common, in words for a message: the model,
// the settings that change results.
// Errors: kFailedPrecondition on all ranks, naming the rank and what differs, if the ranks do not
//   run the same version with the same config and fingerprint; those of ParallelConfig::Check.
ParallelGroups MakeGroups(ProcessGroup& world, const ParallelConfig& config,
                          std::string_view fingerprint, const Deadline& deadline);

}  // namespace switchyard
