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

// Which of the weights a slot wants.
class SlotExperts {
 public:
  SlotExperts(const AiterRunnerInput& input, std::span<const int32_t> local, size_t num_experts,
              size_t layer_id)
      : input_(input), local_(local), num_experts_(num_experts), layer_id_(layer_id) {}

  // -1 = none.
  int32_t Of(size_t slot) const {
    const int32_t id = input_.topk_ids[slot];
    if (id == -1) return -1;
    const size_t limit = local_.empty() ? num_experts_ : local_.size();
    if (id < 0 || static_cast<size_t>(id) >= limit) RefuseId(slot, limit);
    return local_.empty() ? id : local_[static_cast<size_t>(id)];
  }

 private:
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
  const SlotExperts experts(input, LocalExperts(context, input.expert_mask), num_experts, layer_id);
  const quant::GroupedItems items = quant::GroupByExpert(
      context.arena, num_slots, num_experts, [&](size_t slot) { return experts.Of(slot); });
  SortedSlots sorted{items.groups, items.item, context.arena.AllocateSpan<int32_t>(num_slots)};
  std::fill(sorted.row_of_slot.begin(), sorted.row_of_slot.end(), -1);
  for (size_t row = 0; row < sorted.num_rows(); ++row)
    sorted.row_of_slot[sorted.slots[row]] = static_cast<int32_t>(row);
  return sorted;
}

}  // namespace switchyard::moe::runners
