// Which rows belong to which expert. Contract 4.1.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe::ascend {

// The group_list operand: rows of expert 0 first, then those of expert 1, and so on; rows past the
// last group belong to nobody.
struct GroupList {
  std::span<const int64_t> values;  // [E] counts, or inclusive end offsets
  GroupListType type = GroupListType::kCounts;
};

// Row ranges of a group list that was checked: the rows of expert e are [first[e], first[e + 1]).
struct GroupRanges {
  std::span<const size_t> first;  // [E + 1]

  size_t num_experts() const { return first.size() - 1; }
  size_t num_rows() const { return first.back(); }
  size_t Begin(size_t expert) const { return first[expert]; }
  size_t Count(size_t expert) const { return first[expert + 1] - first[expert]; }
};

// The ranges, in the arena. `num_rows` is how many rows there are.
// Errors: kInvalidArgument naming the layer and the expert for a list of another length, a type
//   that is neither 0 nor 1, a negative entry, end offsets that decrease, and groups that need more
//   rows than there are.
GroupRanges CheckGroups(ExecContext& context, const GroupList& list, size_t num_experts,
                        size_t num_rows, size_t layer_id);

// The list as counts or as inclusive end offsets; refers to `list` if it is of that type already.
// Errors: kInvalidArgument as CheckGroups, but for the number of rows.
GroupList ToCounts(ExecContext& context, const GroupList& list, size_t layer_id);
GroupList ToCumulative(ExecContext& context, const GroupList& list, size_t layer_id);

}  // namespace switchyard::moe::ascend
