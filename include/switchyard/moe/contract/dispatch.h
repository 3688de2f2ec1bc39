// What a dispatcher hands to a runner, and what it takes back, with the promises that both sides
// must share. Contract 1.4, 1.8, 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// The data layouts of contract 1.4. A format is a layout, not a protocol: several dispatchers emit
// the same one.
enum class DispatchFormat {
  kStandard,
  kAscendTp,
  kDeepepNormal,
  kDeepepLl,
  kDeepepV2,
  kFlashinfer
};
std::string_view DispatchFormatName(DispatchFormat format);

enum class RowKind { kToken, kExpanded };  // a row is a token, or one (token, expert) route
enum class WeightsAppliedBy {
  kRunner,
  kCombine
};                                       // who multiplies by the routing weights and sums over K
enum class IdSpace { kGlobal, kLocal };  // what the ids of a row count
enum class SumsOwed {                    // who must still add partial results (contract 1.8)
  kNone,
  kExpertParallel,
  kMoeTensorParallel,
  kBoth
};

// Said by the dispatch, repeated by the combine; a mismatch is refused. They are what keeps a
// result from being scaled, weighted or summed twice, or not at all.
struct DispatchPromises {
  RowKind row_kind = RowKind::kToken;
  WeightsAppliedBy weights_applied_by = WeightsAppliedBy::kRunner;
  IdSpace id_space = IdSpace::kGlobal;
  SumsOwed sums_owed = SumsOwed::kNone;

  friend bool operator==(const DispatchPromises&, const DispatchPromises&) = default;
};
// "token rows, weights applied by the runner, global ids, no sums owed"
std::string DescribePromises(const DispatchPromises& promises);

inline constexpr DispatchPromises kTokenRows{RowKind::kToken, WeightsAppliedBy::kRunner,
                                             IdSpace::kGlobal, SumsOwed::kNone};
// DeepEP's token rows: kTokenRows with ids that count the experts of the rank.
inline constexpr DispatchPromises kLocalTokenRows{RowKind::kToken, WeightsAppliedBy::kRunner,
                                                  IdSpace::kLocal, SumsOwed::kNone};
inline constexpr DispatchPromises kExpandedRows{RowKind::kExpanded, WeightsAppliedBy::kCombine,
                                                IdSpace::kLocal, SumsOwed::kNone};

// A dispatch of token rows whose combine weights and sums them (RowKind::kToken with
// WeightsAppliedBy::kCombine) asks the runner for one row per route: each token's rows are then
// added in the order of its slots by the rank that owns it, so that the result does not depend on
// which ranks computed them.
constexpr DispatchPromises Routewise(DispatchPromises promises) {
  promises.weights_applied_by = WeightsAppliedBy::kCombine;
  return promises;
}
constexpr bool IsRoutewise(const DispatchPromises& promises) {
  return promises.row_kind == RowKind::kToken &&
         promises.weights_applied_by == WeightsAppliedBy::kCombine;
}

// Rows that were not summed over K yet (contract 1.4): for a finalizer of the model, or for a
// combine that asked for them.
//   kTokenTopk  [T * K, H], row t * K + k
//   kExpanded   in the runner's own order; row_of_slot says where each route is
enum class RoutewiseLayout { kNone, kTokenTopk, kExpanded };

// Base of every dispatch output; the concrete struct is named by `format`. Lives in the arena of
// the step.
struct DispatchOutput {
  DispatchFormat format;
  DispatchPromises promises;
};

// Base of every combine input; its format is that of the dispatch it answers (contract 1.4).
struct CombineInput {
  DispatchFormat format;
  DispatchPromises promises;
  RoutewiseLayout routewise = RoutewiseLayout::kNone;
};

