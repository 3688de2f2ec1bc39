// The two greedy steps of load balancing. Contract 7.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace switchyard::moe {

// Which pack each item went to, and its place there.
struct Packing {
  std::vector<size_t> pack;
  std::vector<size_t> place;
};

// Items in descending weight (the first of equals first), each to the lightest pack with room (the
// lowest of equals); all packs end with the same number of items. Cost: n log n.
Packing GreedyPacking(std::span<const float> weights, size_t num_packs);

// The same, but one item per pack stays where it is.
Packing BalancedPacking(std::span<const float> weights, size_t num_packs);

// Replica i is of expert expert[i] and the place-th of it; the first E replicas are one of each.
struct Replication {
  std::vector<size_t> expert;
  std::vector<size_t> place;
  std::vector<size_t> count;  // [E]
};

// One replica each, then again and again one more of the expert with the largest load / replicas
// (the lowest of equals). Cost: num_replicas * log E.
Replication Replicate(std::span<const float> loads, size_t num_replicas);

// Indices in descending order of value, equal ones ascending.
std::vector<size_t> DescendingOrder(std::span<const float> values);

}  // namespace switchyard::moe
