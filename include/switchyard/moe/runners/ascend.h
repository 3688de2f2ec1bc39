// Runner "ascend" (contract 4.1): gemm1, activation and gemm2 over rows sorted by expert, made of
// the components of moe/ascend. Routing and the weighted sum are the dispatcher's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/moe/ascend/activation.h"
#include "switchyard/moe/ascend/finalize_routing.h"
#include "switchyard/moe/ascend/grouped_matmul.h"
#include "switchyard/moe/ascend/hidden_states_quant.h"
#include "switchyard/moe/ascend/init_routing.h"
#include "switchyard/moe/ascend/operands.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Contract 4.1. Built by a pre-permute, in the arena of the call.
struct AscendRunnerInput : RunnerInput {
  static constexpr std::string_view kRunner = "ascend";

  // Plain rows are quantised by the kernel of each product; codes (the dispatcher's, with their
  // scales) are multiplied as they are.
  QuantRows hidden_states;                 // [M, H], by expert
  std::span<const int64_t> expert_tokens;  // [L], as group_list_type says
  GroupListType group_list_type = GroupListType::kCounts;

  AscendRunnerInput() : RunnerInput{kRunner, kExpandedRows} {}
};

// What the core returns.
struct AscendRunnerOutput : RunnerOutput {
  static constexpr std::string_view kRunner = "ascend";

  Rows hidden_states;  // [M, H], not weighted; rows past the last group are undefined

  explicit AscendRunnerOutput(const DispatchPromises& promises) : RunnerOutput{kRunner, promises} {}
};

// The weights of one call. The runner multiplies with the canonical matrices of the base.
struct AscendQuantInfo : MoeQuantInfo {
  // The tensors that the matrices were imported from, for an operator library that takes them as
  // they are; absent where the layer was loaded in canonical form.
  ascend::AscendOperands w13_operands, w2_operands;
  std::span<const int32_t* const> int_bias13, int_bias2;  // see GroupedMatmulArgs
};

// A layer that was loaded in canonical form.
// Shapes: as MoeQuantInfo.
AscendQuantInfo MakeAscendQuantInfo(const MoeQuantInfo& quant_info);

// Owns canonical matrices made of vendor operands.
class AscendExpertWeights {
 public:
  // One prefix: how it is multiplied, and its tensors.
  struct Prefix {
    ascend::GroupedMatmulMode mode = ascend::GroupedMatmulMode::kUnquantized;
    ascend::AscendOperands operands;
    ActQuant act;  // of its rows
  };
  // w13 holds gate rows, then up rows; one half when not gated.
  // Errors: those of ImportOperands; kInvalidArgument naming the layer for an odd number of gated
  //   rows, and for an `act` that is not the mode's.
  AscendExpertWeights(const Prefix& w13, const Prefix& w2, bool is_gated, size_t layer_id);

  // Refers to this object and to the operands.
  AscendQuantInfo QuantInfo() const;

 private:
  Prefix w13_, w2_;
  bool is_gated_;
  ascend::CanonicalWeights w13_weights_, w2_weights_;
  // Halves of w13, as lists of pointers.
  std::vector<const std::byte*> up_data_, up_scale_, up_zero_;
  std::vector<const float*> up_bias_;
};

// What happens between the two products.
struct AscendActivation {
  // gemm1 is fused with Swiglu and mxfp8 requantisation; there is no activation object then.
  bool fused_gemm1 = false;
  std::optional<ascend::RowActivation> component;

  // Errors: kInternal with a fused gemm1: nothing may touch the activation then.
  const ascend::RowActivation& object() const;
};

// The choice of contract 4.1.4 for the kernels of w13 and w2 behind a dispatch format. Where the
// vendor's choice would compute another formula than the model's, it refuses.
// config.formula must be set.
// Errors: kUnsupported naming the layer, the modes, the activation and the alternative:
//   gemm1 of MXFP8 or W4A8 MXFP4, fused with Swiglu, with any other formula, a clamp or a w2 of
//   another kind; W8A8 and W4A8 int with any formula but silu behind ascend_tp, or but silu,
//   SwiGLU-OAI and SiTU behind DeepEP formats; what ModeOf refuses.
AscendActivation SelectAscendActivation(const MoeRunnerConfig& config, const ExpertKernel& w13,
                                        const ExpertKernel& w2, DispatchFormat format);

// Operands of ExpertsForward.
struct ExpertsForwardArgs {
  QuantRows hidden_states;       // [M, H], by expert
  ascend::GroupList group_list;  // [L]
  const AscendQuantInfo* quant_info = nullptr;
  const ascend::BaseActivation* activation = nullptr;  // nullptr = gemm1 is fused with it
  DType activation_dtype = DType::kF32;
  size_t layer_id = 0;
  // Stands around the activation of GGUF layers (contract 5.7); empty = one rank.
  ascend::GatherColumns gather;
  // An operator library of its own for both products; nullptr = ascend::GroupedMatmul.
  const ascend::BaseGroupedMatmul* grouped_matmul = nullptr;
};

// gemm1, activation, gemm2 over rows sorted by expert, not weighted: what every caller shares
// (contract 5.0). In the arena.
// Shapes: returns [M, H] f32; rows past the last group are undefined.
// Errors: those of the components.
Rows ExpertsForward(ExecContext& context, const ExpertsForwardArgs& args);

// The older name of ExpertsForward.
// Shapes: as ExpertsForward.
Rows ApplyWithoutRoutingWeights(ExecContext& context, const ExpertsForwardArgs& args);

// The un-quantised pipeline in one call, as three models of the reference still use it (contract
// 6.1): v1 routing, cumulative counts, Swiglu for "silu" and the tanh form of gelu otherwise,
// finalize mode 0. Logs one warning per process. Equals the modular path with activation silu or
// gelu_tanh.
//
// Shapes: x [T, H]; w1 [2I, H] (gate rows, then up rows) and w2 [H, I] of E experts; returns [T,
//   H].
// Errors: kUnsupported naming the layer and the setting for what the call never had (quantised
//   weights, biases, clamps, a scaling factor, other activations, layers that are not gated);
//   kInvalidArgument naming token and id.
// NOLINTNEXTLINE(readability-identifier-naming): the reference's name
[[deprecated("build a MoeLayer with runner ascend")]] Rows fused_moe_npu(
    ExecContext& context, ConstRows x, const ExpertMatrices& w1, const ExpertMatrices& w2,
    const TopKOutput& topk, const MoeRunnerConfig& config);

}  // namespace switchyard::moe