// Format "standard" (contract 3.2): every rank has all tokens, nothing was moved.
struct StandardDispatchOutput : DispatchOutput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kStandard;

  QuantRows hidden_states;  // [T, H]
  TopKOutput topk_output;   // global ids, -1 = no expert

  StandardDispatchOutput(const QuantRows& hidden, const TopKOutput& topk,
                         const DispatchPromises& promises = kTokenRows)
      : DispatchOutput{kFormat, promises}, hidden_states(hidden), topk_output(topk) {}
  StandardDispatchOutput(ConstRows hidden, const TopKOutput& topk,
                         const DispatchPromises& promises = kTokenRows)
      : StandardDispatchOutput(QuantRows::Plain(hidden), topk, promises) {}
};

// Answer to StandardDispatchOutput: rows weighted and summed over K by the runner, or one row per
// route if the dispatch asked for that.
struct StandardCombineInput : CombineInput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kStandard;

  // [T, H]; [T * K, H] with routewise kTokenTopk (no_combine); [M, H'], H' <= H, with kExpanded
  Rows hidden_states;
  std::span<const int32_t> row_of_slot;  // kExpanded: [T * K] row of each slot, -1 = none

  explicit StandardCombineInput(Rows hidden, const DispatchPromises& kept = kTokenRows)
      : CombineInput{kFormat, kept}, hidden_states(hidden) {}
};

// How a group list says where the rows of an expert are (contract 4.1.3).
enum class GroupListType { kCumulative = 0, kCounts = 1 };

// Format "ascend_tp" (contract 3.3): every (token, expert) route is a row, sorted by expert.
struct AscendTpDispatchOutput : DispatchOutput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kAscendTp;

  QuantRows hidden_states;                    // [M, H], M = routes that are not -1
  std::span<const float> topk_weights;        // [T, K], kept f32
  std::span<const int32_t> topk_ids;          // [T, K]
  std::span<const int32_t> expanded_row_idx;  // [T * K]: row of route t * K + k, or -1
  std::span<const int64_t> expert_tokens;     // [E], as group_list_type says
  GroupListType group_list_type = GroupListType::kCounts;
  size_t num_tokens = 0;
  size_t top_k = 0;

  AscendTpDispatchOutput() : DispatchOutput{kFormat, kExpandedRows} {}
};

// Answer to AscendTpDispatchOutput: the rows in the same order, not weighted.
struct AscendTpCombineInput : CombineInput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kAscendTp;

  Rows hidden_states;  // [M, H]

  explicit AscendTpCombineInput(Rows hidden, const DispatchPromises& kept = kExpandedRows)
      : CombineInput{kFormat, kept}, hidden_states(hidden) {}
};

// What MORI adds to its dispatch outputs (contract 3.9).
struct MoriDispatch {
  size_t num_recv_tokens = 0;                // rows that are defined; the rest of the buffer is not
  std::span<const int32_t> origin_topk_ids;  // [T, K] of the sender
  std::span<const float> origin_topk_weights;  // [T, K] of the sender
  std::optional<DType> out_dtype;              // what results are rounded to
  size_t recv_cap = 0;                         // rows to look at, 0 = all
  Rows expert_output;                          // where combine reads from, empty = anywhere
  std::span<const int32_t> expert_mask;        // [E] of the global ids, 1 = local
};

// Format "deepep_normal" (contract 3.4). Two realisations, told apart by promises.row_kind:
//   token: a row per received token, weighted and summed over its local experts by the runner;
//   expanded: a row per (token, local expert), sorted by expert, weighted by combine.
struct DeepepNormalDispatchOutput : DispatchOutput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kDeepepNormal;

  QuantRows hidden_states;              // [N, H]
  std::span<const int32_t> topk_ids;    // [N, K] local ids, -1 = other rank's; global with mori
  std::span<const float> topk_weights;  // [N, K]
  size_t top_k = 0;
  std::span<const int32_t> num_recv_tokens_per_expert;  // [L]; empty with mori
  const MoriDispatch* mori = nullptr;

  explicit DeepepNormalDispatchOutput(const DispatchPromises& promises)
      : DispatchOutput{kFormat, promises} {}
};

