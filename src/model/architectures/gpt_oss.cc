// gpt-oss: attention sinks, windows on some layers, biases everywhere, softmax over the chosen
// logits, a clamped SwiGLU; experts stored transposed, gate and up in turn.
#include <fmt/format.h>

#include "model/architectures/architecture.h"

namespace switchyard {
namespace {

void ParseWindows(ConfigReader& config, ModelConfig& model) {
  const size_t window = config.Count("sliding_window", 1, kMaxSize);
  if (!config.Has("layer_types")) {
    for (size_t i = 0; i < model.layers.size(); i += 2) model.layers[i].window = window;
    return;
  }
  const std::vector<std::string> types = config.Texts("layer_types");
  if (types.size() != model.layers.size())
    config.Refuse("layer_types",
                  fmt::format("expected one for each of {} layers", model.layers.size()));
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "sliding_attention") {
      model.layers[i].window = window;
    } else if (types[i] != "full_attention") {
      config.Refuse("layer_types", "known are sliding_attention and full_attention");
    }
  }
}

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseCommonConfig(config, 150000.0);
  model.attention_bias = config.Flag("attention_bias", true);
  model.attention_sinks = true;
  model.router_bias = true;
  model.expert_bias = true;
  model.experts_are_transposed = true;
  model.routing = moe::RoutingPolicy::kTopKThenSoftmax;
  model.activation = "swiglu_oai";
  model.activation_alpha = 1.702f;
  model.activation_limit = static_cast<float>(config.Number("swiglu_limit", 1e-6, 1e6, 7.0));
  model.num_experts = config.Count("num_local_experts", 1, kMaxExperts);
  model.top_k = config.Count("num_experts_per_tok", 1, model.num_experts);
  if (config.Count("experts_per_token", 1, kMaxSize, model.top_k) != model.top_k)
    config.Refuse("experts_per_token", "it contradicts num_experts_per_tok");
  model.moe_intermediate_size = config.Count("intermediate_size", 1, kMaxSize);
  ParseWindows(config, model);
  // The length before yarn, which rope_scaling says too.
  config.Ignore({"initial_context_length"});
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry gpt_oss_architecture{"gpt_oss", "GptOssForCausalLM",
                                                              "gpt-oss-20b, gpt-oss-120b", &Parse};

}  // namespace switchyard
