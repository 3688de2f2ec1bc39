// Component "grouped matmul": rows sorted by expert times the matrices of the experts.
// Contract 4.1.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/ascend/group_list.h"

namespace switchyard::moe::ascend {

// The rows of the table of contract 4.1.3: what is multiplied with what.
enum class GroupedMatmulMode {
  kUnquantized,
  kW8A8,       // int8 codes on both sides, a scale per channel and one per row
  kW4A8Int,    // int4 weights (per channel or group), int8 rows
  kW4A4Int,    // int4 on both sides
  kW4A16,      // quantised weights, plain rows: (code + offset) * scale, whatever the bits
  kMxFp8,      // e4m3 on both sides, e8m0 scales of each 32 columns
  kW4A8MxFp4,  // e2m1 weights, e4m3 rows
  kW4A4MxFp4   // e2m1 on both sides
};
// "unquantized", "W8A8", …
std::string_view GroupedMatmulModeName(GroupedMatmulMode mode);

// The mode of weights of this format and rows of this kind.
// Errors: kUnsupported naming the layer and both, if the table has no such row.
GroupedMatmulMode ModeOf(const MatrixFormat& weights, size_t cols, ActQuantKind rows,
                         size_t layer_id);

// Operands of every grouped matmul.
struct GroupedMatmulArgs {
  // [M, Kd]. Plain rows are quantised as `act` says, the kernel's own input quantiser; codes are
  // taken as they are.
  QuantRows x;
  GroupList group_list;  // of E experts; rows past the last group are not read
  // Matrices of the same E experts whose results lie side by side: {w1, w3} is w13. In canonical
  // form; vendor layouts become that once (operands.h). Their biases are added.
  std::span<const ExpertMatrices> weights;
  ActQuant act;
  DType act_dtype = DType::kF32;  // of plain rows in products with un-quantised weights
  // kW8A8: added to the integer sums, before the scales (the vendor's i32 bias); E pointers to
  // [sum of N], or empty.
  std::span<const int32_t* const> int_bias;
  size_t num_rows = 0;  // of the result, if it has more than x
};

// Interface; implementations hold no state between calls.
class BaseGroupedMatmul {
 public:
  virtual ~BaseGroupedMatmul() = default;

  // Row m of the result is x[m] times the transposed matrix of m's expert, plus bias. In the arena.
  // Deterministic: a row's bits depend on the row and its expert alone.
  // Shapes: returns [max(M, num_rows), sum of N] f32; rows past the last group are undefined.
  // Errors: kInvalidArgument naming the layer: those of CheckGroups, matrices of other widths than
  //   the rows or of different formats or numbers of experts; those of ModeOf.
  virtual Rows Run(ExecContext& context, const GroupedMatmulArgs& args) const = 0;
};

// Every mode. Errors of Run: those of BaseGroupedMatmul; kInvalidArgument for an integer bias
// outside W8A8.
class GroupedMatmul final : public BaseGroupedMatmul {
 public:
  explicit GroupedMatmul(size_t layer_id) : layer_id_(layer_id) {}
  Rows Run(ExecContext& context, const GroupedMatmulArgs& args) const override;

 private:
  size_t layer_id_;
};

// gemm1, Swiglu and mxfp8 requantisation in one, for e4m3 or e2m1 weights with e8m0 scales: the
// rows arrive as mxfp8 codes (plain ones are quantised by `act`) and leave as such. The vendor's
// operator wants a cumulative group list; a list of counts is summed here and nowhere else.
class GroupedMatmulSwigluQuant final {
 public:
  // What does not change from call to call.
  struct Options {
    ActQuant requant;        // of the results: mxfp8
    float swiglu_limit = 0;  // anything but 0 is refused: the operator cannot clamp
    size_t layer_id = 0;
  };
  // Errors: kUnsupported naming the layer for a clamp, or results of another kind than mxfp8.
  explicit GroupedMatmulSwigluQuant(const Options& options);

  // Shapes: args.weights is {w1, w3}, both [I, Kd]; returns [rows of the groups, I].
  // Errors: those of GroupedMatmul::Run; kUnsupported for rows that are no mxfp8.
  QuantRows Run(ExecContext& context, const GroupedMatmulArgs& args) const;

 private:
  Options options_;
};

}  // namespace switchyard::moe::ascend
