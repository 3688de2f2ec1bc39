#include "switchyard/moe/ascend/init_routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "quant/act_quant.h"
#include "quant/copy_rows.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/ascend/hidden_states_quant.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void Refuse(size_t layer_id, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("layer {}: init routing: {}", layer_id, what));
}

size_t ExpertEnd(const InitRoutingArgs& args) { return args.expert_end.value_or(args.expert_num); }

void CheckArgs(const InitRoutingArgs& args, size_t all_active, size_t layer_id) {
  const size_t routes = args.x.rows * args.top_k;
  if (args.expert_ids.size() != routes)
    Refuse(layer_id, fmt::format("{} tokens with top_k {} need {} ids, found {}", args.x.rows,
                                 args.top_k, routes, args.expert_ids.size()));
  if (routes > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    Refuse(layer_id, fmt::format("{} routes do not fit the row index", routes));
  if (args.expert_begin > ExpertEnd(args) || ExpertEnd(args) > args.expert_num)
    Refuse(layer_id, fmt::format("the active range [{}, {}) is not within {} experts",
                                 args.expert_begin, ExpertEnd(args), args.expert_num));
  if (args.active_num != 0 && args.active_num != all_active)
    Refuse(layer_id, fmt::format("active_num is {}, dropless routing takes all {}", args.active_num,
                                 all_active));
  for (size_t f = 0; f < routes; ++f) {
    const int32_t id = args.expert_ids[f];
    if (id < -1 || (id >= 0 && static_cast<size_t>(id) >= args.expert_num))
      Refuse(layer_id, fmt::format("token {} names expert {}; ids are -1 to {}", f / args.top_k, id,
                                   static_cast<int64_t>(args.expert_num) - 1));
  }
}

// The routes of the active experts, sorted by expert; stable.
struct SortedRoutes {
  std::span<int64_t> counts;     // [active experts]
  std::span<uint32_t> route_of;  // [M]: f = t * K + k of each row
  std::span<int32_t> row_of;     // [T * K]: row of each route, -1 if there is none
};

// A counting sort: O(T K + E).
SortedRoutes SortRoutes(ExecContext& context, const InitRoutingArgs& args) {
  const size_t num_active = ExpertEnd(args) - args.expert_begin;
  const auto active = [&](size_t f) -> std::optional<size_t> {
    const int32_t id = args.expert_ids[f];
    if (id < 0 || static_cast<size_t>(id) < args.expert_begin) return std::nullopt;
    const size_t index = static_cast<size_t>(id) - args.expert_begin;
    return index < num_active ? std::optional(index) : std::nullopt;
  };
  SortedRoutes sorted;
  sorted.counts = context.arena.AllocateSpan<int64_t>(num_active);
  std::fill(sorted.counts.begin(), sorted.counts.end(), 0);
  for (size_t f = 0; f < args.expert_ids.size(); ++f) {
    if (const auto index = active(f)) ++sorted.counts[*index];
  }
  const std::span<uint32_t> next = context.arena.AllocateSpan<uint32_t>(num_active);
  uint32_t num_rows = 0;
  for (size_t e = 0; e < num_active; ++e) {
    next[e] = num_rows;
    num_rows += static_cast<uint32_t>(sorted.counts[e]);
  }
  sorted.route_of = context.arena.AllocateSpan<uint32_t>(num_rows);
  sorted.row_of = context.arena.AllocateSpan<int32_t>(args.expert_ids.size());
  for (size_t f = 0; f < args.expert_ids.size(); ++f) {
    sorted.row_of[f] = -1;
    const auto index = active(f);
    if (!index) continue;
    const uint32_t row = next[*index]++;
    sorted.route_of[row] = static_cast<uint32_t>(f);
    sorted.row_of[f] = static_cast<int32_t>(row);
  }
  return sorted;
}

std::span<const int64_t> ExpertTokens(ExecContext& context, std::span<const int64_t> counts,
                                      ExpertTokensType type, size_t first_expert) {
  if (type == ExpertTokensType::kCounts) return counts;
  const bool pairs = type == ExpertTokensType::kPairs;
  const std::span<int64_t> tokens =
      context.arena.AllocateSpan<int64_t>(counts.size() * (pairs ? 2 : 1));
  int64_t sum = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    sum += counts[e];
    if (pairs) {
      tokens[2 * e] = static_cast<int64_t>(first_expert + e);
      tokens[2 * e + 1] = counts[e];
    } else {
      tokens[e] = sum;
    }
  }
  return tokens;
}

