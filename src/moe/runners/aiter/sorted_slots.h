// The (token, expert) slots of a call in the order in which experts work them off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "quant/expert_rows.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/runners/aiter.h"

namespace switchyard::moe::runners {

// The slots (token * K + k) grouped by expert, in ascending order within each.
struct SortedSlots {
  quant::ExpertGroups groups;       // of the sorted rows
  std::span<const uint32_t> slots;  // [M] slot of each sorted row
  std::span<int32_t> row_of_slot;   // [T * K] sorted row of each slot, -1 if skipped

  size_t num_rows() const { return slots.size(); }
};

// The first num_slots slots of input.topk_ids that name one of num_experts experts, through
// input.expert_mask if there is one. A counting sort in the arena: O(T K + E).
// Errors: kInvalidArgument naming layer, token and id for an id that the weights or the mask do not
//   have.
SortedSlots SortByExpert(ExecContext& context, const AiterRunnerInput& input, size_t num_slots,
                         size_t num_experts, size_t layer_id);

}  // namespace switchyard::moe::runners
