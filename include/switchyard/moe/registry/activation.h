// From what a layer's config says to the formula that its runner computes. Contract 1.6, 4.1.4.
#pragma once

#include <span>
#include <string_view>

#include "switchyard/core/activation.h"
#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe {

// The formula that config.activation, is_gated, gemm1_alpha, gemm1_beta, gemm1_clamp_limit and
// swiglu_limit select, with its numbers:
//
//   silu             silu; with alpha and clamp limit swiglu_oai, with the clamp limit alone
//                    swiglu_step, with swiglu_limit swiglu_limit
//   npu_swiglu_oai   swiglu_oai; alpha 1 and no clamp unless set
//   swiglu           swiglu_oai; alpha 1.702 and clamp limit 7 unless set (the GPT-OSS models)
//   situ             situ; alpha 4 unless set, the clamp limit is its linear_beta
//   gelu, gelu_tanh, silu_rounded   the formula of that name; gelu is the erf form in every runner
//   not gated        silu_plain, gelu_plain, gelu_tanh_plain, relu2
//   any other name   the registered formula of that name, with the numbers that are set (alpha 1,
//   no
//                    limits where they are not)
//
// Errors: kNotFound (no such activation; lists the names, with the closest first); kUnsupported (a
//   formula that there is only gated or only not gated, a setting that the formula does not read,
//   alpha without a limit under silu, a clamp limit together with swiglu_limit, gemm1_beta other
//   than 1); kInvalidArgument (a limit that is not above 0, a number that is not finite). Each
//   names the layer, the activation and the setting.
Activation ResolveActivation(const Registry& registry, const MoeRunnerConfig& config);

}  // namespace switchyard::moe
