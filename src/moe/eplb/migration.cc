#include "switchyard/moe/eplb/migration.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "expert migration: " + message);
}

void CheckArguments(std::span<const int32_t> old_map, std::span<const int32_t> new_map,
                    size_t num_ranks, std::span<const uint8_t> active_ranks) {
  if (num_ranks == 0 || new_map.empty() || new_map.size() % num_ranks != 0 ||
      old_map.size() != new_map.size()) {
    Invalid(
        fmt::format("both placements must have as many slots, a multiple of the {} ranks; "
                    "found {} and {}",
                    num_ranks, old_map.size(), new_map.size()));
  }
  if (!active_ranks.empty() && active_ranks.size() != num_ranks) {
    Invalid(fmt::format("the mask of active ranks must have {} entries, found {}", num_ranks,
                        active_ranks.size()));
  }
  for (size_t slot = 0; slot < new_map.size(); ++slot) {
    if (new_map[slot] < 0)
      Invalid(fmt::format("slot {} is to hold expert {}", slot, new_map[slot]));
  }
}

class Planner {
 public:
  Planner(std::span<const int32_t> old_map, std::span<const int32_t> new_map,
          std::span<const size_t> node_of_rank, std::span<const uint8_t> active_ranks)
      : old_(old_map),
        new_(new_map),
        node_of_rank_(node_of_rank),
        active_(active_ranks),
        per_rank_(new_map.size() / node_of_rank.size()),
        num_sent_(node_of_rank.size(), 0) {
    int32_t largest = -1;
    for (int32_t expert : old_map) largest = std::max(largest, expert);
    holders_.resize(static_cast<size_t>(largest) + 1);
    for (size_t slot = 0; slot < old_map.size(); ++slot) {
      if (old_map[slot] >= 0 && IsActive(slot / per_rank_))
        holders_[static_cast<size_t>(old_map[slot])].push_back(slot);
    }
  }

  SlotMove Find(size_t slot) {
    const size_t rank = slot / per_rank_;
    const int32_t expert = new_[slot];
    if (!IsActive(rank)) return {SlotSource::kIdle, slot};
    if (old_[slot] == expert) return {SlotSource::kUnchanged, slot};
    const auto holders = Holders(expert);
    for (size_t holder : holders)
      if (holder / per_rank_ == rank) return {SlotSource::kLocalSlot, holder};
    // No slot of this rank held the expert, so a lower one that is to hold it gets it from afar.
    for (size_t other = rank * per_rank_; other < slot; ++other)
      if (new_[other] == expert) return {SlotSource::kFreeRider, other};
    for (const bool same_node : {true, false}) {
      const std::optional<size_t> sender = LeastBusy(holders, node_of_rank_[rank], same_node);
      if (!sender) continue;
      ++num_sent_[*sender / per_rank_];
      return {same_node ? SlotSource::kSameNode : SlotSource::kOtherNode, *sender};
    }
    return {SlotSource::kLost, slot};
  }

 private:
  bool IsActive(size_t rank) const { return active_.empty() || active_[rank] != 0; }

  std::span<const size_t> Holders(int32_t expert) const {
    const auto index = static_cast<size_t>(expert);
    if (index >= holders_.size()) return {};
    return holders_[index];
  }

  // Holders ascend, so the first of the least busy is the lowest slot of the lowest rank.
  std::optional<size_t> LeastBusy(std::span<const size_t> holders, size_t node,
                                  bool same_node) const {
    std::optional<size_t> best;
    for (size_t slot : holders) {
      const size_t rank = slot / per_rank_;
      if ((node_of_rank_[rank] == node) != same_node) continue;
      if (!best || num_sent_[rank] < num_sent_[*best / per_rank_]) best = slot;
    }
    return best;
  }

  std::span<const int32_t> old_, new_;
  std::span<const size_t> node_of_rank_;
  std::span<const uint8_t> active_;
  size_t per_rank_;
  std::vector<std::vector<size_t>> holders_;  // of each logical expert: slots of active ranks
  std::vector<size_t> num_sent_;              // [R]
};

}  // namespace

MigrationPlan PlanMigration(std::span<const int32_t> old_map, std::span<const int32_t> new_map,
                            std::span<const size_t> node_of_rank,
                            std::span<const uint8_t> active_ranks) {
  CheckArguments(old_map, new_map, node_of_rank.size(), active_ranks);
  MigrationPlan plan;
  plan.ep_size = node_of_rank.size();
  plan.physical_to_logical.assign(new_map.begin(), new_map.end());
  Planner planner(old_map, new_map, node_of_rank, active_ranks);
  for (size_t slot = 0; slot < new_map.size(); ++slot) {
    const SlotMove move = planner.Find(slot);
    plan.moves.push_back(move);
    if (move.source == SlotSource::kSameNode || move.source == SlotSource::kOtherNode)
      plan.transfers.push_back({move.from, slot});
    if (move.source == SlotSource::kLost) plan.lost_experts.push_back(new_map[slot]);
  }
  std::ranges::sort(plan.lost_experts);
  const auto repeated = std::ranges::unique(plan.lost_experts);
  plan.lost_experts.erase(repeated.begin(), repeated.end());
  return plan;
}

}  // namespace switchyard::moe
