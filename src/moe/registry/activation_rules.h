// The names that contract 1.6 gives to activations, and the formulas that they stand for.
#pragma once

#include <optional>
#include <string_view>

#include "switchyard/core/activation.h"

namespace switchyard::moe {

// One name. An empty formula: there is none of that kind.
struct ActivationRule {
  std::string_view name;
  std::string_view gated, plain;
  // The gated formula reads gemm1_alpha and gemm1_clamp_limit, and takes these where they are not
  // set.
  bool takes_numbers = false;
  ActivationParams defaults = {};
};

// silu is here for its plain forms; its variants are chosen by the settings (activation.cc).
inline constexpr ActivationRule kActivationRules[] = {
    {"silu", "silu", "silu_plain"},
    {"gelu", "gelu", "gelu_plain"},
    {"gelu_tanh", "gelu_tanh", "gelu_tanh_plain"},
    {"relu2", "", "relu2"},
    {"silu_rounded", "silu_rounded", ""},
    {"situ", "situ", "", true, {.alpha = 4.0f}},
    {"npu_swiglu_oai", "swiglu_oai", "", true},
    {"swiglu", "swiglu_oai", "", true, {.alpha = 1.702f, .clamp_limit = 7.0f}},
};

// nullptr if the contract has no such name.
constexpr const ActivationRule* FindActivationRule(std::string_view name) {
  for (const ActivationRule& rule : kActivationRules) {
    if (rule.name == name) return &rule;
  }
  return nullptr;
}

// True for a name that stands for formulas of other names only: none can be registered under it.
constexpr bool IsAlias(std::string_view name) {
  const ActivationRule* rule = FindActivationRule(name);
  return rule != nullptr && rule->gated != name && rule->plain != name;
}

}  // namespace switchyard::moe
