// What a checkpoint says about its model, in one form for all architectures.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/moe/contract/topk.h"

namespace switchyard {

// Rotary embedding and the way it is stretched beyond the trained length.
struct RopeConfig {
  // The scaling kinds of transformers; see model/rope.h for the formulas.
  enum class Kind { kDefault, kLinear, kDynamic, kYarn, kLlama3, kLongrope };
  Kind kind = Kind::kDefault;
  double theta = 10000.0;
  size_t rotary_dim = 0;     // values of a head that are rotated, even
  size_t max_positions = 0;  // of the model
  double factor = 1.0;
  size_t original_max_positions = 0;                     // before stretching
  double attention_factor = 1.0;                         // on cosine and sine
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  bool truncate = true;                                  // yarn: round the correction range
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::vector<double> short_factors, long_factors;       // longrope, rotary_dim / 2 each
  double mscale_all_dim = 0.0;                           // yarn: see YarnScoreScale in model/rope.h
  bool interleaved = false;  // pairs are neighbours, not halves of the head
};
// The spelling of "rope_type".
std::string_view RopeKindName(RopeConfig::Kind kind);

// Whether and how queries and keys are normalised before their rotation.
enum class QkNorm {
  kNone,
  kPerHead,  // one weight of head_dim for every head (Qwen3)
  kFull,     // one weight over all heads together (OLMoE)
};

// Keys and values of a token in one latent row for all heads (multi-head latent attention): its
// first kv_rank values, times matrices of each head, are the head's key and value; the last
// rotary_dim are rotated, and part of every head's key.
// Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
struct LatentAttention {
  size_t q_rank =
      0;  // queries come from a latent row of so many values too; 0 = from the hidden row
  size_t kv_rank = 0;
  size_t nope_dim = 0;  // of a head's query and key, not rotated
  size_t value_dim = 0;
};

// What one token leaves in the KV cache of a layer.
struct KvShape {
  size_t heads = 0;
  size_t key_dim = 0;
  size_t value_dim = 0;  // 0 = values are the beginning of the keys

  size_t elements() const { return heads * (key_dim + value_dim); }
};

// One decoder layer where it can differ from its neighbours.
struct LayerConfig {
  bool is_moe = true;
  size_t window = 0;  // a query sees the last `window` keys, itself included; 0 = all
};

// A decoder-only transformer. Shapes: H hidden_size, D head_dim, V vocab_size.
struct ModelConfig {
  std::string architecture;  // "qwen3_moe"
  size_t vocab_size = 0;
  size_t hidden_size = 0;
  size_t num_heads = 0;
  size_t num_kv_heads = 0;
  size_t head_dim = 0;       // of queries and keys
  double score_scale = 1.0;  // on scores, beside 1 / sqrt(head_dim)
  std::optional<LatentAttention> latent;
  size_t max_positions = 0;  // longest sequence, prompt and answer together
  double norm_eps = 1e-6;
  QkNorm qk_norm = QkNorm::kNone;
  bool attention_bias = false;     // on q, k, v and o projections; latent: on q_a, kv_a and o
  bool attention_sinks = false;    // a learned score of every head that takes part in the softmax
  std::optional<double> clip_qkv;  // clamps q, k and v to +-clip
  RopeConfig rope;
  std::string activation = "silu";
  std::optional<float> activation_alpha, activation_limit;  // of experts with swiglu_oai
  size_t dense_intermediate_size = 0;                       // of layers that are not MoE
  size_t moe_intermediate_size = 0;
  size_t num_experts = 0;
  size_t top_k = 0;
  moe::ScoringFunc scoring_func = moe::ScoringFunc::kSoftmax;
  moe::RoutingPolicy routing = moe::RoutingPolicy::kScores;
  bool renormalize = true;
  size_t num_expert_groups = 0, top_k_groups = 0;  // choice limited to some groups; 0 = not
  bool router_bias = false;                        // added to the logits
  bool router_correction_bias = false;             // added to the scores for the choice alone
  double routed_scaling_factor = 1.0;
  bool expert_bias = false;             // of the products of experts
  bool experts_are_transposed = false;  // stored [E, in, out], gate and up columns in turn
  size_t shared_intermediate_size =
      0;                        // of an MLP that every token of a MoE layer passes; 0 = none
  size_t num_draft_layers = 0;  // behind the others, for multi-token prediction; not loaded
  bool tie_word_embeddings = false;
  std::vector<LayerConfig> layers;
  std::vector<size_t> eos_ids;  // as config.json has them; the engine joins those of other files

  size_t num_moe_layers() const;
  KvShape kv_shape() const;
};

}  // namespace switchyard
