// Which expert's weights go where when a layer's placement changes. Contract 7.4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace switchyard::moe {

// Where a physical slot finds the expert that it is to hold; tried in this order.
enum class SlotSource {
  kUnchanged,  // it holds the expert already
  kLocalSlot,  // another slot of the rank holds it now
  kFreeRider,  // a lower slot of the rank gets it in the same migration
  kSameNode,   // a rank of the same node sends it
  kOtherNode,  // a rank of another node sends it
  kLost,       // no rank that is alive holds it: it has to be loaded again
  kIdle        // the slot's own rank is lost; nothing happens
};

// What happens to one physical slot. `from` is a physical slot: of the old placement, for
// kFreeRider of the new one; the slot itself where there is no other.
struct SlotMove {
  SlotSource source = SlotSource::kUnchanged;
  size_t from = 0;
};

// One expert on its way from one rank to another.
struct ExpertTransfer {
  size_t from = 0;  // physical slot of the old placement
  size_t to = 0;    // physical slot of the new one
};

// The moves of one layer on all ranks. Rank r owns the slots [r * P/R, (r + 1) * P/R).
//
// Shapes: physical_to_logical i32 [P], the new placement; moves [P]; transfers ascending in `to`.
struct MigrationPlan {
  size_t ep_size = 1;  // R
  std::vector<int32_t> physical_to_logical;
  std::vector<SlotMove> moves;
  std::vector<ExpertTransfer> transfers;
  std::vector<int32_t> lost_experts;  // logical, ascending

  size_t slots_per_rank() const { return moves.size() / ep_size; }
  size_t RankOf(size_t slot) const { return slot / slots_per_rank(); }
};

// Plans the way from one placement of a layer to another. Where several ranks could send an expert
// (of the own node, or else of the others), the one that sends least so far does, the lowest on
// ties, so that no rank becomes the bottleneck.
//
// Shapes: old_map i32 [P], -1 = the slot holds no expert; new_map i32 [P]; node_of_rank [R];
//   active_ranks [R], 0 = lost: it neither sends nor receives; empty = all are alive.
// Deterministic: depends on the arguments only, so all ranks derive the same plan.
// Errors: kInvalidArgument naming the sizes that do not fit, or the slot with a negative expert.
MigrationPlan PlanMigration(std::span<const int32_t> old_map, std::span<const int32_t> new_map,
                            std::span<const size_t> node_of_rank,
                            std::span<const uint8_t> active_ranks = {});

}  // namespace switchyard::moe
