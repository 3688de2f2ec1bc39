// Component "finalize routing": expert rows back to tokens, weighted and summed. Contract 4.1.5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/ascend/all_gather.h"

namespace switchyard::moe::ascend {

// Where the row of (t, k) is looked up in expanded_row_idx (the operator's drop_pad_mode). The
// modes "with drop" are those whose routing drops routes beyond a capacity; a dropped route (-1)
// adds 0 in every mode.
enum class DropPadMode {
  kColumnMajor = 0,      // [k * T + t]: v1 routing
  kColumnMajorDrop = 1,  // the same, with drop
  kRowMajor = 2,         // [t * K + k]: v2 routing, the one in use
  kRowMajorDrop = 3      // the same, with drop
};

// Operands of every finalize routing.
struct FinalizeRoutingArgs {
  ConstRows expanded_rows;                    // [M, H]
  std::span<const int32_t> expanded_row_idx;  // [T * K], -1 = dropped
  size_t num_tokens = 0;
  size_t top_k = 0;
  std::span<const float> scales;        // [T, K] routing weights, kept f32; empty = all 1
  ConstRows bias;                       // [E, H], added to a row before its weight; or empty
  std::span<const int32_t> expert_ids;  // [T, K], read for the bias
  ConstRows skip1, skip2;               // [T, H], added to the sum; or empty
  DropPadMode mode = DropPadMode::kRowMajor;
};

// Interface; implementations hold no state between calls.
class BaseFinalizeRouting {
 public:
  virtual ~BaseFinalizeRouting() = default;

  // out[t] = sum over k of scales[t, k] * (row(t, k) + bias[id(t, k)]), columns in order, then the
  // skips. In the arena.
  // Shapes: expanded_rows [M, H]; returns [T, H]; T and M may be 0.
  // Errors: kInvalidArgument naming the layer, and token and index where a row index is neither -1
  //   nor in [0, M); operands whose sizes contradict each other.
  virtual Rows Run(ExecContext& context, const FinalizeRoutingArgs& args) const = 0;
};

// All modes and operands.
class FinalizeRouting final : public BaseFinalizeRouting {
 public:
  explicit FinalizeRouting(size_t layer_id) : layer_id_(layer_id) {}
  Rows Run(ExecContext& context, const FinalizeRoutingArgs& args) const override;

 private:
  size_t layer_id_;
};

// The alternative without bias and skips, row-major. The vendor's operator takes |index|, which
// would make row 1 out of a dropped route: here it adds 0 as everywhere.
// Errors: kUnsupported naming an operand or a mode that it does not have.
class TokenUnpermute final : public BaseFinalizeRouting {
 public:
  explicit TokenUnpermute(size_t layer_id) : layer_id_(layer_id) {}
  Rows Run(ExecContext& context, const FinalizeRoutingArgs& args) const override;

 private:
  size_t layer_id_;
};

// Puts the columns of the ranks side by side after `inner`: returns [T, R * H].
class AllGatherFinalizeRoutingWrapper final : public BaseFinalizeRouting {
 public:
  AllGatherFinalizeRoutingWrapper(std::unique_ptr<const BaseFinalizeRouting> inner,
                                  GatherColumns gather);
  Rows Run(ExecContext& context, const FinalizeRoutingArgs& args) const override;

 private:
  std::unique_ptr<const BaseFinalizeRouting> inner_;
  GatherColumns gather_;
};

}  // namespace switchyard::moe::ascend
