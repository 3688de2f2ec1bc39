#include "switchyard/moe/registry/moe_runner.h"

#include "switchyard/core/error.h"
#include "switchyard/moe/registry/activation.h"

namespace switchyard::moe {

std::unique_ptr<MoeRunner> MoeRunner::Create(const Registry& registry,
                                             const MoeRunnerOptions& options,
                                             const MoeRunnerConfig& config, DispatchFormat format) {
  std::unique_ptr<MoeRunner> runner(new MoeRunner());
  runner->name_ = options.runner;
  runner->config_ = config;
  runner->config_.formula = ResolveActivation(registry, config);
  if (!options.disable_fused) runner->fused_ = registry.FindFused(options.a2a, options.runner);
  if (runner->fused_ == nullptr) {
    runner->core_ = registry.FindRunner(options.runner).make(runner->config_);
    runner->pre_ = &registry.FindPrePermute(format, options.runner);
    runner->post_ = &registry.FindPostPermute(options.runner, format);
  }
  return runner;
}

const CombineInput& MoeRunner::Run(ExecContext& context, const DispatchOutput& output,
                                   const MoeQuantInfo& quant_info) const {
  if (fused_ != nullptr) return fused_->run(context, output, quant_info, config_);
  RunningState state;
  const RunnerInput& input = pre_->run(context, output, quant_info, config_, state);
  const RunnerOutput& result = core_->Run(context, input, quant_info, state);
  return post_->run(context, result, quant_info, config_, state);
}

}  // namespace switchyard::moe
