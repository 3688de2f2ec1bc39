// Where every expert of a model lives: the maps between logical and physical experts of all layers.
// Contract 7.2, 7.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/moe/contract/placement.h"
#include "switchyard/moe/eplb/algorithms.h"

namespace switchyard::moe {

// The sizes of a location. Rank r owns the physical experts [r * P/R, (r + 1) * P/R), node n the
// ranks [n * R/N, (n + 1) * R/N).
struct ExpertLocationSizes {
  size_t num_layers = 0;    // L
  size_t num_logical = 0;   // E
  size_t num_physical = 0;  // P = E + redundant experts, a multiple of ep_size
  size_t ep_size = 1;       // R
  size_t num_nodes = 1;     // N, a divisor of ep_size
};

// Read-only once made; proved to be consistent, so placements of it need no further check.
class ExpertLocation {
 public:
  // Physical expert p is logical expert p mod E.
  // Errors: kInvalidArgument if sizes do not divide or P < E.
  static ExpertLocation Trivial(const ExpertLocationSizes& sizes);

  // Shapes: physical_to_logical i32 [L, P]. Replicas are listed in ascending physical id.
  // Errors: as Trivial; kInvalidArgument naming the layer and the slot if an entry is out of range,
  //   or the expert that has no replica.
  static ExpertLocation FromMap(const ExpertLocationSizes& sizes,
                                std::span<const int32_t> physical_to_logical);

  // A plan of PlanExperts; replicas keep the plan's order, lost slots stay unlisted.
  // Errors: as FromMap, and kInvalidArgument if a list contradicts the map.
  static ExpertLocation FromPlan(const ExpertPlan& plan, size_t ep_size, size_t num_nodes = 1);

  // The same experts in the same places, but tokens are sent to ranks that are alive: lists name
  // only replicas there. An expert that has none keeps those that it had.
  // Shapes: active_ranks [R], 0 = lost.
  // Errors: kInvalidArgument if there is not one entry per rank.
  ExpertLocation WithoutRanks(std::span<const int32_t> active_ranks) const;

  const ExpertLocationSizes& sizes() const { return sizes_; }
  size_t max_replicas() const { return max_replicas_; }  // X

  // Shapes: [P]; [E, X] padded with -1; [E].
  std::span<const int32_t> PhysicalToLogical(size_t layer) const;
  std::span<const int32_t> LogicalToAllPhysical(size_t layer) const;
  std::span<const int32_t> NumValid(size_t layer) const;

  // The replica that `rank` sends each expert's tokens to: the only one; else one of its own; else
  // one of its node, where the node has fewer than all of them, its ranks taking turns; else one
  // drawn such that the ranks that have to draw use every replica equally often (or once more).
  // The same on all ranks: the draw has a fixed seed.
  // Shapes: returns i32 [E].
  std::span<const int32_t> RankDispatch(size_t layer, size_t rank) const;

  // What the router of `rank` needs; refers to *this.
  ExpertPlacement Placement(size_t layer, size_t rank, DispatchAlgorithm algorithm) const;

 private:
  explicit ExpertLocation(const ExpertLocationSizes& sizes);
  void ListReplicas();
  void CheckLists() const;
  void ChooseRanks();

  ExpertLocationSizes sizes_;
  size_t max_replicas_ = 0;
  std::vector<int32_t> physical_to_logical_;  // [L, P]
  std::vector<int32_t> logical_to_physical_;  // [L, E, X]
  std::vector<int32_t> num_valid_;            // [L, E]
  std::vector<int32_t> rank_dispatch_;        // [R, L, E]
};

// The map of contract 7.3 for all ranks, from the lists of replicas of one or more layers.
//
// Shapes: logical_to_physical i32 [rows, X] padded with -1, rows = L * E; returns i32 [R, rows].
// Errors: kInvalidArgument if the sizes do not divide or a row has no replica or one out of range.
std::vector<int32_t> StaticDispatchMap(std::span<const int32_t> logical_to_physical,
                                       size_t max_replicas, const ExpertLocationSizes& sizes,
                                       uint64_t seed = 42);

}  // namespace switchyard::moe
