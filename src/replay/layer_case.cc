#include "replay/layer_case.h"

#include <fmt/format.h>

#include "replay/activation.h"
#include "replay/layer_ranks.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::replay {

LayerCase::LayerCase(const KindInput& input)
    : num_tokens_(input.file.Size("num_tokens")),
      hidden_size_(input.file.Size("hidden_size")),
      intermediate_size_(input.file.Size("intermediate_size")),
      num_experts_(input.file.Size("num_experts")) {
  const CaseFile& file = input.file;
  file.View("in.hidden", {num_tokens_, hidden_size_});
  hidden_ = file.F32("in.hidden");
  ReadRouting(input);
  moe::MoeRunnerConfig& runner = config_.runner;
  ReadActivation(file, runner);
  runner.routed_scaling_factor = file.NumberOr("routed_scaling_factor", 1.0);
  if (file.HasConfig("no_combine")) {
    runner.apply_router_weight_on_input = file.Flag("apply_router_weight_on_input");
    runner.no_combine = file.Flag("no_combine");
    runner.no_combine_keep_router_weight = file.Flag("no_combine_keep_router_weight");
  }
  config_.topk.num_experts = num_experts_;
  config_.topk.top_k = file.Size("top_k");
  const size_t w13_rows = runner.is_gated ? 2 * intermediate_size_ : intermediate_size_;
  if (file.Has("w.b13")) {
    file.View("w.b13", {num_experts_, w13_rows});
    b13_ = file.F32("w.b13");
  }
  if (file.Has("w.b2")) {
    file.View("w.b2", {num_experts_, hidden_size_});
    b2_ = file.F32("w.b2");
  }
}

void LayerCase::ReadRouting(const KindInput& input) {
  const CaseFile& file = input.file;
  if (file.HasConfig("routing")) {
    routing_ = std::make_unique<RoutingCase>(file.WithConfig(file.config().at("routing")));
    if (routing_->logits().rows != num_tokens_ || routing_->config().num_experts != num_experts_)
      file.Corrupt("\"routing\" of the config has other sizes than the layer");
    topk_ =
        SelectExperts(input.context, routing_->config(), routing_->logits(), routing_->inputs());
    return;
  }
  const size_t top_k = file.Size("top_k");
  file.View("in.topk_ids", {num_tokens_, top_k});
  file.View("in.topk_weights", {num_tokens_, top_k});
  ids_ = file.I32("in.topk_ids");
  weights_ = file.F32("in.topk_weights");
  topk_.num_tokens = num_tokens_;
  topk_.top_k = top_k;
  topk_.ids = ids_;
  topk_.weights = weights_;
}

std::vector<const float*> LayerCase::Bias(const std::vector<float>& bias, size_t n) const {
  std::vector<const float*> rows;
  for (size_t e = 0; e < num_experts_ && !bias.empty(); ++e) rows.push_back(bias.data() + e * n);
  return rows;
}

moe::ExpertWeights LayerCase::Weights(moe::ExpertBank w13, moe::ExpertBank w2) const {
  moe::ExpertWeights weights;
  weights.hidden_size = hidden_size_;
  weights.intermediate_size = intermediate_size_;
  w13.bias = Bias(b13_, w13.rows);
  w2.bias = Bias(b2_, w2.rows);
  weights.w2 = std::move(w2);
  if (config_.runner.is_gated) {
    std::tie(weights.w1, weights.w3) = SplitGateUp(w13, config_.runner.gate_up_interleaved);
  } else {
    weights.w1 = std::move(w13);
  }
  return weights;
}

std::vector<double> LayerCase::Run(const KindInput& input, const moe::MoeLayerConfig& config,
                                   moe::ExpertWeights weights, std::string& skipped) const {
  if (!GoesOverRanks(input.options))
    return RunAlone(input, config, std::move(weights), topk_, skipped);
  const std::vector<float> rows = RunOverRanks(input, {config, weights, hidden(), topk_}, skipped);
  return {rows.begin(), rows.end()};
}

std::vector<double> LayerCase::RunAlone(const KindInput& input, const moe::MoeLayerConfig& config,
                                        moe::ExpertWeights weights, const moe::TopKOutput& topk,
                                        std::string& skipped) const {
  moe::MoeLayerOptions options = LayerOptionsOf(input.options);
  options.a2a = "none";
  std::unique_ptr<moe::MoeLayer> layer;
  try {
    layer = std::make_unique<moe::MoeLayer>(input.registry, config, options, std::move(weights));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    skipped = error.message();
    return {};
  }
  const Rows out = layer->ForwardRouted(input.context, hidden(), topk);
  std::vector<double> values;
  for (size_t i = 0; i < out.rows; ++i)
    values.insert(values.end(), out.Row(i), out.Row(i) + out.cols);
  return values;
}

}  // namespace switchyard::replay
