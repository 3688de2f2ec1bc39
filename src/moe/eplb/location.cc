#include "switchyard/moe/eplb/location.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "expert location: " + message);
}

void CheckSizes(const ExpertLocationSizes& sizes) {
  constexpr size_t kMaxExperts = size_t{1} << 24, kMaxLayers = size_t{1} << 14;
  if (sizes.num_logical == 0 || sizes.num_physical < sizes.num_logical ||
      sizes.num_physical > kMaxExperts || sizes.num_layers > kMaxLayers) {
    Invalid(fmt::format(
        "{} layers of {} logical and {} physical experts cannot be; there must be "
        "1 to {} logical experts, at least as many physical ones, and at most {} "
        "layers",
        sizes.num_layers, sizes.num_logical, sizes.num_physical, kMaxExperts, kMaxLayers));
  }
  if (sizes.ep_size == 0 || sizes.num_physical % sizes.ep_size != 0) {
    Invalid(fmt::format("the physical experts must be a multiple of the ranks, found {} and {}",
                        sizes.num_physical, sizes.ep_size));
  }
  if (sizes.num_nodes == 0 || sizes.ep_size % sizes.num_nodes != 0) {
    Invalid(fmt::format("the ranks must be a multiple of the nodes, found {} and {}", sizes.ep_size,
                        sizes.num_nodes));
  }
}

// Chooses the replica of one expert for every rank.
class RankChooser {
 public:
  RankChooser(const ExpertLocationSizes& sizes, uint64_t seed)
      : ranks_(sizes.ep_size),
        slots_per_rank_(sizes.num_physical / sizes.ep_size),
        ranks_per_node_(sizes.ep_size / sizes.num_nodes),
        random_(seed) {}

  // choice[r * stride] for every rank r.
  void Choose(std::span<const int32_t> replicas, int32_t* choice, size_t stride) {
    std::vector<size_t> deferred;
    for (size_t rank = 0; rank < ranks_; ++rank) {
      choice[rank * stride] = Nearest(replicas, rank);
      if (choice[rank * stride] < 0) deferred.push_back(rank);
    }
    const std::vector<int32_t> drawn = FairDraw(replicas, deferred.size());
    for (size_t i = 0; i < deferred.size(); ++i) choice[deferred[i] * stride] = drawn[i];
  }

 private:
  size_t RankOf(int32_t physical) const { return static_cast<size_t>(physical) / slots_per_rank_; }

  // -1 if no replica is nearer than the others.
  int32_t Nearest(std::span<const int32_t> replicas, size_t rank) {
    if (replicas.size() == 1) return replicas[0];
    const auto own = std::find_if(replicas.begin(), replicas.end(),
                                  [&](int32_t p) { return RankOf(p) == rank; });
    if (own != replicas.end()) return *own;
    on_node_.clear();
    for (int32_t p : replicas)
      if (RankOf(p) / ranks_per_node_ == rank / ranks_per_node_) on_node_.push_back(p);
    if (on_node_.empty() || on_node_.size() == replicas.size()) return -1;
    return on_node_[rank % on_node_.size()];
  }

  // `count` choices; each replica occurs equally often or once more.
  std::vector<int32_t> FairDraw(std::span<const int32_t> replicas, size_t count) {
    std::vector<int32_t> order(replicas.begin(), replicas.end());
    if (count != 0) Shuffle(order);
    std::vector<int32_t> drawn(count);
    for (size_t i = 0; i < count; ++i) drawn[i] = order[i % order.size()];
    Shuffle(drawn);
    return drawn;
  }

  // std::shuffle may differ between standard libraries; all ranks must agree.
  void Shuffle(std::vector<int32_t>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random_() % i]);
  }

  size_t ranks_, slots_per_rank_, ranks_per_node_;
  std::mt19937_64 random_;
  std::vector<int32_t> on_node_;
};

}  // namespace

