// Component "hidden-states quantisation": rows to codes in front of a product. Contract 4.1.2.
#pragma once

#include <cstddef>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"

namespace switchyard::moe::ascend {

// Interface; implementations hold their attributes and nothing per call.
class BaseHiddenStatesQuant {
 public:
  virtual ~BaseHiddenStatesQuant() = default;

  // Codes and scales in the arena. Rows are independent of each other.
  // Shapes: x [M, K]; M may be 0.
  virtual QuantRows Run(ExecContext& context, ConstRows x) const = 0;
};

// Scales are taken from the rows: int8 max|x| / 127, int4 max|x| / 7, e4m3 and e2m1 a power of two
// for each 32 columns (PairSplitScales gives the vendor's view of those).
// Shapes: x [M, K] of Run.
class DynamicHiddenStatesQuant final : public BaseHiddenStatesQuant {
 public:
  // dtype: kI8, kI4, kF8E4M3 or kF4E2M1.
  // Errors: kUnsupported naming the layer and any other dtype.
  DynamicHiddenStatesQuant(DType dtype, size_t layer_id,
                           MxScaleRule mx_rule = MxScaleRule::kOcpFloor);
  // A quantiser of a scheme. Errors: kUnsupported naming the layer and a kind that is none of the
  //   four above.
  DynamicHiddenStatesQuant(const ActQuant& how, size_t layer_id);

  QuantRows Run(ExecContext& context, ConstRows x) const override;

 private:
  ActQuant how_;
};

// What a layer with static quantisation carries. One value, or one for each column.
struct StaticQuantAttributes {
  std::span<const float> scale_reciprocal;
  std::span<const float> offset;
};

// code = clamp(round(x * scale_reciprocal + offset)) to int8. There is no scale in the result: the
// layer that has the attributes has it.
class StaticHiddenStatesQuant final : public BaseHiddenStatesQuant {
 public:
  // Refers to the attributes.
  // Errors: kInvalidArgument naming the layer and the attribute that is missing, or that is not
  //   finite.
  StaticHiddenStatesQuant(const StaticQuantAttributes& attributes, size_t layer_id);

  // Shapes: x [M, K].
  // Errors: kInvalidArgument if an attribute has neither one value nor one for each column.
  QuantRows Run(ExecContext& context, ConstRows x) const override;

 private:
  StaticQuantAttributes attributes_;
  size_t layer_id_;
};

}  // namespace switchyard::moe::ascend
