// Component "activation": between the two products. Contract 4.1.4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "switchyard/core/activation.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/ascend/all_gather.h"
#include "switchyard/moe/ascend/group_list.h"

namespace switchyard::moe::ascend {

// Where gate and up lie in a row of gemm1.
enum class GateUpLayout {
  kHalves,      // [gate | up]
  kInterleaved  // gate in even columns, up in odd ones
};

// Operands of every activation.
struct ActivationArgs {
  ConstRows x;  // [M, 2I] rows of gemm1; [M, I] when not gated
  // The grouped ones read rows of groups only: rows past the last group are neither read nor
  // counted, and have no results. The others take the tensor alone.
  std::optional<GroupList> groups;
  // SwigluQuantWithScales, in place of x: sums of products of codes and their scales.
  RowsView<const int32_t> accumulators;  // [M, 2I]
  ConstRows weight_scale;                // [E, 2I]
  std::span<const float> act_scale;      // [M]
  ConstRows bias;                        // [E, 2I], added after the scales; or empty
  ConstRows quant_scale;                 // [E, I], multiplies the result before its scale is taken;
                                         //   or empty
};

// Interface; implementations hold their numbers and nothing per call.
class BaseActivation {
 public:
  virtual ~BaseActivation() = default;

  // Whether it takes the group list.
  virtual bool is_grouped() const = 0;
  // How its results are quantised; kNone = plain rows.
  virtual ActQuantKind output_kind() const = 0;

  // In the arena; rows in the order of x.
  // Shapes: returns [M, I], from a grouped activation without the rows past the last group.
  // Errors: kInvalidArgument naming the layer for an odd number of gated columns, a group list that
  //   a grouped activation needs and lacks, and those of CheckGroups.
  virtual QuantRows Run(ExecContext& context, const ActivationArgs& args) const = 0;
};

// Everything in the table of contract 4.1.4 that takes rows of f32: a formula, then perhaps a
// quantiser. The names of the table are the functions below.
// Errors of Run: those of BaseActivation; kInvalidArgument for end offsets where counts are wanted.
class RowActivation final : public BaseActivation {
 public:
  // What makes one row of the table.
  struct Options {
    Activation formula;
    GateUpLayout layout = GateUpLayout::kHalves;
    ActQuant requant;  // of the results
    bool grouped = false;
    bool counts_only = false;  // refuses a cumulative group list
    size_t layer_id = 0;
    std::string_view name = "activation";  // for messages
  };
  explicit RowActivation(const Options& options) : options_(options) {}

  bool is_grouped() const override { return options_.grouped; }
  ActQuantKind output_kind() const override { return options_.requant.kind; }
  QuantRows Run(ExecContext& context, const ActivationArgs& args) const override;
  const Options& options() const { return options_; }

 private:
  Options options_;
};

// silu(g) u.
RowActivation Swiglu(size_t layer_id);
// Swiglu, then int8 per row.
RowActivation SwigluQuant(size_t layer_id);

// What SwigluDeepEpKernel and SwigluOai may be given. A limit of nullopt clamps nothing.
struct SwigluOaiParams {
  std::optional<float> alpha;  // unset = 1
  std::optional<float> limit;
  GateUpLayout layout = GateUpLayout::kHalves;
};
// g sigma(alpha g) (u + 1) with g <= limit, |u| <= limit.
// Errors: kInvalidArgument for a limit that is not above 0.
RowActivation SwigluOai(const SwigluOaiParams& params, size_t layer_id);

// Grouped: Swiglu over the rows of the groups; with alpha and limit the OAI form. `need_quant`
// (W8A8, W4A8) quantises to int8.
// Errors: kInvalidArgument if only one of alpha and limit is set, or for a limit that is not above
//   0.
RowActivation SwigluDeepEpKernel(bool need_quant, const SwigluOaiParams& params, size_t layer_id);

// min(silu(g), limit) clamp(u, -limit, limit): clamped after SiLU.
// Errors: kInvalidArgument for a limit that is not above 0.
RowActivation SwigluStepAndMul(float limit, size_t layer_id);

// silu(min(g, limit)) clamp(u, -limit, limit): clamped before SiLU.
// Errors: kInvalidArgument for a limit that is not above 0.
RowActivation SwigluLimit(float limit, size_t layer_id);

// Grouped: SwigluLimit, then mxfp8. Counts only.
// Errors: kInvalidArgument for a limit that is not above 0; Run refuses a cumulative group list.
RowActivation SwigluMxFp8Quant(float limit, MxScaleRule mx_rule, size_t layer_id);

// gelu(g) u. The vendor's default is the tanh form, which other runners call gelu_tanh.
enum class GeluApproximate { kNone, kTanh };
RowActivation GeluAndMul(size_t layer_id, GeluApproximate approximate = GeluApproximate::kTanh);

// b tanh(g / b) sigma(g) l tanh(u / l); without a linear limit l, u as it is. `need_quant`: int8.
struct SituParams {
  float beta = 4.0f;
  std::optional<float> linear_limit;
};
// Errors: kInvalidArgument for a beta or limit that is not above 0.
RowActivation Situ(const SituParams& params, bool need_quant, size_t layer_id);
// Situ, then mxfp8.
// Errors: those of Situ; kInvalidArgument without the linear limit, which the kernel needs.
RowActivation SituMxFp8Quant(const SituParams& params, MxScaleRule mx_rule, size_t layer_id);

// One half only: "silu", "gelu" (erf form), "gelu_tanh" or "relu2".
// Errors: kNotFound for another name.
RowActivation NotGated(std::string_view name, size_t layer_id);

// Grouped: g, u = accumulators * weight_scale[expert] * act_scale[row] (+ bias), then SwigluQuant;
// both activation quantisers: dynamic, and static where the scale and the offset are given.
class SwigluQuantWithScales final : public BaseActivation {
 public:
  // What does not change from call to call.
  struct Options {
    // Static: code = round(y * quant_scale + quant_offset), where quant_scale is the operand.
    std::optional<float> quant_offset;
    bool activate_left = true;  // the left half is the gate
    size_t layer_id = 0;
  };
  explicit SwigluQuantWithScales(const Options& options) : options_(options) {}

  bool is_grouped() const override { return true; }
  ActQuantKind output_kind() const override {
    return options_.quant_offset ? ActQuantKind::kInt8Static : ActQuantKind::kInt8Token;
  }
  // Errors: kInvalidArgument naming the layer and the operand that is missing or of another size.
  QuantRows Run(ExecContext& context, const ActivationArgs& args) const override;

 private:
  Options options_;
};

// Puts the columns of the ranks side by side after `inner`, which it does not own. Gate and up are
// shares of their own, so concatenating restores the order only after the activation.
class AllGatherActivationWrapper final : public BaseActivation {
 public:
  // Errors: kUnsupported naming the layer if `inner` quantises: the scales of the ranks differ.
  AllGatherActivationWrapper(const BaseActivation& inner, GatherColumns gather, size_t layer_id);

  bool is_grouped() const override { return inner_.is_grouped(); }
  ActQuantKind output_kind() const override { return ActQuantKind::kNone; }
  QuantRows Run(ExecContext& context, const ActivationArgs& args) const override;

 private:
  const BaseActivation& inner_;
  GatherColumns gather_;
};

}  // namespace switchyard::moe::ascend
