#include "model/convert/gguf_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "model/convert/plan.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// expert_gating_func of the format.
constexpr uint32_t kSoftmax = 1, kSigmoid = 2;

constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kArchitectures = {{
    {"olmoe", "olmoe"},
    {"qwen3_moe", "qwen3moe"},
    {"mixtral", "llama"},
    {"deepseek_v2", "deepseek2"},
    {"deepseek_v3", "deepseek2"},
    {"gpt_oss", "gpt-oss"},
}};

class Keys {
 public:
  Keys(std::string_view architecture, GgufWriter& writer)
      : prefix_(fmt::format("{}.", architecture)), writer_(writer) {}

  void Count(std::string_view name, size_t value) {
    writer_.SetU32(prefix_ + std::string(name), static_cast<uint32_t>(value));
  }
  void Number(std::string_view name, double value) {
    writer_.SetF32(prefix_ + std::string(name), static_cast<float>(value));
  }
  void Flag(std::string_view name, bool value) {
    writer_.SetFlag(prefix_ + std::string(name), value);
  }
  void Text(std::string_view name, std::string_view value) {
    writer_.SetText(prefix_ + std::string(name), value);
  }
  void Counts(std::string_view name, const std::vector<int32_t>& values) {
    writer_.SetI32s(prefix_ + std::string(name), values);
  }

 private:
  std::string prefix_;
  GgufWriter& writer_;
};

void SetCommon(const ModelConfig& config, Keys& keys) {
  keys.Count("block_count", config.layers.size());
  keys.Count("context_length", config.max_positions);
  keys.Count("embedding_length", config.hidden_size);
  keys.Count("vocab_size", config.vocab_size);
  keys.Count("attention.head_count", config.num_heads);
  keys.Number("attention.layer_norm_rms_epsilon", config.norm_eps);
  keys.Count("expert_count", config.num_experts);
  keys.Count("expert_used_count", config.top_k);
}

void SetRope(const ModelConfig& config, Keys& keys) {
  const RopeConfig& rope = config.rope;
  keys.Number("rope.freq_base", rope.theta);
  keys.Count("rope.dimension_count", rope.rotary_dim);
  if (rope.kind == RopeConfig::Kind::kLinear) {
    keys.Text("rope.scaling.type", "linear");
    keys.Number("rope.scaling.factor", rope.factor);
  }
  if (rope.kind != RopeConfig::Kind::kYarn) return;
  keys.Text("rope.scaling.type", "yarn");
  keys.Number("rope.scaling.factor", rope.factor);
  keys.Count("rope.scaling.original_context_length", rope.original_max_positions);
  keys.Number("rope.scaling.yarn_beta_fast", rope.beta_fast);
  keys.Number("rope.scaling.yarn_beta_slow", rope.beta_slow);
  if (config.latent && rope.mscale_all_dim != 0) {
    keys.Number("rope.scaling.yarn_log_multiplier", 0.1 * rope.mscale_all_dim);
    return;
  }
  const double inferred = rope.factor <= 1.0 ? 1.0 : 0.1 * std::log(rope.factor) + 1.0;
  if (static_cast<float>(rope.attention_factor) != static_cast<float>(inferred))
    keys.Number("rope.scaling.yarn_attn_factor", rope.attention_factor);
}

void SetHeads(const ModelConfig& config, Keys& keys) {
  keys.Count("attention.head_count_kv", config.num_kv_heads);
  keys.Count("attention.key_length", config.head_dim);
  keys.Count("attention.value_length", config.head_dim);
}

// Where the family's rule is not what the model does.
void SetRenormalize(const ModelConfig& config, bool usual, Keys& keys) {
  if (config.renormalize != usual) keys.Flag("expert_weights_norm", config.renormalize);
}

void SetWindows(const ModelConfig& config, Keys& keys) {
  size_t window = 0;
  bool alternates = true;
  std::vector<int32_t> slides;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const size_t found = config.layers[i].window;
    if (found != 0) window = found;
    slides.push_back(found != 0 ? 1 : 0);
    alternates = alternates && (found != 0) == (i % 2 == 0);
  }
  if (window == 0) return;
  keys.Count("attention.sliding_window", window);
  if (!alternates) keys.Counts("attention.sliding_window_pattern", slides);
}

void SetDeepseek(const ModelConfig& config, Keys& keys) {
  const LatentAttention& latent = *config.latent;
  const size_t row = latent.kv_rank + config.rope.rotary_dim;
  keys.Count("attention.head_count_kv", 1);
  keys.Count("attention.key_length", row);
  keys.Count("attention.value_length", latent.kv_rank);
  keys.Count("attention.key_length_mla", config.head_dim);
  keys.Count("attention.value_length_mla", latent.value_dim);
  if (latent.q_rank != 0) keys.Count("attention.q_lora_rank", latent.q_rank);
  keys.Count("attention.kv_lora_rank", latent.kv_rank);
  size_t dense = 0;
  while (dense < config.layers.size() && !config.layers[dense].is_moe) ++dense;
  keys.Count("leading_dense_block_count", dense);
  keys.Count("feed_forward_length", config.dense_intermediate_size);
  keys.Count("expert_feed_forward_length", config.moe_intermediate_size);
  keys.Count("expert_shared_count", config.shared_intermediate_size / config.moe_intermediate_size);
  keys.Number("expert_weights_scale", config.routed_scaling_factor);
  keys.Flag("expert_weights_norm", config.renormalize);
  keys.Count("expert_gating_func",
             config.scoring_func == moe::ScoringFunc::kSigmoid ? kSigmoid : kSoftmax);
  keys.Count("expert_group_count", std::max<size_t>(1, config.num_expert_groups));
  keys.Count("expert_group_used_count", std::max<size_t>(1, config.top_k_groups));
}

