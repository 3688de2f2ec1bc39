// Component "init routing": tokens to rows sorted by expert. Contract 4.1.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"
#include "switchyard/core/shape.h"
#include "switchyard/moe/ascend/group_list.h"

namespace switchyard::moe::ascend {

// How expert_tokens counts (the operator's expert_tokens_num_type).
enum class ExpertTokensType {
  kCumulative = 0,  // [E] inclusive prefix sums
  kCounts = 1,      // [E]
  kPairs = 2        // [E, 2]: expert, count
};

// How the expanded rows are quantised (the operator's quant_mode).
enum class InitQuantMode {
  kNone = -1,
  kStatic = 0,     // int8: round(x * scale + offset), clipped
  kDynamic = 1,    // int8, scale max|x| / 127 of each row
  kMxFp8E5M2 = 2,  // an operand of the vendor's operator; refused here
  kMxFp8 = 3       // e4m3, e8m0 scale of each 32 columns
};

// Operands of every init routing, used or not.
struct InitRoutingArgs {
  ConstRows x;                          // [T, H]
  std::span<const int32_t> expert_ids;  // [T, K] row-major, -1 = no expert
  size_t top_k = 0;
  size_t expert_num = 0;             // E: ids lie in [0, E)
  size_t expert_begin = 0;           // active range [begin, end), others are not expanded;
  std::optional<size_t> expert_end;  //   unset = E
  std::span<const int32_t> row_idx;  // v1: [T, K], k * T + t
  // All of them (dropless), in the operator's unit: T tokens in v1, T * K routes in v2. 0 = the
  // same.
  size_t active_num = 0;
  ExpertTokensType expert_tokens_type = ExpertTokensType::kCounts;  // v2
  InitQuantMode quant_mode = InitQuantMode::kNone;
  ConstRows smooth_scale;  // kDynamic: [active experts, H], x is multiplied by its expert's row;
                           //   or empty
  std::optional<float> scale;  // kStatic, with offset
  std::optional<float> offset;
  float amax_floor = 0;                          // kDynamic, see ActQuant
  MxScaleRule mx_rule = MxScaleRule::kOcpFloor;  // kMxFp8
};

// In the arena.
struct InitRoutingResult {
  QuantRows expanded_x;  // [M, H], M = routes with an active expert, by expert, then route
  // [T * K]: the row of each route, -1 if it was not expanded. Index t * K + k in v2, k * T + t in
  // v1: finalize modes 2, 3 take the one, modes 0, 1 the other.
  std::span<const int32_t> expanded_row_idx;
  std::span<const int64_t> expert_tokens;  // as the type says, of the active experts
  ExpertTokensType expert_tokens_type = ExpertTokensType::kCounts;
  std::span<const int32_t> sorted_experts;  // [M]: expert of each row (v1's third result)

  // expert_tokens as a grouped matmul takes it.
  // Errors: kInvalidArgument for pairs.
  GroupList groups() const;
};

// Interface; implementations hold no state between calls.
class BaseInitRouting {
 public:
  virtual ~BaseInitRouting() = default;

  // Shapes: x [T, H], expert_ids [T, K]; T may be 0.
  // Errors: kInvalidArgument naming the layer, and token and id where an id is neither -1 nor in
  //   [0, E); operands that the implementation needs and lacks, or has and cannot use.
  virtual InitRoutingResult Run(ExecContext& context, const InitRoutingArgs& args) const = 0;
};

// Legacy: column-major row index, expert_tokens cumulative, plain rows only.
// Errors of Run: those of BaseInitRouting; kInvalidArgument for a row index that is no permutation.
class InitRoutingV1 final : public BaseInitRouting {
 public:
  explicit InitRoutingV1(size_t layer_id) : layer_id_(layer_id) {}
  InitRoutingResult Run(ExecContext& context, const InitRoutingArgs& args) const override;

 private:
  size_t layer_id_;
};

// The one in use: gather-style row index, counts of any type, plain rows.
class InitRoutingV2 final : public BaseInitRouting {
 public:
  explicit InitRoutingV2(size_t layer_id) : layer_id_(layer_id) {}
  InitRoutingResult Run(ExecContext& context, const InitRoutingArgs& args) const override;

 private:
  size_t layer_id_;
};

// V2 with every quant_mode. A token is quantised once, whatever the number of its experts, unless a
// smooth scale makes its rows differ.
class InitRoutingV2Quant final : public BaseInitRouting {
 public:
  explicit InitRoutingV2Quant(size_t layer_id) : layer_id_(layer_id) {}
  InitRoutingResult Run(ExecContext& context, const InitRoutingArgs& args) const override;

 private:
  size_t layer_id_;
};

// row_idx[t, k] = k * T + t, which v1 takes. In the arena.
std::span<const int32_t> ColumnMajorRowIndex(ExecContext& context, size_t num_tokens, size_t top_k);

// Inclusive prefix sums of the rows of each expert: the op that follows v1.
// Errors: kInvalidArgument naming the layer if an expert is not in [0, E) or they are not sorted.
std::span<const int64_t> ComputeExpertTokens(ExecContext& context,
                                             std::span<const int32_t> sorted_experts,
                                             size_t expert_num, size_t layer_id);

// The e8m0 scales of kMxFp8 or kMxFp4 rows as the vendor's operators take them.
// Shapes: rows [M, H]; returns [M, H / 64, 2], which refers to the scales of `rows`.
// Errors: kInvalidArgument if the rows are of another kind, if H is no multiple of 64, or if the
//   scales are not contiguous.
TensorView PairSplitScales(const QuantRows& rows);

}  // namespace switchyard::moe::ascend
