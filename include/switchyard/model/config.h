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
};
// The spelling of "rope_type".
std::string_view RopeKindName(RopeConfig::Kind kind);

// Whether and how queries and keys are normalised before their rotation.
enum class QkNorm {
  kNone,
  kPerHead,  // one weight of head_dim for every head (Qwen3)
  kFull,     // one weight over all heads together (OLMoE)
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
  size_t head_dim = 0;
  size_t max_positions = 0;  // longest sequence, prompt and answer together
  double norm_eps = 1e-6;
  QkNorm qk_norm = QkNorm::kNone;
  bool attention_bias = false;     // on q, k, v and o projections
  std::optional<double> clip_qkv;  // clamps q, k and v to +-clip
  RopeConfig rope;
  std::string activation = "silu";
  size_t dense_intermediate_size = 0;  // of layers that are not MoE
  size_t moe_intermediate_size = 0;
  size_t num_experts = 0;
  size_t top_k = 0;
  moe::ScoringFunc scoring_func = moe::ScoringFunc::kSoftmax;
  bool renormalize = true;
  bool tie_word_embeddings = false;
  std::vector<LayerConfig> layers;
  std::vector<size_t> eos_ids;  // as config.json has them; the engine joins those of other files

  size_t num_moe_layers() const;
};

}  // namespace switchyard
