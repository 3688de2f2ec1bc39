// OLMoE: one norm over all heads of q and one over all of k, optional clipping of q, k and v.
#include "model/architectures/architecture.h"

namespace switchyard {
namespace {

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseCommonConfig(config, 10000.0);
  model.qk_norm = QkNorm::kFull;
  model.attention_bias = config.Flag("attention_bias", false);
  model.clip_qkv = config.OptionalNumber("clip_qkv", 0.0, 1e30);
  model.num_experts = config.Has("num_local_experts") && !config.Has("num_experts")
                          ? config.Count("num_local_experts", 1, kMaxExperts)
                          : config.Count("num_experts", 1, kMaxExperts);
  model.top_k = config.Count("num_experts_per_tok", 1, model.num_experts);
  model.moe_intermediate_size = config.Count("intermediate_size", 1, kMaxSize);
  model.renormalize = config.Flag("norm_topk_prob", false);
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry olmoe_architecture{"olmoe", "OlmoeForCausalLM",
                                                            "OLMoE-1B-7B", &Parse};

}  // namespace switchyard
