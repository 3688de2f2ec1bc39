#include "moe/runners/ascend/core.h"

#include <fmt/format.h>

#include "moe/runners/builtin.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

[[noreturn]] void Refuse(const MoeRunnerConfig& config, std::string_view what) {
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("layer {}: runner ascend: {}; take --moe-runner aiter", config.layer_id, what));
}

DispatchFormat FormatOf(const MoeRunnerConfig& config) {
  return config.dispatch_format.value_or(DispatchFormat::kAscendTp);
}

}  // namespace

AscendRunnerCore::AscendRunnerCore(const MoeRunnerConfig& config, ascend::GatherColumns gather)
    : config_(config), gather_(std::move(gather)) {
  if (config.apply_router_weight_on_input)
    Refuse(config, "apply_router_weight_on_input: its rows are not weighted before gemm1");
  if (config.no_combine) Refuse(config, "no_combine: the dispatcher's combine sums the rows");
  if (config.routed_scaling_factor != 1.0)
    Refuse(config, "routed_scaling_factor must be in the weights: the sum is not finished here");
  if (config.w13_kernel && config.w2_kernel)
    SelectAscendActivation(config, *config.w13_kernel, *config.w2_kernel, FormatOf(config));
}

const RunnerOutput& AscendRunnerCore::Run(ExecContext& context, const RunnerInput& base,
                                          const MoeQuantInfo& quant_info, RunningState&) const {
  const auto& input = static_cast<const AscendRunnerInput&>(base);
  if (quant_info.hidden_pad != 0 || quant_info.intermediate_pad != 0)
    Refuse(config_, "weights with padded columns");
  const AscendQuantInfo info = MakeAscendQuantInfo(quant_info);
  const AscendActivation activation = SelectAscendActivation(
      config_, {info.w1.format, info.a13}, {info.w2.format, info.a2}, FormatOf(config_));
  ExpertsForwardArgs args;
  args.hidden_states = input.hidden_states;
  args.group_list = {input.expert_tokens, input.group_list_type};
  args.quant_info = &info;
  args.activation = activation.fused_gemm1 ? nullptr : &activation.object();
  args.activation_dtype = config_.activation_dtype;
  args.layer_id = config_.layer_id;
  args.gather = gather_;
  auto* output = context.arena.New<AscendRunnerOutput>(input.promises);
  output->hidden_states = ExpertsForward(context, args);
  return *output;
}

extern constinit const RunnerEntry ascend{
    "ascend", "five components: grouped matmul, activation, grouped matmul over rows by expert",
    [](const MoeRunnerConfig& config) -> std::unique_ptr<MoeRunnerCore> {
      return std::make_unique<AscendRunnerCore>(config);
    }};

}  // namespace switchyard::moe::runners
