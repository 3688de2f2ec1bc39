// Qwen3-MoE: norms on every head of q and k, softmax over all experts, some layers may be dense.
#include <algorithm>

#include "model/architectures/architecture.h"

namespace switchyard {
namespace {

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseCommonConfig(config, 10000.0);
  model.qk_norm = QkNorm::kPerHead;
  model.attention_bias = config.Flag("attention_bias", false);
  // transformers 5 may write the other name of the same count.
  model.num_experts = config.Has("num_local_experts") && !config.Has("num_experts")
                          ? config.Count("num_local_experts", 1, kMaxExperts)
                          : config.Count("num_experts", 0, kMaxExperts);
  model.top_k = config.Count("num_experts_per_tok", 1, std::max<size_t>(model.num_experts, 1));
  model.moe_intermediate_size = config.Count("moe_intermediate_size", 1, kMaxSize);
  model.dense_intermediate_size = config.Count("intermediate_size", 1, kMaxSize);
  model.renormalize = config.Flag("norm_topk_prob", false);
  const size_t sparse_step = config.Count("decoder_sparse_step", 1, kMaxSize, 1);
  const std::vector<size_t> dense_layers = config.Counts("mlp_only_layers", 0, kMaxSize, {});
  const bool use_window = config.Flag("use_sliding_window", false);
  // Every layer slides or none does; max_window_layers is written, and read by nobody (transformers
  // 5).
  const size_t window = config.Count("sliding_window", 1, kMaxSize, 0);
  config.Ignore({"max_window_layers", "layer_types"});
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const bool listed =
        std::find(dense_layers.begin(), dense_layers.end(), i) != dense_layers.end();
    model.layers[i].is_moe = !listed && model.num_experts > 0 && (i + 1) % sparse_step == 0;
    model.layers[i].window = use_window ? window : 0;
  }
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry qwen3_moe_architecture{
    "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-30B-A3B, Qwen3-235B-A22B and relatives", &Parse};

}  // namespace switchyard
