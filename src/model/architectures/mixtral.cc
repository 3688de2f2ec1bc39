// Mixtral: softmax over all experts, the chosen weights always renormalised, optional sliding
// window on all layers.
#include "model/architectures/architecture.h"

namespace switchyard {
namespace {

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseCommonConfig(config, 1e6);
  model.num_experts = config.Has("num_experts") && !config.Has("num_local_experts")
                          ? config.Count("num_experts", 1, kMaxExperts)
                          : config.Count("num_local_experts", 1, kMaxExperts);
  model.top_k = config.Count("num_experts_per_tok", 1, model.num_experts);
  model.moe_intermediate_size = config.Count("intermediate_size", 1, kMaxSize);
  model.renormalize = true;
  const size_t window = config.Count("sliding_window", 1, kMaxSize, 0);
  for (LayerConfig& layer : model.layers) layer.window = window;
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry mixtral_architecture{
    "mixtral", "MixtralForCausalLM", "Mixtral-8x7B, Mixtral-8x22B", &Parse};

}  // namespace switchyard
