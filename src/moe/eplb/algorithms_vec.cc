// Load balancing over the steps of a window: an expert that is hot in a few steps gets a replica
// even if its sum is small. Source: the vectorised variant of the reference system.
#include <algorithm>
#include <functional>
#include <queue>

#include "moe/eplb/layer_plan.h"
#include "moe/eplb/packing.h"

namespace switchyard::moe {
namespace {

// The experts of one node, ordered by load in every step. Counts only grow, so a share that lies in
// a heap can only be too large; it is corrected when it comes to the top.
class NodeReplicator {
 public:
  // `experts` are the node's; the first has position `first` among all.
  NodeReplicator(const std::vector<std::span<const float>>& loads, std::span<const size_t> experts,
                 size_t first)
      : experts_(experts), loads_(loads), first_(first), count_(experts.size(), 1) {
    for (size_t s = 0; s < loads.size(); ++s) {
      std::vector<Share> shares;
      for (size_t i = 0; i < experts.size(); ++i) shares.push_back(ShareOf(s, i));
      heaps_.emplace_back(std::less<Share>(), std::move(shares));
    }
  }

  size_t count(size_t i) const { return count_[i]; }

  // Gives one more replica to the expert that thereby lowers the sum over steps of the largest
  // share the most; returns it.
  size_t AddReplica() {
    std::vector<Peak> peaks;
    for (size_t s = 0; s < loads_.size(); ++s) peaks.push_back(PeakOf(s));
    // Experts that are no peak anywhere change nothing: the sum with expert 0 stands for theirs.
    size_t best = 0;
    float best_sum = SumWithout(peaks, 0);
    std::vector<bool> is_known(experts_.size(), false);
    for (const Peak& peak : peaks) {
      if (is_known[peak.expert]) continue;
      is_known[peak.expert] = true;
      const float sum = SumWithout(peaks, peak.expert);
      if (sum < best_sum || (sum == best_sum && peak.expert < best)) {
        best = peak.expert;
        best_sum = sum;
      }
    }
    ++count_[best];
    return best;
  }

 private:
  // A share of a load, made when its expert had `count` replicas.
  struct Share {
    float value;
    size_t expert;
    size_t count;

    bool operator<(const Share& other) const {
      return value < other.value || (value == other.value && expert > other.expert);
    }
  };

  // The largest share of a step, and what the largest would be with one more replica of its expert.
  struct Peak {
    float value;
    float lowered;
    size_t expert;
  };

  float Load(size_t step, size_t i) const { return loads_[step][experts_[i]]; }

  // A small term that grows with the position keeps equal loads apart.
  Share ShareOf(size_t step, size_t i) const {
    const float load = Load(step, i) + static_cast<float>(first_ + i) * 1e-4f;
    return {load / static_cast<float>(count_[i]), i, count_[i]};
  }

  const Share& Top(size_t step) {
    auto& heap = heaps_[step];
    while (heap.top().count != count_[heap.top().expert]) {
      const size_t expert = heap.top().expert;
      heap.pop();
      heap.push(ShareOf(step, expert));
    }
    return heap.top();
  }

  Peak PeakOf(size_t step) {
    auto& heap = heaps_[step];
    const Share top = Top(step);
    float lowered = Load(step, top.expert) / static_cast<float>(top.count + 1);
    heap.pop();
    if (!heap.empty()) lowered = std::max(lowered, Top(step).value);
    heap.push(top);
    return {top.value, lowered, top.expert};
  }

  static float SumWithout(const std::vector<Peak>& peaks, size_t expert) {
    float sum = 0;
    for (const Peak& peak : peaks) sum += peak.expert == expert ? peak.lowered : peak.value;
    return sum;
  }

  std::span<const size_t> experts_;
  const std::vector<std::span<const float>>& loads_;
  size_t first_;
  std::vector<size_t> count_;
  std::vector<std::priority_queue<Share>> heaps_;  // one per step
};

// The slots of a node, before they are given to devices.
struct NodeSlots {
  std::vector<size_t> expert;  // logical
  std::vector<size_t> place;
  std::vector<float> share;  // of the load summed over the steps
};

NodeSlots FillNode(const std::vector<std::span<const float>>& loads, std::span<const float> sum,
                   std::span<const size_t> experts, size_t first, size_t num_slots) {
  NodeReplicator replicator(loads, experts, first);
  std::vector<size_t> index(num_slots);
  NodeSlots slots{{}, std::vector<size_t>(num_slots, 0), {}};
  for (size_t i = 0; i < num_slots; ++i) {
    if (i < experts.size()) {
      index[i] = i;
    } else {
      index[i] = replicator.AddReplica();
      slots.place[i] = replicator.count(index[i]) - 1;
    }
  }
  for (size_t i : index) {
    const size_t expert = experts[i];
    slots.expert.push_back(expert);
    slots.share.push_back(sum[expert] / static_cast<float>(replicator.count(i)));
  }
  return slots;
}

// Deals slots to devices like cards, heaviest first, changing direction with every round.
std::vector<size_t> DealToDevices(std::span<const float> shares, size_t num_devices) {
  const size_t rounds = shares.size() / num_devices;
  std::vector<size_t> order = DescendingOrder(shares);
  if (rounds == 1) {  // nothing to balance: slots stay in their order
    std::sort(order.begin(), order.end());
    return order;
  }
  std::vector<size_t> dealt(shares.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t round = i / num_devices, turn = i % num_devices;
    const size_t device = round % 2 == 0 ? turn : num_devices - 1 - turn;
    dealt[device * rounds + round] = order[i];
  }
  return dealt;
}

}  // namespace

LayerPlan PlanLayerVec(const std::vector<std::span<const float>>& loads, const LayerSizes& sizes) {
  std::vector<float> sum(sizes.num_logical, 0.0f);
  for (const std::span<const float> step : loads)
    for (size_t e = 0; e < sum.size(); ++e) sum[e] += step[e];
  const std::vector<size_t> experts = ExpertsByNode(sum, sizes, true);
  const size_t experts_per_node = sizes.num_logical / sizes.num_nodes;
  const size_t slots_per_node = sizes.num_physical / sizes.num_nodes;
  LayerPlan plan(sizes.num_physical);
  for (size_t node = 0; node < sizes.num_nodes; ++node) {
    const size_t first = node * experts_per_node;
    const NodeSlots slots = FillNode(
        loads, sum, std::span(experts).subspan(first, experts_per_node), first, slots_per_node);
    const std::vector<size_t> dealt =
        DealToDevices(slots.share, sizes.num_devices / sizes.num_nodes);
    for (size_t i = 0; i < slots_per_node; ++i) {
      plan.logical[node * slots_per_node + i] = slots.expert[dealt[i]];
      plan.place[node * slots_per_node + i] = slots.place[dealt[i]];
    }
  }
  return plan;
}

}  // namespace switchyard::moe
