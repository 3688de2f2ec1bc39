// The plan of one layer, and the algorithms that make it. Sizes are proved by PlanExperts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace switchyard::moe {

// Shapes: logical, place [P]: slot p holds replica number place[p] of expert logical[p].
struct LayerPlan {
  explicit LayerPlan(size_t num_physical) : logical(num_physical), place(num_physical) {}

  std::vector<size_t> logical;
  std::vector<size_t> place;
};

// What a layer is spread over.
struct LayerSizes {
  size_t num_logical;
  size_t num_physical;
  size_t num_devices;
  size_t num_nodes;
  size_t num_groups;
};

// Groups to nodes, replicas inside each node, replicas to its devices. With one group and one node
// this is the global policy.
// Shapes: load [E].
LayerPlan PlanLayer(std::span<const float> load, const LayerSizes& sizes);

// The variant that looks at every step. One node: all experts compete; several: as PlanLayer, each
// node gets equally many redundant experts.
// Shapes: loads[s] is step s, [E].
LayerPlan PlanLayerVec(const std::vector<std::span<const float>>& loads, const LayerSizes& sizes);

// Experts in the order in which groups lie on nodes: entry n * E/nodes + i is expert i of node n.
// `greedy`: also one group per node is placed by weight instead of left alone.
std::vector<size_t> ExpertsByNode(std::span<const float> load, const LayerSizes& sizes,
                                  bool greedy);

}  // namespace switchyard::moe
