#include "model/convert/hub_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "model/architectures/architecture.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

using nlohmann::ordered_json;

ordered_json RopeScaling(const RopeConfig& rope) {
  ordered_json scaling;
  scaling["type"] = RopeKindName(rope.kind);
  scaling["factor"] = rope.factor;
  if (rope.kind == RopeConfig::Kind::kLinear) return scaling;
  if (rope.kind != RopeConfig::Kind::kYarn) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("rope scaling {} of the file cannot be said in a config.json",
                            RopeKindName(rope.kind)));
  }
  scaling["original_max_position_embeddings"] = rope.original_max_positions;
  scaling["beta_fast"] = rope.beta_fast;
  scaling["beta_slow"] = rope.beta_slow;
  if (!rope.truncate) scaling["truncate"] = false;
  if (rope.mscale_all_dim != 0) {
    scaling["mscale"] = rope.mscale_all_dim;
    scaling["mscale_all_dim"] = rope.mscale_all_dim;
  } else {
    scaling["attention_factor"] = rope.attention_factor;
  }
  return scaling;
}

void SetDeepseek(const ModelConfig& config, ordered_json& json) {
  const LatentAttention& latent = *config.latent;
  json["q_lora_rank"] = latent.q_rank == 0 ? ordered_json(nullptr) : ordered_json(latent.q_rank);
  json["kv_lora_rank"] = latent.kv_rank;
  json["qk_nope_head_dim"] = latent.nope_dim;
  json["qk_rope_head_dim"] = config.rope.rotary_dim;
  json["v_head_dim"] = latent.value_dim;
  json["intermediate_size"] = config.dense_intermediate_size;
  json["moe_intermediate_size"] = config.moe_intermediate_size;
  json["n_shared_experts"] = config.shared_intermediate_size / config.moe_intermediate_size;
  json["n_routed_experts"] = config.num_experts;
  size_t dense = 0;
  while (dense < config.layers.size() && !config.layers[dense].is_moe) ++dense;
  json["first_k_dense_replace"] = dense;
  json["moe_layer_freq"] = 1;
  json["norm_topk_prob"] = config.renormalize;
  json["routed_scaling_factor"] = config.routed_scaling_factor;
  const bool is_v3 = config.architecture == "deepseek_v3";
  json["scoring_func"] = is_v3 ? "sigmoid" : "softmax";
  json["topk_method"] = is_v3                          ? "noaux_tc"
                        : config.num_expert_groups > 1 ? "group_limited_greedy"
                                                       : "greedy";
  json["n_group"] = std::max<size_t>(1, config.num_expert_groups);
  json["topk_group"] = std::max<size_t>(1, config.top_k_groups);
}

void SetFamily(const ModelConfig& config, ordered_json& json) {
  if (config.latent) return SetDeepseek(config, json);
  json["head_dim"] = config.head_dim;
  const std::string& name = config.architecture;
  if (name == "qwen3_moe") {
    json["intermediate_size"] = config.dense_intermediate_size;
    json["moe_intermediate_size"] = config.moe_intermediate_size;
    json["num_experts"] = config.num_experts;
    json["norm_topk_prob"] = config.renormalize;
    json["decoder_sparse_step"] = 1;
    json["mlp_only_layers"] = ordered_json::array();
    return;
  }
  json["intermediate_size"] = config.moe_intermediate_size;
  if (name == "olmoe") {
    json["num_experts"] = config.num_experts;
    json["norm_topk_prob"] = config.renormalize;
    json["clip_qkv"] = config.clip_qkv ? ordered_json(*config.clip_qkv) : ordered_json(nullptr);
    return;
  }
  json["num_local_experts"] = config.num_experts;
  const size_t window = config.layers.front().window;
  if (name == "mixtral") {
    json["sliding_window"] = window == 0 ? ordered_json(nullptr) : ordered_json(window);
    return;
  }
  ordered_json types = ordered_json::array();
  size_t widest = 0;
  for (const LayerConfig& layer : config.layers) {
    types.push_back(layer.window != 0 ? "sliding_attention" : "full_attention");
    widest = std::max(widest, layer.window);
  }
  json["layer_types"] = types;
  json["sliding_window"] = widest;
  json["swiglu_limit"] = config.activation_limit.value_or(7.0f);
}

const ArchitectureEntry& EntryOf(const ModelConfig& config) {
  for (const ArchitectureEntry* entry : AllArchitectures()) {
    if (entry->name == config.architecture) return *entry;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("the architecture {} has no config.json", config.architecture));
}

}  // namespace

std::string HubConfigOf(const ModelConfig& config) {
  ordered_json json;
  json["architectures"] = {std::string(EntryOf(config).class_name)};
  json["model_type"] = config.architecture;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  json["num_hidden_layers"] = config.layers.size();
  json["num_attention_heads"] = config.num_heads;
  json["num_key_value_heads"] = config.num_kv_heads;
  json["num_experts_per_tok"] = config.top_k;
  json["hidden_act"] = "silu";
  json["max_position_embeddings"] = config.max_positions;
  json["rms_norm_eps"] = config.norm_eps;
  json["rope_theta"] = config.rope.theta;
  json["rope_scaling"] = config.rope.kind == RopeConfig::Kind::kDefault ? ordered_json(nullptr)
                                                                        : RopeScaling(config.rope);
  // Mixtral knows no such field.
  if (config.architecture != "mixtral") json["attention_bias"] = config.attention_bias;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  if (!config.eos_ids.empty()) json["eos_token_id"] = config.eos_ids;
  json["torch_dtype"] = "bfloat16";
  SetFamily(config, json);
  return json.dump();
}

}  // namespace switchyard
