// What a runner knows about its layer. Contract 1.6.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "switchyard/core/activation.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe {

// What one product of a layer multiplies: the kernels that contract 4.1 hangs on the layer, one for
// w13 and one for w2.
struct ExpertKernel {
  MatrixFormat format;
  ActQuant act;  // of its rows
};

// Fixed when the layer is built; owned by the layer.
struct MoeRunnerConfig {
  size_t num_experts = 0;                      // global experts known to the layer
  size_t num_local_experts = 0;                // of those, stored on this rank
  size_t hidden_size = 0;                      // H
  size_t intermediate_size_per_partition = 0;  // I
  size_t layer_id = 0;                         // global layer index, for messages
  size_t top_k = 0;                            // columns of the ids
  // Of contract 1.6: silu, gelu, gelu_tanh, relu2, silu_rounded, situ, npu_swiglu_oai or swiglu; or
  // the name of a registered formula. With the fields below it selects the formula
  // (moe/registry/activation.h).
  std::string activation = "silu";
  bool is_gated = true;                    // two halves (gate, up) before the activation
  std::optional<float> gemm1_alpha;        // slope of the sigmoid (SwiGLU-OAI), beta of SiTU
  std::optional<float> gemm1_beta;         // added to up (SwiGLU-OAI): 1 is all that there is
  std::optional<float> gemm1_clamp_limit;  // clamp of SwiGLU-OAI, SwigluStep; linear_beta of SiTU
  std::optional<float> swiglu_limit;       // clamp before SiLU
  bool gate_up_interleaved = false;  // rows of w13: gate and up in turn (else all gate, all up)
  Activation formula;                // set by MoeRunner::Create from the fields above
  double routed_scaling_factor =
      1.0;  // of the routed sum, where the weights do not hold it yet (contract 2.6, place 2)
  bool apply_router_weight_on_input = false;   // x times its weight before gemm1; needs top_k 1
  bool no_combine = false;                     // return [T, K, H], do not sum over K
  bool no_combine_keep_router_weight = false;  // with no_combine: the K rows are weighted
  DType activation_dtype =
      DType::kF32;  // arithmetic of activations: kF32, or kBF16 (rounded before each product)
  // For runners that choose by them when they are built; attached by CreateMoeRunner. Without them,
  // such a runner chooses, and refuses, at each call.
  std::optional<ExpertKernel> w13_kernel, w2_kernel;
  std::optional<DispatchFormat> dispatch_format;  // set by MoeRunner::Create
};

}  // namespace switchyard::moe
