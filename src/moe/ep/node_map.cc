#include "moe/ep/node_map.h"

#include <algorithm>
#include <map>

namespace switchyard::moe {
namespace {

// Beyond, a token's experts are on nearly as many nodes as ranks (communication, section 11).
constexpr size_t kMostNodes = 16;

}  // namespace

NodeMap::NodeMap(const ProcessGroup& group) {
  std::map<size_t, size_t> number;  // by that of the world
  for (size_t rank = 0; rank < group.size(); ++rank) {
    const size_t mine = number.try_emplace(group.NodeOf(rank), number.size()).first->second;
    if (mine == ranks.size()) ranks.emplace_back();
    node.push_back(mine);
    index.push_back(ranks[mine].size());
    ranks[mine].push_back(rank);
  }
  here = node[group.rank()];
}

size_t NodeMap::LargestNode() const {
  size_t largest = 0;
  for (const std::vector<size_t>& members : ranks) largest = std::max(largest, members.size());
  return largest;
}

bool NodeMap::UsesRails(Hierarchy choice) const {
  if (choice == Hierarchy::kOff || size() < 2) return false;
  for (const std::vector<size_t>& members : ranks) {
    if (members.size() != ranks[0].size()) return false;
  }
  return choice == Hierarchy::kOn || (ranks[0].size() >= 2 && size() <= kMostNodes);
}

}  // namespace switchyard::moe
