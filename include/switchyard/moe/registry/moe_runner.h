// The facade over a runner: fused function if there is one, else permute, core, permute.
// Contract 1.5.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe {

// Which runner, and on which path.
struct MoeRunnerOptions {
  std::string runner;  // a registered name
  std::string a2a = "none";
  // Drops a fused function, so that the modular path runs; "fused equals modular" is the main
  // self-check of the design.
  bool disable_fused = false;
};

// One runner of one layer. Holds no state between calls.
class MoeRunner {
 public:
  // Looks everything up now, so that a missing pair is an error at start-up and a call looks
  // nothing up. Sets config.formula.
  // Errors: kNotFound naming both keys of a missing permute, or the a2a backend if there is neither
  //   core nor fused function; kUnsupported from the core; those of ResolveActivation.
  static std::unique_ptr<MoeRunner> Create(const Registry& registry,
                                           const MoeRunnerOptions& options,
                                           const MoeRunnerConfig& config, DispatchFormat format);

  // The result lives in context.arena.
  const CombineInput& Run(ExecContext& context, const DispatchOutput& output,
                          const MoeQuantInfo& quant_info) const;

  std::string_view name() const { return name_; }
  bool is_fused() const { return fused_ != nullptr; }
  const MoeRunnerConfig& config() const { return config_; }

 private:
  MoeRunner() = default;

  std::string name_;
  MoeRunnerConfig config_;
  std::unique_ptr<MoeRunnerCore> core_;
  const FusedEntry* fused_ = nullptr;
  const PrePermuteEntry* pre_ = nullptr;
  const PostPermuteEntry* post_ = nullptr;
};

}  // namespace switchyard::moe
