#include "model/architectures/deepseek.h"

#include <fmt/format.h>

#include "model/rope.h"

namespace switchyard {
namespace {

LatentAttention ParseLatent(ConfigReader& config) {
  LatentAttention latent;
  latent.q_rank = config.Count("q_lora_rank", 0, kMaxSize, 0);
  latent.kv_rank = config.Count("kv_lora_rank", 1, kMaxSize);
  latent.nope_dim = config.Count("qk_nope_head_dim", 1, 65536);
  latent.value_dim = config.Count("v_head_dim", 1, 65536);
  return latent;
}

void ParseLayers(ConfigReader& config, ModelConfig& model) {
  const size_t first = config.Count("first_k_dense_replace", 0, kMaxSize, 0);
  const size_t step = config.Count("moe_layer_freq", 1, kMaxSize, 1);
  for (size_t i = 0; i < model.layers.size(); ++i)
    model.layers[i].is_moe = model.num_experts > 0 && i >= first && i % step == 0;
}

}  // namespace

void RequireGroups(ConfigReader& config, const ModelConfig& model) {
  const size_t groups = model.num_expert_groups;
  if (groups <= 1 || model.num_experts == 0) return;
  if (model.num_experts % groups != 0)
    config.Refuse("n_group", fmt::format("{} experts cannot be divided", model.num_experts));
  if (model.top_k_groups > groups) config.Refuse("topk_group", "there are fewer groups");
  if (model.top_k_groups * (model.num_experts / groups) < model.top_k)
    config.Refuse("topk_group", "its groups have fewer experts than num_experts_per_tok");
  if (model.router_correction_bias && model.num_experts / groups < 2)
    config.Refuse("n_group", "a group needs two experts, whose scores are added");
}

ModelConfig ParseDeepseek(ConfigReader& config) {
  const LatentAttention latent = ParseLatent(config);
  const size_t rotary_dim = config.Count("qk_rope_head_dim", 2, 65536);
  if (rotary_dim % 2 != 0) config.Refuse("qk_rope_head_dim", "it must be even to be rotated");
  ModelConfig model = ParseCommonConfig(config, 10000.0, latent.nope_dim + rotary_dim, rotary_dim);
  model.latent = latent;
  // One row serves all heads, whatever num_key_value_heads says.
  if (model.num_heads > kMaxHeadGroup) {
    config.Refuse("num_attention_heads",
                  fmt::format("at most {} heads may share a latent row", kMaxHeadGroup));
  }
  model.num_kv_heads = model.num_heads;
  model.rope.interleaved = config.Flag("rope_interleave", true);
  model.score_scale = YarnScoreScale(model.rope);
  model.attention_bias = config.Flag("attention_bias", false);
  model.num_experts = config.Has("num_local_experts") && !config.Has("n_routed_experts")
                          ? config.Count("num_local_experts", 1, kMaxExperts)
                          : config.Count("n_routed_experts", 0, kMaxExperts, 0);
  if (model.num_experts != 0)
    model.top_k = config.Count("num_experts_per_tok", 1, model.num_experts);
  model.moe_intermediate_size = config.Count("moe_intermediate_size", 1, kMaxSize);
  model.dense_intermediate_size = config.Count("intermediate_size", 1, kMaxSize);
  model.shared_intermediate_size =
      config.Count("n_shared_experts", 0, 4096, 0) * model.moe_intermediate_size;
  model.num_draft_layers = config.Count("num_nextn_predict_layers", 0, 64, 0);
  ParseLayers(config, model);
  // Of training and of the system that trained it.
  config.Ignore({"aux_loss_alpha", "seq_aux", "ep_size", "mlp_bias", "num_local_experts",
                 "rope_parameters_per_layer", "qk_head_dim", "num_experts_per_tok"});
  return model;
}

}  // namespace switchyard
