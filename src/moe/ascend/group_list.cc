#include "switchyard/moe/ascend/group_list.h"

#include <fmt/format.h>

#include <limits>

#include "switchyard/core/error.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void Refuse(size_t layer_id, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("layer {}: group_list: {}", layer_id, what));
}

bool IsCumulative(const GroupList& list, size_t layer_id) {
  switch (list.type) {
    case GroupListType::kCumulative: return true;
    case GroupListType::kCounts: return false;
  }
  Refuse(layer_id, fmt::format("expected type 0 (end offsets) or 1 (counts), found {}",
                               static_cast<int>(list.type)));
}

// Where the rows of the expert end, if they start at `begin`.
size_t EndOf(const GroupList& list, size_t expert, size_t begin, size_t layer_id) {
  const int64_t value = list.values[expert];
  if (value < 0) Refuse(layer_id, fmt::format("entry of expert {} is {}", expert, value));
  const auto rows = static_cast<size_t>(value);
  if (IsCumulative(list, layer_id)) {
    if (rows < begin)
      Refuse(layer_id, fmt::format("end offsets decrease from {} to {} at expert {}; are these "
                                   "counts (type 1)?",
                                   begin, rows, expert));
    return rows;
  }
  if (rows > std::numeric_limits<size_t>::max() - begin)
    Refuse(layer_id, fmt::format("the counts up to expert {} overflow", expert));
  return begin + rows;
}

GroupRanges Ranges(ExecContext& context, const GroupList& list, size_t layer_id) {
  const std::span<size_t> first = context.arena.AllocateSpan<size_t>(list.values.size() + 1);
  first[0] = 0;
  for (size_t e = 0; e < list.values.size(); ++e) first[e + 1] = EndOf(list, e, first[e], layer_id);
  return {first};
}

}  // namespace

GroupRanges CheckGroups(ExecContext& context, const GroupList& list, size_t num_experts,
                        size_t num_rows, size_t layer_id) {
  if (list.values.size() != num_experts)
    Refuse(layer_id, fmt::format("expected {} entries, one for each expert, found {}", num_experts,
                                 list.values.size()));
  IsCumulative(list, layer_id);  // an empty list has a type, too
  const GroupRanges ranges = Ranges(context, list, layer_id);
  for (size_t e = 0; e < num_experts; ++e) {
    if (ranges.first[e + 1] > num_rows)
      Refuse(layer_id, fmt::format("the groups up to expert {} need {} rows, there are {}; are "
                                   "these {}?",
                                   e, ranges.first[e + 1], num_rows,
                                   IsCumulative(list, layer_id) ? "counts (type 1)"
                                                                : "end offsets (type 0)"));
  }
  return ranges;
}

GroupList ToCounts(ExecContext& context, const GroupList& list, size_t layer_id) {
  if (!IsCumulative(list, layer_id)) return list;
  const GroupRanges ranges = Ranges(context, list, layer_id);
  const std::span<int64_t> counts = context.arena.AllocateSpan<int64_t>(list.values.size());
  for (size_t e = 0; e < counts.size(); ++e) counts[e] = static_cast<int64_t>(ranges.Count(e));
  return {counts, GroupListType::kCounts};
}

GroupList ToCumulative(ExecContext& context, const GroupList& list, size_t layer_id) {
  if (IsCumulative(list, layer_id)) return list;
  const GroupRanges ranges = Ranges(context, list, layer_id);
  const std::span<int64_t> ends = context.arena.AllocateSpan<int64_t>(list.values.size());
  for (size_t e = 0; e < ends.size(); ++e) ends[e] = static_cast<int64_t>(ranges.first[e + 1]);
  return {ends, GroupListType::kCumulative};
}

}  // namespace switchyard::moe::ascend
