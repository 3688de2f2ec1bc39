#include "switchyard/moe/layer/moe_layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "switchyard/core/error.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

// "auto" is the scheme's first choice; anything else must be registered, and on the scheme's list.
std::string ChooseRunner(const Registry& registry, const SchemeEntry& scheme,
                         const MoeLayerOptions& options, size_t layer_id) {
  const std::vector<std::string_view> able = scheme.runners();
  if (options.runner == "auto") return std::string(able.front());
  registry.FindRunner(options.runner);
  if (std::find(able.begin(), able.end(), options.runner) == able.end()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner {} does not compute scheme {}; runners that do: {}",
                            layer_id, options.runner, scheme.name, fmt::join(able, ", ")));
  }
  return options.runner;
}

}  // namespace

MoeLayer::MoeLayer(const Registry& registry, const MoeLayerConfig& config,
                   const MoeLayerOptions& options, ExpertWeights weights)
    : config_(config), weights_(std::move(weights)), scheme_(&registry.FindScheme(config.scheme)) {
  ValidateTopK(config_.topk);
  if (weights_.w1.size() != config_.topk.num_experts || weights_.w3.size() != weights_.w1.size() ||
      weights_.w2.size() != weights_.w1.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: {} experts are routed to, weights of {} (w1), {} (w3) and "
                            "{} (w2) were given",
                            config_.layer_id, config_.topk.num_experts, weights_.w1.size(),
                            weights_.w3.size(), weights_.w2.size()));
  }
  quant_info_ = scheme_->quant_info(weights_);
  MoeRunnerConfig runner_config;
  runner_config.num_experts = config_.topk.num_experts;
  runner_config.num_local_experts = weights_.w1.size();
  runner_config.hidden_size = weights_.hidden_size;
  runner_config.intermediate_size_per_partition = weights_.intermediate_size;
  runner_config.layer_id = config_.layer_id;
  runner_config.top_k = config_.topk.top_k;
  runner_config.activation = config_.activation;
  runner_config.activation_dtype = scheme_->activation_dtype(options.act_dtype, weights_);
  const DispatcherEntry& dispatcher = registry.DispatcherForA2a(options.a2a);
  dispatcher_ = dispatcher.make(runner_config);
  const MoeRunnerOptions runner_options{ChooseRunner(registry, *scheme_, options, config_.layer_id),
                                        options.a2a, options.disable_fused};
  runner_ = MoeRunner::Create(registry, runner_options, runner_config, dispatcher.format);
}

Rows MoeLayer::Forward(ExecContext& context, ConstRows hidden, ConstRows router_logits,
                       RoutingRecord* record) {
  const TopKOutput topk = SelectExperts(context, config_.topk, router_logits, router_logits.rows);
  if (record != nullptr) record->topk = topk;
  try {
    const DispatchOutput& dispatched = dispatcher_->Dispatch(context, hidden, topk);
    return dispatcher_->Combine(context, runner_->Run(context, dispatched, quant_info_));
  } catch (...) {
    dispatcher_->Abort();
    throw;
  }
}

}  // namespace switchyard::moe