void SetFamily(const ModelConfig& config, Keys& keys) {
  const std::string& name = config.architecture;
  if (config.latent) return SetDeepseek(config, keys);
  SetHeads(config, keys);
  if (name == "qwen3_moe") {
    keys.Count("feed_forward_length", config.dense_intermediate_size);
    keys.Count("expert_feed_forward_length", config.moe_intermediate_size);
    SetRenormalize(config, true, keys);
  } else if (name == "gpt_oss") {
    keys.Count("feed_forward_length", config.moe_intermediate_size);
    keys.Count("expert_feed_forward_length", config.moe_intermediate_size);
    SetWindows(config, keys);
  } else {
    keys.Count("feed_forward_length", config.moe_intermediate_size);
    SetRenormalize(config, name == "mixtral", keys);
    if (config.clip_qkv) keys.Number("attention.clamp_kqv", *config.clip_qkv);
    // One window for all layers: Mixtral.
    if (config.layers.front().window != 0)
      keys.Count("attention.sliding_window", config.layers.front().window);
  }
}

// One line for each field that changes what is computed, floats as f32.
std::vector<std::pair<std::string, std::string>> Facts(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::string>> facts;
  const auto add = [&](std::string name, const auto& value) {
    facts.emplace_back(std::move(name), fmt::format("{}", value));
  };
  const auto number = [&](std::string name, double value) {
    add(std::move(name), static_cast<float>(value));
  };
  add("architecture", config.architecture);
  add("vocab_size", config.vocab_size);
  add("hidden_size", config.hidden_size);
  add("num_hidden_layers", config.layers.size());
  add("num_attention_heads", config.num_heads);
  add("num_key_value_heads", config.num_kv_heads);
  add("head_dim", config.head_dim);
  number("the scale of scores", config.score_scale);
  number("rms_norm_eps", config.norm_eps);
  add("attention_bias", config.attention_bias);
  add("attention sinks", config.attention_sinks);
  number("clip_qkv", config.clip_qkv.value_or(0));
  add("the norm of queries and keys", static_cast<int>(config.qk_norm));
  if (config.latent) {
    add("q_lora_rank", config.latent->q_rank);
    add("kv_lora_rank", config.latent->kv_rank);
    add("qk_nope_head_dim", config.latent->nope_dim);
    add("v_head_dim", config.latent->value_dim);
  }
  const RopeConfig& rope = config.rope;
  add("the kind of rope_scaling", RopeKindName(rope.kind));
  number("rope_theta", rope.theta);
  add("the rotated part of a head", rope.rotary_dim);
  if (rope.kind != RopeConfig::Kind::kDefault) {
    number("rope_scaling.factor", rope.factor);
    number("rope_scaling.attention_factor (or mscale)", rope.attention_factor);
  }
  if (rope.kind == RopeConfig::Kind::kYarn) {
    add("rope_scaling.original_max_position_embeddings", rope.original_max_positions);
    number("rope_scaling.beta_fast", rope.beta_fast);
    number("rope_scaling.beta_slow", rope.beta_slow);
    add("rope_scaling.truncate", rope.truncate);
  }
  add("hidden_act", config.activation);
  number("swiglu_limit", config.activation_limit.value_or(0));
  add("moe_intermediate_size", config.moe_intermediate_size);
  add("the number of experts", config.num_experts);
  add("num_experts_per_tok", config.top_k);
  add("scoring_func", static_cast<int>(config.scoring_func));
  add("the routing rule", static_cast<int>(config.routing));
  add("norm_topk_prob", config.renormalize);
  add("n_group", std::max<size_t>(1, config.num_expert_groups));
  add("topk_group", std::max<size_t>(1, config.top_k_groups));
  add("the bias of the router", config.router_bias);
  add("e_score_correction_bias", config.router_correction_bias);
  number("routed_scaling_factor", config.routed_scaling_factor);
  add("the bias of experts", config.expert_bias);
  add("the size of shared experts", config.shared_intermediate_size);
  add("tie_word_embeddings", config.tie_word_embeddings);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    add(fmt::format("whether layer {} has experts", i), config.layers[i].is_moe);
    add(fmt::format("the window of layer {}", i), config.layers[i].window);
  }
  return facts;
}

}  // namespace

std::string_view GgufArchitectureOf(const ModelConfig& config) {
  for (const auto& [hub, gguf] : kArchitectures) {
    if (hub == config.architecture) return gguf;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("the architecture {} cannot be written as GGUF", config.architecture));
}

void SetGgufConfig(const ModelConfig& config, GgufWriter& writer) {
  const std::string_view architecture = GgufArchitectureOf(config);
  writer.SetText("general.architecture", architecture);
  writer.SetText("general.type", "model");
  Keys keys(architecture, writer);
  SetCommon(config, keys);
  SetRope(config, keys);
  SetFamily(config, keys);
}

void RequireSameConfig(const ModelConfig& folder, const ModelConfig& gguf) {
  const auto wanted = Facts(folder), found = Facts(gguf);
  for (size_t i = 0; i < std::min(wanted.size(), found.size()); ++i) {
    if (wanted[i] == found[i]) continue;
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("a GGUF file cannot hold this model: {} is {}, and the file would say {}",
                    wanted[i].first, wanted[i].second, found[i].second));
  }
}

}  // namespace switchyard