std::vector<int32_t> StaticDispatchMap(std::span<const int32_t> logical_to_physical,
                                       size_t max_replicas, const ExpertLocationSizes& sizes,
                                       uint64_t seed) {
  CheckSizes(sizes);
  if (max_replicas == 0 || logical_to_physical.size() % max_replicas != 0) {
    Invalid(fmt::format("lists of {} replicas cannot have {} entries together", max_replicas,
                        logical_to_physical.size()));
  }
  const size_t rows = logical_to_physical.size() / max_replicas;
  std::vector<int32_t> map(sizes.ep_size * rows);
  RankChooser chooser(sizes, seed);
  for (size_t row = 0; row < rows; ++row) {
    const auto list = logical_to_physical.subspan(row * max_replicas, max_replicas);
    const auto end = std::find(list.begin(), list.end(), -1);
    const auto replicas = list.first(static_cast<size_t>(end - list.begin()));
    const bool in_range = std::all_of(replicas.begin(), replicas.end(), [&](int32_t p) {
      return p >= 0 && static_cast<size_t>(p) < sizes.num_physical;
    });
    if (replicas.empty() || !in_range) {
      Invalid(fmt::format("the list of expert {} in layer {} must name physical experts 0 to {}",
                          row % sizes.num_logical, row / sizes.num_logical,
                          sizes.num_physical - 1));
    }
    chooser.Choose(replicas, map.data() + row, rows);
  }
  return map;
}

ExpertLocation::ExpertLocation(const ExpertLocationSizes& sizes) : sizes_(sizes) {
  CheckSizes(sizes);
}

ExpertLocation ExpertLocation::Trivial(const ExpertLocationSizes& sizes) {
  CheckSizes(sizes);
  std::vector<int32_t> map(sizes.num_layers * sizes.num_physical);
  for (size_t i = 0; i < map.size(); ++i)
    map[i] = static_cast<int32_t>(i % sizes.num_physical % sizes.num_logical);
  return FromMap(sizes, map);
}

ExpertLocation ExpertLocation::FromMap(const ExpertLocationSizes& sizes,
                                       std::span<const int32_t> physical_to_logical) {
  ExpertLocation location(sizes);
  if (physical_to_logical.size() != sizes.num_layers * sizes.num_physical) {
    Invalid(fmt::format("physical_to_logical must have {} layers x {} experts, found {} entries",
                        sizes.num_layers, sizes.num_physical, physical_to_logical.size()));
  }
  location.physical_to_logical_.assign(physical_to_logical.begin(), physical_to_logical.end());
  location.ListReplicas();
  location.ChooseRanks();
  return location;
}

ExpertLocation ExpertLocation::FromPlan(const ExpertPlan& plan, size_t ep_size, size_t num_nodes) {
  ExpertLocation location(
      {plan.num_layers, plan.num_logical, plan.num_physical, ep_size, num_nodes});
  location.max_replicas_ = plan.max_replicas;
  location.physical_to_logical_ = plan.physical_to_logical;
  location.logical_to_physical_ = plan.logical_to_physical;
  location.num_valid_ = plan.logical_count;
  location.CheckLists();
  location.ChooseRanks();
  return location;
}

ExpertLocation ExpertLocation::WithoutRanks(std::span<const int32_t> active_ranks) const {
  if (active_ranks.size() != sizes_.ep_size) {
    Invalid(fmt::format("{} ranks are said to be alive or lost, the location has {}",
                        active_ranks.size(), sizes_.ep_size));
  }
  ExpertLocation left = *this;
  left.physical_to_logical_ = physical_to_logical_;
  left.ListReplicas();
  const size_t slots_per_rank = sizes_.num_physical / sizes_.ep_size;
  for (size_t row = 0; row < left.num_valid_.size(); ++row) {
    const auto list =
        left.logical_to_physical_.begin() + static_cast<std::ptrdiff_t>(row * left.max_replicas_);
    const auto end = list + left.num_valid_[row];
    const auto alive = std::stable_partition(list, end, [&](int32_t slot) {
      return active_ranks[static_cast<size_t>(slot) / slots_per_rank] != 0;
    });
    if (alive == list) continue;
    std::fill(alive, end, -1);
    left.num_valid_[row] = static_cast<int32_t>(alive - list);
  }
  left.ChooseRanks();
  return left;
}

