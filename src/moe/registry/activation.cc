#include "switchyard/moe/registry/activation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "moe/registry/activation_rules.h"
#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Refuse(const MoeRunnerConfig& config, ErrorCode code, std::string_view why) {
  throw Error(code, fmt::format("layer {}: activation \"{}\": {}", config.layer_id,
                                config.activation, why));
}

[[noreturn]] void RefuseUnknown(const Registry& registry, const MoeRunnerConfig& config) {
  std::vector<std::string_view> known;
  for (const ActivationRule& rule : kActivationRules) known.push_back(rule.name);
  for (const ActivationEntry& entry : registry.activations()) {
    if (std::find(known.begin(), known.end(), entry.name) == known.end())
      known.push_back(entry.name);
  }
  const std::string_view close = ClosestName(config.activation, known);
  Refuse(config, ErrorCode::kNotFound,
         fmt::format("there is no such activation{}; known: {}",
                     close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                     fmt::join(known, ", ")));
}

void CheckNumber(const MoeRunnerConfig& config, std::string_view setting,
                 const std::optional<float>& value, bool above_zero) {
  if (!value || (std::isfinite(*value) && (!above_zero || *value > 0.0f))) return;
  Refuse(config, ErrorCode::kInvalidArgument,
         fmt::format("{} is {}, expected a finite number{}", setting, *value,
                     above_zero ? " above 0" : ""));
}

void CheckNumbers(const MoeRunnerConfig& config) {
  // The beta of SiTU divides; a slope of the sigmoid may have any sign.
  CheckNumber(config, "gemm1_alpha", config.gemm1_alpha, config.activation == "situ");
  CheckNumber(config, "gemm1_clamp_limit", config.gemm1_clamp_limit, true);
  CheckNumber(config, "swiglu_limit", config.swiglu_limit, true);
  if (config.gemm1_beta && *config.gemm1_beta != 1.0f) {
    Refuse(config, ErrorCode::kUnsupported,
           fmt::format("gemm1_beta is {}, only 1 is computed", *config.gemm1_beta));
  }
}

// The variant of gated silu that the settings ask for.
std::string_view SiluFormula(const MoeRunnerConfig& config) {
  if (config.swiglu_limit) {
    if (config.gemm1_clamp_limit) {
      Refuse(
          config, ErrorCode::kUnsupported,
          fmt::format("gemm1_clamp_limit {} and swiglu_limit {} contradict each other: one clamps "
                      "after SiLU, the other before it; set one",
                      *config.gemm1_clamp_limit, *config.swiglu_limit));
    }
    if (config.gemm1_alpha) {
      Refuse(config, ErrorCode::kUnsupported,
             "gemm1_alpha goes with gemm1_clamp_limit, not with swiglu_limit");
    }
    return "swiglu_limit";
  }
  if (config.gemm1_alpha && !config.gemm1_clamp_limit)
    Refuse(config, ErrorCode::kUnsupported, "gemm1_alpha is set without gemm1_clamp_limit");
  if (config.gemm1_alpha) return "swiglu_oai";
  return config.gemm1_clamp_limit ? "swiglu_step" : "silu";
}

// A setting that would have no effect is a mistake in the model's config, or in our reading of it.
void RefuseUnread(const MoeRunnerConfig& config, bool takes_numbers) {
  const auto refuse = [&](std::string_view setting, const std::optional<float>& value) {
    if (!value) return;
    Refuse(config, ErrorCode::kUnsupported,
           fmt::format("{} is {}, which {} does not read", setting, *value,
                       config.is_gated ? "it" : "the form without a gate"));
  };
  if (!takes_numbers) {
    refuse("gemm1_alpha", config.gemm1_alpha);
    refuse("gemm1_clamp_limit", config.gemm1_clamp_limit);
  }
  refuse("swiglu_limit", config.swiglu_limit);
}

// The name of the formula of a rule.
std::string_view RuleFormula(const ActivationRule& rule, const MoeRunnerConfig& config) {
  if (rule.name == "silu" && config.is_gated) return SiluFormula(config);
  RefuseUnread(config, rule.takes_numbers && config.is_gated);
  const std::string_view formula = config.is_gated ? rule.gated : rule.plain;
  if (formula.empty()) {
    Refuse(config, ErrorCode::kUnsupported,
           fmt::format("is_gated is {}, but it has no form {} a gate", config.is_gated,
                       config.is_gated ? "with" : "without"));
  }
  return formula;
}

ActivationParams Numbers(const MoeRunnerConfig& config, const ActivationParams& defaults) {
  ActivationParams params;
  params.alpha = config.gemm1_alpha.value_or(defaults.alpha);
  params.clamp_limit = config.gemm1_clamp_limit.value_or(defaults.clamp_limit);
  params.swiglu_limit = config.swiglu_limit.value_or(defaults.swiglu_limit);
  return params;
}

const ActivationEntry& FindRegistered(const Registry& registry, const MoeRunnerConfig& config) {
  const std::vector<ActivationEntry>& entries = registry.activations();
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const ActivationEntry& e) {
    return e.name == config.activation;
  });
  if (entry == entries.end()) RefuseUnknown(registry, config);
  if (entry->is_gated != config.is_gated) {
    Refuse(config, ErrorCode::kUnsupported,
           fmt::format("is_gated is {}, the formula's is {}", config.is_gated, entry->is_gated));
  }
  return *entry;
}

}  // namespace

Activation ResolveActivation(const Registry& registry, const MoeRunnerConfig& config) {
  CheckNumbers(config);
  const ActivationRule* rule = FindActivationRule(config.activation);
  if (rule == nullptr) return {FindRegistered(registry, config), Numbers(config, {})};
  return {registry.FindActivation(RuleFormula(*rule, config)), Numbers(config, rule->defaults)};
}

}  // namespace switchyard::moe
