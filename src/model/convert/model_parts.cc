#include "model/convert/model_parts.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace switchyard {
namespace {

using Kind = ModelPart::Kind;
using Product = ModelPart::Product;

bool IsMixtral(const ModelConfig& config) { return config.architecture == "mixtral"; }

class Lister {
 public:
  explicit Lister(const ModelConfig& config) : config_(config) {}

  std::vector<ModelPart> List() {
    Add(Kind::kEmbedding, "model.embed_tokens", config_.vocab_size, config_.hidden_size);
    for (layer_ = 0; layer_ < config_.layers.size(); ++layer_) Layer();
    Vector("model.norm.weight", config_.hidden_size);
    if (!config_.tie_word_embeddings)
      Add(Kind::kHead, "lm_head", config_.vocab_size, config_.hidden_size);
    return std::move(parts_);
  }

 private:
  void Add(Kind kind, std::string module, size_t rows, size_t cols) {
    ModelPart part;
    part.kind = kind;
    part.module = std::move(module);
    part.rows = rows;
    part.cols = cols;
    part.layer = layer_;
    parts_.push_back(std::move(part));
  }
  void Linear(const std::string& module, size_t rows, size_t cols) {
    Add(Kind::kLinear, module, rows, cols);
  }
  void Vector(const std::string& name, size_t size) { Add(Kind::kVector, name, 1, size); }

  void Layer() {
    const std::string prefix = fmt::format("model.layers.{}.", layer_);
    Vector(prefix + "input_layernorm.weight", config_.hidden_size);
    if (config_.latent) {
      LatentHeads(prefix + "self_attn.");
    } else {
      Heads(prefix + "self_attn.");
    }
    Vector(prefix + "post_attention_layernorm.weight", config_.hidden_size);
    if (config_.layers[layer_].is_moe) {
      Moe(prefix + (IsMixtral(config_) ? "block_sparse_moe." : "mlp."));
    } else {
      Dense(prefix + "mlp.", config_.dense_intermediate_size);
    }
  }

  void Heads(const std::string& prefix) {
    const size_t hidden = config_.hidden_size;
    const size_t q = config_.num_heads * config_.head_dim;
    const size_t kv = config_.num_kv_heads * config_.head_dim;
    Linear(prefix + "q_proj", q, hidden);
    Linear(prefix + "k_proj", kv, hidden);
    Linear(prefix + "v_proj", kv, hidden);
    Linear(prefix + "o_proj", hidden, q);
    if (config_.attention_bias) {
      Vector(prefix + "q_proj.bias", q);
      Vector(prefix + "k_proj.bias", kv);
      Vector(prefix + "v_proj.bias", kv);
      Vector(prefix + "o_proj.bias", hidden);
    }
    if (config_.attention_sinks) Vector(prefix + "sinks", config_.num_heads);
    if (config_.qk_norm == QkNorm::kNone) return;
    const bool per_head = config_.qk_norm == QkNorm::kPerHead;
    Vector(prefix + "q_norm.weight", per_head ? config_.head_dim : q);
    Vector(prefix + "k_norm.weight", per_head ? config_.head_dim : kv);
  }

  void LatentHeads(const std::string& prefix) {
    const LatentAttention& latent = *config_.latent;
    const size_t hidden = config_.hidden_size;
    const size_t q = config_.num_heads * config_.head_dim;
    const size_t kv = latent.kv_rank + config_.rope.rotary_dim;
    if (latent.q_rank == 0) {
      Linear(prefix + "q_proj", q, hidden);
    } else {
      Linear(prefix + "q_a_proj", latent.q_rank, hidden);
      Vector(prefix + "q_a_layernorm.weight", latent.q_rank);
      Linear(prefix + "q_b_proj", q, latent.q_rank);
    }
    Linear(prefix + "kv_a_proj_with_mqa", kv, hidden);
    Vector(prefix + "kv_a_layernorm.weight", latent.kv_rank);
    Add(Kind::kLatentUp, prefix + "kv_b_proj",
        config_.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank);
    Linear(prefix + "o_proj", hidden, config_.num_heads * latent.value_dim);
    if (!config_.attention_bias) return;
    if (latent.q_rank != 0) Vector(prefix + "q_a_proj.bias", latent.q_rank);
    Vector(prefix + "kv_a_proj_with_mqa.bias", kv);
    Vector(prefix + "o_proj.bias", hidden);
  }

  void Dense(const std::string& prefix, size_t inner) {
    Linear(prefix + "gate_proj", inner, config_.hidden_size);
    Linear(prefix + "up_proj", inner, config_.hidden_size);
    Linear(prefix + "down_proj", config_.hidden_size, inner);
  }

  void Moe(const std::string& prefix) {
    const std::string router = prefix + (config_.experts_are_transposed ? "router" : "gate");
    Add(Kind::kRouter, router, config_.num_experts, config_.hidden_size);
    if (config_.router_bias) Vector(router + ".bias", config_.num_experts);
    if (config_.router_correction_bias)
      Vector(router + ".e_score_correction_bias", config_.num_experts);
    if (config_.shared_intermediate_size != 0)
      Dense(prefix + "shared_experts.", config_.shared_intermediate_size);
    for (Product product : {Product::kGate, Product::kUp, Product::kDown})
      Experts(prefix + "experts.", product);
  }

  void Experts(const std::string& prefix, Product product) {
    const bool down = product == Product::kDown;
    const size_t rows = down ? config_.hidden_size : config_.moe_intermediate_size;
    const size_t cols = down ? config_.moe_intermediate_size : config_.hidden_size;
    for (size_t e = 0; e < config_.num_experts; ++e) {
      Add(Kind::kExpert, prefix, rows, cols);
      parts_.back().expert = e;
      parts_.back().product = product;
    }
    if (!config_.expert_bias) return;
    Add(Kind::kExpertBias, prefix, config_.num_experts, rows);
    parts_.back().product = product;
  }

  const ModelConfig& config_;
  size_t layer_ = 0;
  std::vector<ModelPart> parts_;
};

}  // namespace

std::vector<ModelPart> PartsOf(const ModelConfig& config) { return Lister(config).List(); }

std::string ProductName(Product product) {
  switch (product) {
    case Product::kGate: return "gate_proj";
    case Product::kUp: return "up_proj";
    case Product::kDown: return "down_proj";
  }
  return {};
}

std::string ExpertModule(const ModelConfig& config, const ModelPart& part) {
  constexpr std::string_view kMixtralNames[] = {"w1", "w3", "w2"};
  const std::string name = IsMixtral(config)
                               ? std::string(kMixtralNames[static_cast<size_t>(part.product)])
                               : ProductName(part.product);
  return fmt::format("{}{}.{}", part.module, part.expert, name);
}

}  // namespace switchyard