// Lists and counts from physical_to_logical_.
void ExpertLocation::ListReplicas() {
  const size_t rows = sizes_.num_layers * sizes_.num_logical;
  num_valid_.assign(rows, 0);
  for (size_t i = 0; i < physical_to_logical_.size(); ++i) {
    const int32_t e = physical_to_logical_[i];
    const size_t layer = i / sizes_.num_physical;
    if (e < 0 || static_cast<size_t>(e) >= sizes_.num_logical) {
      Invalid(
          fmt::format("layer {}: physical expert {} must hold a logical expert of 0 to {}, "
                      "found {}",
                      layer, i % sizes_.num_physical, sizes_.num_logical - 1, e));
    }
    ++num_valid_[layer * sizes_.num_logical + static_cast<size_t>(e)];
  }
  for (size_t row = 0; row < rows; ++row) {
    if (num_valid_[row] == 0) {
      Invalid(fmt::format("layer {}: logical expert {} has no replica", row / sizes_.num_logical,
                          row % sizes_.num_logical));
    }
    max_replicas_ = std::max(max_replicas_, static_cast<size_t>(num_valid_[row]));
  }
  logical_to_physical_.assign(rows * max_replicas_, -1);
  std::vector<size_t> filled(rows, 0);
  for (size_t i = 0; i < physical_to_logical_.size(); ++i) {
    const size_t row =
        i / sizes_.num_physical * sizes_.num_logical + static_cast<size_t>(physical_to_logical_[i]);
    logical_to_physical_[row * max_replicas_ + filled[row]++] =
        static_cast<int32_t>(i % sizes_.num_physical);
  }
}

// A plan from outside: every listed slot holds the expert that lists it, and is listed once.
void ExpertLocation::CheckLists() const {
  const size_t rows = sizes_.num_layers * sizes_.num_logical;
  if (max_replicas_ == 0 || num_valid_.size() != rows ||
      logical_to_physical_.size() != rows * max_replicas_ ||
      physical_to_logical_.size() != sizes_.num_layers * sizes_.num_physical)
    Invalid("the sizes of the plan's maps contradict each other");
  std::vector<bool> is_listed(physical_to_logical_.size(), false);
  for (size_t row = 0; row < rows; ++row) {
    const size_t layer = row / sizes_.num_logical, e = row % sizes_.num_logical;
    const int32_t count = num_valid_[row];
    if (count < 1 || static_cast<size_t>(count) > max_replicas_) {
      Invalid(fmt::format("layer {}: logical expert {} must have 1 to {} replicas, found {}", layer,
                          e, max_replicas_, count));
    }
    for (size_t j = 0; j < static_cast<size_t>(count); ++j) {
      const int32_t p = logical_to_physical_[row * max_replicas_ + j];
      const size_t slot = layer * sizes_.num_physical + static_cast<size_t>(p);
      if (p < 0 || static_cast<size_t>(p) >= sizes_.num_physical || is_listed[slot] ||
          physical_to_logical_[slot] != static_cast<int32_t>(e)) {
        Invalid(
            fmt::format("layer {}: logical expert {} lists physical expert {}, which is out of "
                        "range, listed twice or holds another expert",
                        layer, e, p));
      }
      is_listed[slot] = true;
    }
  }
}

void ExpertLocation::ChooseRanks() {
  if (sizes_.num_layers == 0) return;
  rank_dispatch_ = StaticDispatchMap(logical_to_physical_, max_replicas_, sizes_);
}

std::span<const int32_t> ExpertLocation::PhysicalToLogical(size_t layer) const {
  return std::span(physical_to_logical_).subspan(layer * sizes_.num_physical, sizes_.num_physical);
}

std::span<const int32_t> ExpertLocation::LogicalToAllPhysical(size_t layer) const {
  const size_t size = sizes_.num_logical * max_replicas_;
  return std::span(logical_to_physical_).subspan(layer * size, size);
}

std::span<const int32_t> ExpertLocation::NumValid(size_t layer) const {
  return std::span(num_valid_).subspan(layer * sizes_.num_logical, sizes_.num_logical);
}

std::span<const int32_t> ExpertLocation::RankDispatch(size_t layer, size_t rank) const {
  return std::span(rank_dispatch_)
      .subspan((rank * sizes_.num_layers + layer) * sizes_.num_logical, sizes_.num_logical);
}

ExpertPlacement ExpertLocation::Placement(size_t layer, size_t rank,
                                          DispatchAlgorithm algorithm) const {
  return {algorithm,       sizes_.num_physical,      max_replicas_, LogicalToAllPhysical(layer),
          NumValid(layer), RankDispatch(layer, rank)};
}

}  // namespace switchyard::moe
