#include "moe/runners/aiter/sorted_slots.h"

#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

// Expert of every id, -1 where the mask skips it; empty without a mask.
std::span<const int32_t> LocalExperts(ExecContext& context, std::span<const int32_t> mask) {
  const std::span<int32_t> local = context.arena.AllocateSpan<int32_t>(mask.size());
  int32_t next = 0;
  for (size_t id = 0; id < mask.size(); ++id) local[id] = mask[id] != 0 ? next++ : -1;
  return local;
}

// A counting sort: O(T K + E).
class SlotSorter {
 public:
  SlotSorter(const AiterRunnerInput& input, std::span<const int32_t> local, size_t num_experts,
             size_t layer_id)
      : input_(input), local_(local), num_experts_(num_experts), layer_id_(layer_id) {}

  SortedSlots Sort(ExecContext& context, size_t num_slots) const {
    SortedSlots sorted;
    sorted.row_of_slot = context.arena.AllocateSpan<int32_t>(num_slots);
    const std::span<uint32_t> next = context.arena.AllocateSpan<uint32_t>(num_experts_);
    std::fill(next.begin(), next.end(), 0u);
    for (size_t slot = 0; slot < num_slots; ++slot) {
      const int32_t expert = Expert(slot);
      if (expert >= 0) ++next[static_cast<size_t>(expert)];
    }
    sorted.experts = context.arena.AllocateSpan<uint32_t>(num_experts_);
    sorted.begin = context.arena.AllocateSpan<uint32_t>(num_experts_ + 1);
    size_t used = 0;
    uint32_t row = 0;
    for (size_t e = 0; e < num_experts_; ++e) {
      const uint32_t count = next[e];
      next[e] = row;
      if (count == 0) continue;
      sorted.experts[used] = static_cast<uint32_t>(e);
      sorted.begin[used++] = row;
      row += count;
    }
    sorted.begin[used] = row;
    sorted.experts = sorted.experts.first(used);
    sorted.num_rows = row;
    sorted.slots = context.arena.AllocateSpan<uint32_t>(row);
    for (size_t slot = 0; slot < num_slots; ++slot) {
      const int32_t expert = Expert(slot);
      sorted.row_of_slot[slot] = -1;
      if (expert < 0) continue;
      const uint32_t at = next[static_cast<size_t>(expert)]++;
      sorted.slots[at] = static_cast<uint32_t>(slot);
      sorted.row_of_slot[slot] = static_cast<int32_t>(at);
    }
    return sorted;
  }

 private:
  // Which of the weights a slot wants; -1 = none.
  int32_t Expert(size_t slot) const {
    const int32_t id = input_.topk_ids[slot];
    if (id == -1) return -1;
    const size_t limit = local_.empty() ? num_experts_ : local_.size();
    if (id < 0 || static_cast<size_t>(id) >= limit) RefuseId(slot, limit);
    return local_.empty() ? id : local_[static_cast<size_t>(id)];
  }

  [[noreturn]] void RefuseId(size_t slot, size_t limit) const {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("layer {}: token {} names expert {}; ids are -1 to {}", layer_id_,
                    slot / input_.top_k, input_.topk_ids[slot], static_cast<int64_t>(limit) - 1));
  }

  const AiterRunnerInput& input_;
  std::span<const int32_t> local_;
  size_t num_experts_;
  size_t layer_id_;
};

}  // namespace

SortedSlots SortByExpert(ExecContext& context, const AiterRunnerInput& input, size_t num_slots,
                         size_t num_experts, size_t layer_id) {
  const SlotSorter sorter(input, LocalExperts(context, input.expert_mask), num_experts, layer_id);
  return sorter.Sort(context, num_slots);
}

}  // namespace switchyard::moe::runners
