#include "switchyard/moe/registry/moe_runner.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "switchyard/moe/registry/activation.h"

namespace switchyard::moe {
namespace {

// Nothing is weighted or summed twice, or not at all: what the runner did is what the dispatch
// asked for.
void CheckPromises(const DispatchOutput& output, const CombineInput& answer,
                   const std::string& runner, size_t layer_id) {
  if (answer.format == output.format && answer.promises == output.promises) return;
  throw Error(
      ErrorCode::kInternal,
      fmt::format("layer {}: a dispatch of format {} ({}) was answered by runner {} with "
                  "format {} ({})",
                  layer_id, DispatchFormatName(output.format), DescribePromises(output.promises),
                  runner, DispatchFormatName(answer.format), DescribePromises(answer.promises)));
}

}  // namespace

std::unique_ptr<MoeRunner> MoeRunner::Create(const Registry& registry,
                                             const MoeRunnerOptions& options,
                                             const MoeRunnerConfig& config, DispatchFormat format) {
  std::unique_ptr<MoeRunner> runner(new MoeRunner());
  runner->name_ = options.runner;
  runner->config_ = config;
  runner->config_.formula = ResolveActivation(registry, config);
  runner->config_.dispatch_format = format;
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
  const CombineInput* answer;
  if (fused_ != nullptr) {
    answer = &fused_->run(context, output, quant_info, config_);
  } else {
    RunningState state;
    const RunnerInput& input = pre_->run(context, output, quant_info, config_, state);
    const RunnerOutput& result = core_->Run(context, input, quant_info, state);
    answer = &post_->run(context, result, quant_info, config_, state);
  }
  CheckPromises(output, *answer, name_, config_.layer_id);
  return *answer;
}

}  // namespace switchyard::moe
