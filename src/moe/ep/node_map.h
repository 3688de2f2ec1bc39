// Which ranks of a group are on which node.
#pragma once

#include <cstddef>
#include <vector>

#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

// Nodes are counted in the order of their first ranks; ranks need not be in order of nodes.
struct NodeMap {
  explicit NodeMap(const ProcessGroup& group);

  size_t size() const { return ranks.size(); }
  bool IsHere(size_t rank) const { return node[rank] == here; }
  size_t LargestNode() const;
  // Whether what goes to another node is to travel once for the node, over the rails: the ranks
  // with the same number on their nodes. Needs nodes of one size.
  bool UsesRails(Hierarchy choice) const;

  std::vector<std::vector<size_t>> ranks;  // [nodes] the ranks of each, ascending
  std::vector<size_t> node;                // [R] of each rank
  std::vector<size_t> index;               // [R] number of each rank among those of its node
  size_t here = 0;                         // this rank's node
};

}  // namespace switchyard::moe
