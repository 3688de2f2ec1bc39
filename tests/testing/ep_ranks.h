// Ranks as threads, each with its part of a layer: what expert parallelism is tested with.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/parallel/run_ranks.h"
#include "testing/moe_case.h"

namespace switchyard::testing {

// One rank of a group.
struct EpRank {
  EpRank(ProcessGroup& world, const ParallelConfig& config,
         const moe::ExpertParallelOptions& options);

  ProcessGroup& world;
  ParallelGroups groups;
  moe::ExpertParallel ep;
  ThreadPool pool{1};
  Arena arena;
  ExecContext context{pool, arena};
};

// How a case is spread.
struct EpSetup {
  size_t ranks = 2;
  size_t moe_tp = 1;
  size_t moe_dp = 1;
  size_t node_size = 0;  // ranks of a pretended node, 0 = one node for all
  // [ranks] the order in which the ranks of the nodes are counted; empty: node after node.
  std::vector<size_t> order = {};
  moe::ExpertParallelOptions options = {};
  moe::MoeLayerOptions layer = {};

  ParallelConfig Config() const;
  std::string Describe() const;
};

// One rank without groups: what all others are held to. Shapes: returns [T, H].
std::vector<float> RunOneRank(const MoeCase& layer, const MoeTokens& tokens,
                              const std::string& runner);

// Runs body on every rank.
void RunEp(const EpSetup& setup, const std::function<void(EpRank&)>& body);

// The layer of a rank: its experts (and its part of them) of `layer`.
std::unique_ptr<moe::MoeLayer> MakeRankLayer(EpRank& rank, const EpSetup& setup,
                                             const MoeCase& layer, size_t top_k);

// The layer's config for one rank or all.
moe::MoeLayerConfig LayerConfigOf(const MoeCase& layer, size_t top_k);

// A layer spread over ranks, one pass. With replicated tokens sources[0] is everybody's, and the
// rows of rank 0 are returned after those of the others have been found equal; else source r is
// rank r's.
// Shapes: returns the rows of each source, [T, H].
std::vector<std::vector<float>> RunSpread(const EpSetup& setup, const MoeCase& layer,
                                          const std::vector<MoeTokens>& sources);

}  // namespace switchyard::testing
