// A transformer's weights, bound to their tensors.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/quantization/quantization.h"
#include "model/quantization/scheme.h"
#include "model/tensor_source.h"
#include "switchyard/core/thread_pool.h"
#include "switchyard/model/config.h"
#include "switchyard/model/stored_matrix.h"
#include "switchyard/moe/registry/registry.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard {

class OnlineQuantization;

// Matrices are views of the source's bytes or of repacked ones; vectors are small and widened to
// f32.
struct AttentionWeights {
  WeightMatrix q, k, v, o;   // [heads * D, H], [kv_heads * D, H] twice, [H, heads * D]
  std::vector<float> sinks;  // [heads], or empty
  // Latent attention: q takes the row of q_a, if there is one; no k and v.
  WeightMatrix q_a, kv_a;                      // [q_rank, H], [kv_rank + rotary_dim, H]
  std::vector<float> q_a_norm, kv_a_norm;      // [q_rank], [kv_rank]
  std::vector<float> q_a_bias, kv_a_bias;      // or empty
  std::vector<WeightMatrix> key_up, value_up;  // of each head, [kv_rank, nope], [value, kv_rank]
  ActQuant kv_b_act;  // what the checkpoint does with the latent row that key_up and value_up meet
  std::vector<float> q_bias, k_bias, v_bias, o_bias;  // empty without attention_bias
  std::vector<float> q_norm, k_norm;  // [D], [heads * D], or empty, as ModelConfig::qk_norm says
};

struct DenseMlpWeights {
  WeightMatrix gate, up, down;  // [I, H], [I, H], [H, I]
};

struct LayerWeights {
  std::vector<float> input_norm, post_attention_norm;  // [H]
  AttentionWeights attention;
  DenseMlpWeights dense;  // of layers that are not MoE; of MoE layers the shared experts
  WeightMatrix router;    // [E, H], of MoE layers
  std::vector<float> router_bias, router_correction_bias;  // [E], or empty
  moe::ExpertWeights experts;
  std::string scheme_w13 = "unquant", scheme_w2 = "unquant";  // of moe/schemes
};

struct TransformerWeights {
  WeightMatrix embedding;  // [V, H]
  WeightMatrix head;       // [V, H]; the embedding itself when tied
  std::vector<float> final_norm;
  std::vector<LayerWeights> layers;
  std::vector<OwnedBytes> owned;  // what is not read where the source has it
  size_t owned_bytes = 0;
  std::vector<StoredMatrix> matrices;  // all that were bound, in the order of the model
  // Of BindOptions::verify: (module, what is wrong with it).
  std::vector<std::pair<std::string, std::string>> problems;
  std::string load_error;  // of BindOptions::verify: why there are no matrices to compute with
};

// What one rank holds of every MoE layer.
struct ExpertShare {
  // Logical expert of each slot of this rank, for each MoE layer; empty = all, in order.
  std::vector<std::vector<int32_t>> experts;
  size_t tp_part = 0;  // part of each expert that it computes (MoE-TP)
  size_t tp_parts = 1;
};

struct BindOptions {
  ExpertShare share;
  const QuantizationRules* rules = nullptr;    // null: nothing is quantised in the checkpoint
  const OnlineQuantization* online = nullptr;  // null: nothing is quantised on loading
  bool activation_quant = true;                // false: no matrix quantises what it meets
  ThreadPool* pool = nullptr;                  // that repacks; null: the calling thread
  // Formats are right, values are not, and nothing is copied: to look at a model.
  bool look_only = false;
  bool verify = false;  // with look_only: what a scheme refuses is noted and does not throw
};

// Takes every tensor of the model from `source`, in any layout of experts that checkpoints have,
// and finishes the source. Of the experts only those of the share are bound; of the others no byte
// is read, but the static scales of activations, of which the largest serves all.
// Errors: as TensorSource::Finish; those of the rules and schemes; kCorruptData if a tied model
//   brings a head of its own that differs in shape; kUnsupported naming the expert if experts of a
//   layer are stored differently; kResourceExhausted if there is no memory for copies.
TransformerWeights BindWeights(const ModelConfig& config, TensorSource& source,
                               const BindOptions& options);

}  // namespace switchyard
