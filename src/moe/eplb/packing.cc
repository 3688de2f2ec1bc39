#include "moe/eplb/packing.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace switchyard::moe {

std::vector<size_t> DescendingOrder(std::span<const float> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return values[a] > values[b]; });
  return order;
}

Packing GreedyPacking(std::span<const float> weights, size_t num_packs) {
  const size_t capacity = weights.size() / num_packs;
  Packing packing{std::vector<size_t>(weights.size()), std::vector<size_t>(weights.size())};
  using Pack = std::pair<double, size_t>;  // weight, number
  std::priority_queue<Pack, std::vector<Pack>, std::greater<>> lightest;
  for (size_t p = 0; p < num_packs; ++p) lightest.push({0.0, p});
  std::vector<size_t> filled(num_packs, 0);
  for (size_t item : DescendingOrder(weights)) {
    const auto [weight, pack] = lightest.top();
    lightest.pop();
    packing.pack[item] = pack;
    packing.place[item] = filled[pack]++;
    if (filled[pack] < capacity) lightest.push({weight + double{weights[item]}, pack});
  }
  return packing;
}

Packing BalancedPacking(std::span<const float> weights, size_t num_packs) {
  if (weights.size() != num_packs) return GreedyPacking(weights, num_packs);
  Packing packing{std::vector<size_t>(num_packs), std::vector<size_t>(num_packs, 0)};
  std::iota(packing.pack.begin(), packing.pack.end(), size_t{0});
  return packing;
}

Replication Replicate(std::span<const float> loads, size_t num_replicas) {
  const size_t num_experts = loads.size();
  Replication replicas{std::vector<size_t>(num_experts), std::vector<size_t>(num_experts, 0),
                       std::vector<size_t>(num_experts, 1)};
  std::iota(replicas.expert.begin(), replicas.expert.end(), size_t{0});
  // Largest load first, then lowest expert: the complement turns the order of numbers around.
  using Share = std::pair<float, size_t>;
  std::priority_queue<Share> heaviest;
  for (size_t e = 0; e < num_experts; ++e) heaviest.push({loads[e], ~e});
  while (replicas.expert.size() < num_replicas) {
    const size_t e = ~heaviest.top().second;
    heaviest.pop();
    replicas.expert.push_back(e);
    replicas.place.push_back(replicas.count[e]++);
    heaviest.push({loads[e] / static_cast<float>(replicas.count[e]), ~e});
  }
  return replicas;
}

}  // namespace switchyard::moe