// Answer to DeepepNormalDispatchOutput, rows as its promises say.
struct DeepepNormalCombineInput : CombineInput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kDeepepNormal;

  Rows hidden_states;                    // [N, H]; [M, H'], H' <= H, with routewise kExpanded
  std::span<const int32_t> topk_ids;     // as dispatched; the sender's with mori
  std::span<const float> topk_weights;   // as topk_ids
  std::span<const int32_t> row_of_slot;  // kExpanded: [N * K] row of each slot, -1 = none

  DeepepNormalCombineInput(Rows hidden, const DispatchPromises& kept)
      : CombineInput{kFormat, kept}, hidden_states(hidden) {}
};

// Format "deepep_ll" (contract 3.5): a slab of capacity rows for each local expert.
struct DeepepLlDispatchOutput : DispatchOutput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kDeepepLl;

  QuantRows hidden_states;              // [L * capacity, H]; expert e's rows start at e * capacity
  std::span<const int32_t> masked_m;    // [L]: rows of each expert that are defined
  size_t capacity = 0;                  // rows of an expert's slab
  size_t expected_m = 0;                // a scheduling hint, never a bound
  std::span<const int32_t> topk_ids;    // [T, K] of the sender
  std::span<const float> topk_weights;  // [T, K] of the sender
  size_t top_k = 0;
  bool rows_may_move = false;  // the answer may say where its rows are (row_of_place)

  DeepepLlDispatchOutput() : DispatchOutput{kFormat, kExpandedRows} {}
};

// Answer to DeepepLlDispatchOutput: rows in their places, not weighted; places past masked_m
// undefined.
struct DeepepLlCombineInput : CombineInput {
  static constexpr DispatchFormat kFormat = DispatchFormat::kDeepepLl;

  Rows hidden_states;                     // [L * capacity, H]; [M, H'] with row_of_place, H' <= H
  std::span<const int32_t> topk_ids;      // [T, K] of the sender
  std::span<const float> topk_weights;    // [T, K] of the sender
  std::span<const int32_t> row_of_place;  // [L * capacity], -1 = undefined; empty = all in place

  explicit DeepepLlCombineInput(Rows hidden, const DispatchPromises& kept = kExpandedRows)
      : CombineInput{kFormat, kept}, hidden_states(hidden) {}
};

// Errors: kInternal naming both, unless they are equal.
void RequireFormat(DispatchFormat found, DispatchFormat expected);

// The concrete struct behind a base reference: As<StandardDispatchOutput>(output).
// Errors: kInternal if the format is another one.
template <typename Concrete, typename Base>
const Concrete& As(const Base& base) {
  RequireFormat(base.format, Concrete::kFormat);
  return static_cast<const Concrete&>(base);
}

// Refuses a dispatch whose rows are not what a runner takes: all promises but the owed sums, which
// are nobody's before combine, must be `expected`.
// Errors: kInvalidArgument naming the layer, `runner` and both sides.
void RequirePromises(const DispatchOutput& output, DispatchPromises expected,
                     std::string_view runner, size_t layer_id);

// Refuses a routing that does not fit the rows it comes with.
// Errors: kInvalidArgument naming the layer and all sizes.
void RequireRouting(const TopKOutput& topk, size_t num_rows, size_t layer_id);

// Refuses a slab whose sizes or counts contradict each other.
// Errors: kInvalidArgument naming the layer, the expert where there is one, found and expected.
void RequireSlab(const DeepepLlDispatchOutput& slab, size_t num_experts, size_t layer_id);

// Refuses a combine input that does not answer a dispatch: another format, another promise, or rows
// that are routewise although the dispatch did not ask for that (or the other way round).
// Errors: kInvalidArgument naming the layer, `dispatcher` and both sides.
void CheckAnswer(const CombineInput& input, DispatchFormat format, const DispatchPromises& promises,
                 std::string_view dispatcher, size_t layer_id);

}  // namespace switchyard::moe