std::span<const int32_t> SortedExperts(ExecContext& context, const InitRoutingArgs& args,
                                       std::span<const uint32_t> route_of) {
  const std::span<int32_t> experts = context.arena.AllocateSpan<int32_t>(route_of.size());
  for (size_t row = 0; row < experts.size(); ++row) experts[row] = args.expert_ids[route_of[row]];
  return experts;
}

QuantRows Expand(ExecContext& context, const QuantRows& x, const InitRoutingArgs& args,
                 const SortedRoutes& sorted) {
  return quant::CopyRows(context, x, sorted.route_of.size(),
                         [&](size_t row) { return sorted.route_of[row] / args.top_k; });
}

// Everything but the rows.
InitRoutingResult RouteV2(ExecContext& context, const InitRoutingArgs& args,
                          const SortedRoutes& sorted) {
  InitRoutingResult result;
  result.expanded_row_idx = sorted.row_of;
  result.expert_tokens_type = args.expert_tokens_type;
  result.expert_tokens =
      ExpertTokens(context, sorted.counts, args.expert_tokens_type, args.expert_begin);
  result.sorted_experts = SortedExperts(context, args, sorted.route_of);
  return result;
}

QuantRows QuantizeStatic(ExecContext& context, ConstRows x, const InitRoutingArgs& args,
                         size_t layer_id) {
  if (!args.scale || !args.offset)
    Refuse(layer_id, "quant_mode 0 (static) needs a scale and an offset");
  const StaticQuantAttributes attributes{{&*args.scale, 1}, {&*args.offset, 1}};
  QuantRows codes = StaticHiddenStatesQuant(attributes, layer_id).Run(context, x);
  // The component leaves the scale to the layer; rows that travel say what they are.
  codes.scale = reinterpret_cast<const std::byte*>(context.arena.New<float>(1.0f / *args.scale));
  codes.scale_cols = std::max<size_t>(1, x.cols);
  codes.offset = *args.offset;
  return codes;
}

// Codes of every row of x, as quant_mode says.
QuantRows Quantize(ExecContext& context, ConstRows x, const InitRoutingArgs& args,
                   size_t layer_id) {
  ActQuant how;
  how.amax_floor = args.amax_floor;
  how.mx_rule = args.mx_rule;
  switch (args.quant_mode) {
    case InitQuantMode::kNone: return QuantRows::Plain(x);
    case InitQuantMode::kStatic: return QuantizeStatic(context, x, args, layer_id);
    case InitQuantMode::kDynamic: how.kind = ActQuantKind::kInt8Token; break;
    case InitQuantMode::kMxFp8: how.kind = ActQuantKind::kMxFp8; break;
    case InitQuantMode::kMxFp8E5M2:
      Refuse(layer_id,
             "quant_mode 2 (mxfp8 with e5m2) is not computed; there are -1 (none), 0 "
             "(static int8), 1 (dynamic int8) and 3 (mxfp8 with e4m3)");
  }
  return quant::QuantizeRows(context, x, how);
}

// x times the smooth scale of each row's expert.
Rows Smooth(ExecContext& context, const InitRoutingArgs& args, const SortedRoutes& sorted) {
  const Rows rows = context.arena.AllocateRows(sorted.route_of.size(), args.x.cols);
  quant::ForEachRow(context, rows.rows, [&](size_t i) {
    const size_t route = sorted.route_of[i];
    const float* x = args.x.Row(route / args.top_k);
    const float* scale =
        args.smooth_scale.Row(static_cast<size_t>(args.expert_ids[route]) - args.expert_begin);
    float* out = rows.Row(i);
    for (size_t h = 0; h < rows.cols; ++h) out[h] = x[h] * scale[h];
  });
  return rows;
}

void CheckSmoothScale(const InitRoutingArgs& args, size_t layer_id) {
  if (args.smooth_scale.rows == 0) return;
  const size_t num_active = ExpertEnd(args) - args.expert_begin;
  if (args.quant_mode != InitQuantMode::kDynamic)
    Refuse(layer_id, fmt::format("a smooth scale goes with quant_mode 1, found {}",
                                 static_cast<int>(args.quant_mode)));
  if (args.smooth_scale.rows != num_active || args.smooth_scale.cols != args.x.cols)
    Refuse(layer_id,
           fmt::format("the smooth scale is [{}, {}], expected [{}, {}]", args.smooth_scale.rows,
                       args.smooth_scale.cols, num_active, args.x.cols));
}

void RefuseQuant(const InitRoutingArgs& args, std::string_view component, size_t layer_id) {
  if (args.quant_mode != InitQuantMode::kNone || args.smooth_scale.rows != 0)
    Refuse(layer_id, fmt::format("{} does not quantise (quant_mode {}); InitRoutingV2Quant does",
                                 component, static_cast<int>(args.quant_mode)));
}

void RefuseRowIdx(const InitRoutingArgs& args, size_t layer_id) {
  if (!args.row_idx.empty()) Refuse(layer_id, "row_idx is an operand of v1 only");
}

// v1 finds the token of a route in its row index, so every value must be there once.
void CheckRowIdx(ExecContext& context, const InitRoutingArgs& args, size_t layer_id) {
  const size_t routes = args.expert_ids.size();
  if (args.row_idx.size() != routes)
    Refuse(layer_id, fmt::format("row_idx has {} entries, v1 needs one for each of {} routes",
                                 args.row_idx.size(), routes));
  const std::span<uint8_t> seen = context.arena.AllocateSpan<uint8_t>(routes);
  std::fill(seen.begin(), seen.end(), uint8_t{0});
  for (int32_t index : args.row_idx) {
    if (index < 0 || static_cast<size_t>(index) >= routes || seen[static_cast<size_t>(index)] != 0)
      Refuse(layer_id, fmt::format("row_idx holds {}, expected each of 0 to {} once", index,
                                   static_cast<int64_t>(routes) - 1));
    seen[static_cast<size_t>(index)] = 1;
  }
}

}  // namespace

GroupList InitRoutingResult::groups() const {
  switch (expert_tokens_type) {
    case ExpertTokensType::kCumulative: return {expert_tokens, GroupListType::kCumulative};
    case ExpertTokensType::kCounts: return {expert_tokens, GroupListType::kCounts};
    case ExpertTokensType::kPairs: break;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "expert_tokens are (expert, count) pairs; a grouped matmul takes end offsets (type 0) "
      "or counts (type 1)");
}

InitRoutingResult InitRoutingV1::Run(ExecContext& context, const InitRoutingArgs& args) const {
  CheckArgs(args, args.x.rows, layer_id_);
  CheckRowIdx(context, args, layer_id_);
  RefuseQuant(args, "InitRoutingV1", layer_id_);
  if (args.expert_begin != 0 || ExpertEnd(args) != args.expert_num)
    Refuse(layer_id_, "v1 has no active range");
  const SortedRoutes sorted = SortRoutes(context, args);
  InitRoutingResult result;
  result.expanded_x =
      quant::CopyRows(context, QuantRows::Plain(args.x), sorted.route_of.size(), [&](size_t row) {
        return static_cast<size_t>(args.row_idx[sorted.route_of[row]]) % args.x.rows;
      });
  const std::span<int32_t> row_idx = context.arena.AllocateSpan<int32_t>(args.row_idx.size());
  for (size_t f = 0; f < row_idx.size(); ++f)
    row_idx[static_cast<size_t>(args.row_idx[f])] = sorted.row_of[f];
  result.expanded_row_idx = row_idx;
  result.sorted_experts = SortedExperts(context, args, sorted.route_of);
  result.expert_tokens_type = ExpertTokensType::kCumulative;
  result.expert_tokens =
      ComputeExpertTokens(context, result.sorted_experts, args.expert_num, layer_id_);
  return result;
}

InitRoutingResult InitRoutingV2::Run(ExecContext& context, const InitRoutingArgs& args) const {
  CheckArgs(args, args.x.rows * args.top_k, layer_id_);
  RefuseQuant(args, "InitRoutingV2", layer_id_);
  RefuseRowIdx(args, layer_id_);
  const SortedRoutes sorted = SortRoutes(context, args);
  InitRoutingResult result = RouteV2(context, args, sorted);
  result.expanded_x = Expand(context, QuantRows::Plain(args.x), args, sorted);
  return result;
}

InitRoutingResult InitRoutingV2Quant::Run(ExecContext& context, const InitRoutingArgs& args) const {
  CheckArgs(args, args.x.rows * args.top_k, layer_id_);
  CheckSmoothScale(args, layer_id_);
  RefuseRowIdx(args, layer_id_);
  const SortedRoutes sorted = SortRoutes(context, args);
  InitRoutingResult result = RouteV2(context, args, sorted);
  result.expanded_x =
      args.smooth_scale.rows != 0
          ? Quantize(context, Smooth(context, args, sorted), args, layer_id_)
          : Expand(context, Quantize(context, args.x, args, layer_id_), args, sorted);
  return result;
}

std::span<const int32_t> ColumnMajorRowIndex(ExecContext& context, size_t num_tokens,
                                             size_t top_k) {
  const std::span<int32_t> row_idx = context.arena.AllocateSpan<int32_t>(num_tokens * top_k);
  for (size_t t = 0; t < num_tokens; ++t) {
    for (size_t k = 0; k < top_k; ++k)
      row_idx[t * top_k + k] = static_cast<int32_t>(k * num_tokens + t);
  }
  return row_idx;
}

std::span<const int64_t> ComputeExpertTokens(ExecContext& context,
                                             std::span<const int32_t> sorted_experts,
                                             size_t expert_num, size_t layer_id) {
  const std::span<int64_t> ends = context.arena.AllocateSpan<int64_t>(expert_num);
  size_t row = 0;
  for (size_t e = 0; e < expert_num; ++e) {
    while (row < sorted_experts.size() && sorted_experts[row] == static_cast<int32_t>(e)) ++row;
    ends[e] = static_cast<int64_t>(row);
  }
  if (row != sorted_experts.size())
    Refuse(layer_id, fmt::format("expert {} of row {} is not in [0, {}) or out of order",
                                 sorted_experts[row], row, expert_num));
  return ends;
}

TensorView PairSplitScales(const QuantRows& rows) {
  const size_t blocks = rows.cols / 32;
  const bool mx = rows.kind == ActQuantKind::kMxFp8 || rows.kind == ActQuantKind::kMxFp4;
  if (!mx || rows.cols % 64 != 0 || rows.scale_stride != blocks) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("scales in pairs need MX rows whose width is a multiple of 64; found {} "
                    "rows of width {} with {} scales a row",
                    ActQuantKindName(rows.kind), rows.cols, rows.scale_stride));
  }
  return {rows.scale, rows.scale_dtype, Shape{rows.rows, blocks / 2, 2}};
}

}  // namespace switchyard::moe::ascend
