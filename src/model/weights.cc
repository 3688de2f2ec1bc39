#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/convert/convert.h"
#include "model/expert_set.h"
#include "model/matrix_binder.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/memory.h"

namespace switchyard {
namespace {

// Names of one expert's tensors, as published checkpoints have them.
struct ExpertNames {
  std::string_view gate, up, down;
};
constexpr std::array kExpertNames = {ExpertNames{"gate_proj", "up_proj", "down_proj"},
                                     ExpertNames{"w1", "w3", "w2"}};
// Names of the MoE block inside a decoder layer.
constexpr std::array<std::string_view, 2> kMoeBlockNames = {"mlp", "block_sparse_moe"};

// to[c, r] = from[r, c * step], square by square, so that both sides stay in the cache.
// Shapes: from [rows, …] with rows `stride` elements apart, to [cols, rows].
template <typename T>
void TransposeElements(const T* from, size_t stride, size_t rows, size_t cols, size_t step, T* to) {
  constexpr size_t kSide = 32;
  for (size_t c0 = 0; c0 < cols; c0 += kSide) {
    for (size_t r0 = 0; r0 < rows; r0 += kSide) {
      for (size_t c = c0; c < std::min(cols, c0 + kSide); ++c) {
        for (size_t r = r0; r < std::min(rows, r0 + kSide); ++r)
          to[c * rows + r] = from[r * stride + c * step];
      }
    }
  }
}

// Of the types of un-quantised weights.
void Transpose(DType dtype, const std::byte* from, size_t stride, size_t rows, size_t cols,
               size_t step, std::byte* to) {
  if (dtype == DType::kF32) {
    TransposeElements(reinterpret_cast<const uint32_t*>(from), stride, rows, cols, step,
                      reinterpret_cast<uint32_t*>(to));
  } else {
    SY_CHECK_EQ(DTypeBytes(dtype), 2u);
    TransposeElements(reinterpret_cast<const uint16_t*>(from), stride, rows, cols, step,
                      reinterpret_cast<uint16_t*>(to));
  }
}

// Memory that the weights keep.
using Owned = std::vector<OwnedBytes>;

std::byte* NewBytes(size_t bytes, Owned& owned) {
  const std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  owned.push_back({memory, memory.get(), bytes});
  return memory.get();
}

const float* WidenedCopy(const TensorView& view, Owned& owned) {
  const size_t count = view.NumElements();
  auto* copy = reinterpret_cast<float*>(NewBytes(count * sizeof(float), owned));
  kernels::ConvertToF32(view.data, view.dtype, count, copy);
  return copy;
}

// Expert e of a bank [E, …] of two more axes.
TensorView Part(const TensorView& bank, size_t e) {
  const size_t rows = bank.shape[1], cols = bank.shape[2];
  const size_t bytes = rows * BytesOf(bank.dtype, cols);
  return {bank.data == nullptr ? nullptr : bank.data + e * bytes, bank.dtype, Shape{rows, cols}};
}

class Binder {
 public:
  Binder(const ModelConfig& config, TensorSource& source, const BindOptions& options)
      : config_(config), source_(source), options_(options), matrices_(source, options) {}

  TransformerWeights Bind() {
    TransformerWeights weights;
    weights.layers.resize(config_.layers.size());
    Other("model.embed_tokens", config_.vocab_size, config_.hidden_size, weights.embedding);
    BindHead(weights);
    Vector("model.norm.weight", config_.hidden_size, weights.final_norm);
    for (size_t i = 0; i < config_.layers.size(); ++i) BindLayer(i, weights.layers[i]);
    for (size_t i = 0; i < config_.num_draft_layers; ++i)
      source_.IgnoreAll(fmt::format("model.layers.{}.", config_.layers.size() + i),
                        "multi-token prediction is not used");
    if (options_.rules != nullptr) source_.IgnoreSuffixes(options_.rules->ignored_suffixes());
    source_.Finish();
    for (const auto& [view, values] : vectors_) {
      if (!source_.has_data()) break;
      values->resize(view.NumElements());
      kernels::ConvertToF32(view.data, view.dtype, values->size(), values->data());
    }
    if (source_.has_data()) RequireMemory();
    if (options_.verify) weights.problems = matrices_.Verify();
    if (source_.has_data()) LoadOrNote(weights);
    if (config_.tie_word_embeddings) weights.head = weights.embedding;
    weights.owned_bytes = copied_bytes();
    weights.matrices = matrices_.TakeNotes();
    if (options_.rules != nullptr) RequireQuantized(weights.matrices);
    return weights;
  }

 private:
  // A config that announces codes where the whole file has floats belongs to another file.
  static void RequireQuantized(const std::vector<StoredMatrix>& matrices) {
    const bool any = std::ranges::any_of(matrices, &StoredMatrix::is_quantized);
    const auto unexpected = std::ranges::find(matrices, kPlainFloats, &StoredMatrix::note);
    if (any || unexpected == matrices.end()) return;
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("quantization_config announces quantised weights, but all matrices are "
                    "plain floats, {} too; remove the field (and use --quantize to quantise "
                    "them on loading)",
                    unexpected->module));
  }

  size_t copied_bytes() const { return copied_bytes_ + matrices_.copied_bytes(); }

  void LoadOrNote(TransformerWeights& weights) {
    try {
      Load(weights);
    } catch (const Error& error) {
      if (!options_.verify) throw;
      weights.load_error = error.what();
    }
  }

  // What needs the bytes of the tensors.
  void Load(TransformerWeights& weights) {
    matrices_.Load();
    for (const auto& copy : copies_) copy(weights.owned);
    for (const ExpertLayer& layer : experts_) Assemble(layer);
    if (!options_.activation_quant) {
      for (LayerWeights& layer : weights.layers) DropActivationQuant(layer);
    }
    for (OwnedBytes& memory : matrices_.TakeOwned()) weights.owned.push_back(std::move(memory));
  }

  // Those of experts are the MoE layer's to drop.
  static void DropActivationQuant(LayerWeights& layer) {
    AttentionWeights& attention = layer.attention;
    for (WeightMatrix* matrix :
         {&attention.q, &attention.k, &attention.v, &attention.o, &attention.q_a, &attention.kv_a,
          &layer.dense.gate, &layer.dense.up, &layer.dense.down, &layer.router})
      matrix->act = {};
    attention.kv_b_act = {};
  }

  void Linear(const std::string& module, size_t rows, size_t cols, WeightMatrix& out) {
    matrices_.Bind(module, rows, cols, MatrixBinder::Use::kLinear, out);
  }
  void Other(const std::string& module, size_t rows, size_t cols, WeightMatrix& out) {
    matrices_.Bind(module, rows, cols, MatrixBinder::Use::kOther, out);
  }

  // `values` is filled when all tensors are known to be there; its address must stay.
  void Vector(const std::string& name, size_t size, std::vector<float>& values) {
    vectors_.emplace_back(source_.Take(name, {size}, kFloatDTypes), &values);
    source_.Use(name, vectors_.back().first);
    source_.Tell(name, TensorRole::kVector);
  }

  void BindHead(TransformerWeights& weights) {
    const std::string name = "lm_head.weight";
    if (!config_.tie_word_embeddings) {
      Other("lm_head", config_.vocab_size, config_.hidden_size, weights.head);
      return;
    }
    // The config decides, as in transformers: a tied model uses its embedding, whatever else lies
    // in the file.
    if (source_.Has(name)) {
      source_.Ignore(name, "tie_word_embeddings is true");
      Log(LogLevel::kWarning,
          "the checkpoint has lm_head.weight although tie_word_embeddings is true; the embedding "
          "is used");
    }
  }

  void BindLayer(size_t index, LayerWeights& layer) {
    const std::string prefix = fmt::format("model.layers.{}.", index);
    Vector(prefix + "input_layernorm.weight", config_.hidden_size, layer.input_norm);
    Vector(prefix + "post_attention_layernorm.weight", config_.hidden_size,
           layer.post_attention_norm);
    BindAttention(prefix + "self_attn.", layer.attention);
    source_.Ignore(prefix + "self_attn.rotary_emb.inv_freq", "computed from the config");
    if (config_.layers[index].is_moe) {
      BindMoe(prefix, layer);
    } else {
      const size_t inner = config_.dense_intermediate_size;
      BindDense(prefix + "mlp.", inner, layer.dense);
    }
  }

  void BindDense(const std::string& prefix, size_t inner, DenseMlpWeights& dense) {
    Linear(prefix + "gate_proj", inner, config_.hidden_size, dense.gate);
    Linear(prefix + "up_proj", inner, config_.hidden_size, dense.up);
    Linear(prefix + "down_proj", config_.hidden_size, inner, dense.down);
  }

  void BindLatentAttention(const std::string& prefix, AttentionWeights& attention) {
    const LatentAttention& latent = *config_.latent;
    const size_t q_size = config_.num_heads * config_.head_dim;
    const size_t kv_size = latent.kv_rank + config_.rope.rotary_dim;
    if (latent.q_rank == 0) {
      Linear(prefix + "q_proj", q_size, config_.hidden_size, attention.q);
    } else {
      Linear(prefix + "q_a_proj", latent.q_rank, config_.hidden_size, attention.q_a);
      Vector(prefix + "q_a_layernorm.weight", latent.q_rank, attention.q_a_norm);
      Linear(prefix + "q_b_proj", q_size, latent.q_rank, attention.q);
    }
    Linear(prefix + "kv_a_proj_with_mqa", kv_size, config_.hidden_size, attention.kv_a);
    Vector(prefix + "kv_a_layernorm.weight", latent.kv_rank, attention.kv_a_norm);
    BindKeysAndValues(prefix, attention);
    Linear(prefix + "o_proj", config_.hidden_size, config_.num_heads * latent.value_dim,
           attention.o);
    if (!config_.attention_bias) return;
    if (latent.q_rank != 0) Vector(prefix + "q_a_proj.bias", latent.q_rank, attention.q_a_bias);
    Vector(prefix + "kv_a_proj_with_mqa.bias", kv_size, attention.kv_a_bias);
    Vector(prefix + "o_proj.bias", config_.hidden_size, attention.o_bias);
  }

  // kv_b holds [Wk ; Wv] of each head. Wk is used transposed: copied. Wv is used where it lies if
  // it is plain, else decoded to f32: no product reads blocks of codes from their middle.
  void BindKeysAndValues(const std::string& prefix, AttentionWeights& attention) {
    if (source_.Has(prefix + "k_b_proj.weight")) return BindSplitKeysAndValues(prefix, attention);
    const LatentAttention& latent = *config_.latent;
    const size_t heads = config_.num_heads;
    const std::string module = prefix + "kv_b_proj";
    kv_b_.emplace_back();
    WeightMatrix& kv_b = kv_b_.back();
    matrices_.Bind(module, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank,
                   MatrixBinder::Use::kOther, kv_b);
    attention.key_up.resize(heads);
    attention.value_up.resize(heads);
    const size_t elements = heads * latent.kv_rank;
    copied_bytes_ += kv_b.format.is_quantized() || !IsFloat(kv_b.dtype())
                         ? elements * (latent.nope_dim + latent.value_dim) * sizeof(float)
                         : elements * latent.nope_dim * DTypeBytes(kv_b.dtype());
    copies_.push_back([this, &kv_b, &attention](Owned& owned) {
      attention.kv_b_act = kv_b.act;
      WeightMatrix plain = kv_b;
      if (kv_b.format.is_quantized() || !IsFloat(kv_b.dtype())) plain = Decoded(kv_b, owned);
      SplitKeysAndValues(plain, attention, owned);
    });
  }

  // GGUF files keep them apart, Wk transposed already: [heads, kv_rank, nope], [heads, value,
  // kv_rank].
  void BindSplitKeysAndValues(const std::string& prefix, AttentionWeights& attention) {
    const LatentAttention& latent = *config_.latent;
    const size_t heads = config_.num_heads;
    const auto bind = [&](const std::string& name, size_t rows, size_t cols,
                          std::vector<WeightMatrix>& out) {
      const TensorView bank = source_.Take(name, {heads, rows, cols}, source_.matrix_dtypes());
      source_.Use(name, bank);
      source_.Tell(name, TensorRole::kMatrix);
      for (size_t h = 0; h < heads; ++h)
        out.push_back(WeightMatrix::Dense(Part(bank, h).data, bank.dtype, rows, cols));
      StoredMatrix stored{
          name, std::string(DTypeName(bank.dtype)),      {}, IsGgmlBlock(bank.dtype), heads * rows,
          cols, heads * rows * BytesOf(bank.dtype, cols)};
      stored.dtype = bank.dtype;
      if (stored.is_quantized) {
        stored.scheme = "gguf";
        stored.block_rows = 1;
        stored.block_cols = DTypeBlock(bank.dtype);
      }
      matrices_.Note(std::move(stored));
    };
    bind(prefix + "k_b_proj.weight", latent.kv_rank, latent.nope_dim, attention.key_up);
    bind(prefix + "v_b_proj.weight", latent.value_dim, latent.kv_rank, attention.value_up);
  }

  WeightMatrix Decoded(const WeightMatrix& matrix, Owned& owned) const {
    auto* values =
        reinterpret_cast<float*>(NewBytes(matrix.rows * matrix.cols * sizeof(float), owned));
    for (size_t n = 0; n < matrix.rows && !options_.look_only; ++n)
      quant::DecodeMatrixRow(matrix.AsBank(), 0, n, values + n * matrix.cols);
    return WeightMatrix::Dense(reinterpret_cast<const std::byte*>(values), DType::kF32, matrix.rows,
                               matrix.cols);
  }

  void SplitKeysAndValues(const WeightMatrix& kv_b, AttentionWeights& attention,
                          Owned& owned) const {
    const LatentAttention& latent = *config_.latent;
    const size_t head_rows = latent.nope_dim + latent.value_dim;
    const size_t key_bytes = BytesOf(kv_b.dtype(), latent.kv_rank * latent.nope_dim);
    std::byte* copy = NewBytes(config_.num_heads * key_bytes, owned);
    for (size_t h = 0; h < config_.num_heads; ++h, copy += key_bytes) {
      if (!options_.look_only) {
        Transpose(kv_b.dtype(), kv_b.RowAt(h * head_rows), kv_b.stride, latent.nope_dim,
                  latent.kv_rank, 1, copy);
      }
      attention.key_up[h] =
          WeightMatrix::Dense(copy, kv_b.dtype(), latent.kv_rank, latent.nope_dim);
      attention.value_up[h] = WeightMatrix::Dense(kv_b.RowAt(h * head_rows + latent.nope_dim),
                                                  kv_b.dtype(), latent.value_dim, latent.kv_rank);
    }
  }

  // Pages of files can be dropped and read again, copies cannot.
  void RequireMemory() const {
    const size_t available = AvailableBytes();
    if (options_.look_only || available == 0 || copied_bytes() <= available) return;
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("weights that are stored transposed or packed take {} bytes as copies, "
                            "{} are available",
                            copied_bytes(), available));
  }

  void BindAttention(const std::string& prefix, AttentionWeights& attention) {
    if (config_.latent) return BindLatentAttention(prefix, attention);
    const size_t q_size = config_.num_heads * config_.head_dim;
    const size_t kv_size = config_.num_kv_heads * config_.head_dim;
    Linear(prefix + "q_proj", q_size, config_.hidden_size, attention.q);
    Linear(prefix + "k_proj", kv_size, config_.hidden_size, attention.k);
    Linear(prefix + "v_proj", kv_size, config_.hidden_size, attention.v);
    Linear(prefix + "o_proj", config_.hidden_size, q_size, attention.o);
    if (config_.attention_bias) {
      Vector(prefix + "q_proj.bias", q_size, attention.q_bias);
      Vector(prefix + "k_proj.bias", kv_size, attention.k_bias);
      Vector(prefix + "v_proj.bias", kv_size, attention.v_bias);
      Vector(prefix + "o_proj.bias", config_.hidden_size, attention.o_bias);
    }
    if (config_.attention_sinks) Vector(prefix + "sinks", config_.num_heads, attention.sinks);
    if (config_.qk_norm == QkNorm::kNone) return;
    const bool per_head = config_.qk_norm == QkNorm::kPerHead;
    Vector(prefix + "q_norm.weight", per_head ? config_.head_dim : q_size, attention.q_norm);
    Vector(prefix + "k_norm.weight", per_head ? config_.head_dim : kv_size, attention.k_norm);
  }

  void BindMoe(const std::string& layer_prefix, LayerWeights& layer) {
    std::string block = layer_prefix + std::string(kMoeBlockNames[0]) + ".";
    // The first that is there: GGUF tensors have both names.
    for (std::string_view name : kMoeBlockNames) {
      const std::string candidate = fmt::format("{}{}.", layer_prefix, name);
      if (!source_.Has(candidate + "gate.weight")) continue;
      block = candidate;
      break;
    }
    const std::string router = block + (config_.experts_are_transposed ? "router" : "gate");
    Other(router, config_.num_experts, config_.hidden_size, layer.router);
    if (config_.router_bias) Vector(router + ".bias", config_.num_experts, layer.router_bias);
    if (config_.router_correction_bias)
      Vector(router + ".e_score_correction_bias", config_.num_experts,
             layer.router_correction_bias);
    if (config_.shared_intermediate_size != 0)
      BindDense(block + "shared_experts.", config_.shared_intermediate_size, layer.dense);
    BindExperts(block + "experts.", layer);
  }

  // --- Experts, in the layouts that checkpoints have ---------------------------------------------

  struct ExpertLayer {
    LayerWeights* to;
    std::unique_ptr<ExpertSet> set;
    size_t moe_layer;  // counted alone
  };

  void BindExperts(const std::string& prefix, LayerWeights& layer) {
    const ExpertShare& share = options_.share;
    const size_t moe_layer = experts_.size();
    std::vector<bool> is_mine(config_.num_experts, share.experts.empty());
    if (!share.experts.empty()) {
      for (int32_t expert : share.experts[moe_layer])
        is_mine.at(static_cast<size_t>(expert)) = true;
    }
    experts_.push_back(
        {&layer, std::make_unique<ExpertSet>(prefix, std::move(is_mine)), moe_layer});
    ExpertSet& set = *experts_.back().set;
    // Either one: the other is then said to be missing.
    if (source_.Has(prefix + "gate_up_proj_blocks") ||
        source_.Has(prefix + "gate_up_proj_scales")) {
      BindMxfp4Experts(prefix, set);
    } else if (source_.Has(prefix + "gate_proj")) {
      BindBanks(prefix, set);
    } else if (config_.experts_are_transposed) {
      BindTransposedExperts(prefix, set);
    } else if (source_.Has(prefix + "gate_up_proj")) {
      BindStackedExperts(prefix, set);
    } else {
      BindSeparateExperts(prefix, set);
    }
    layer.scheme_w13 = set.gate.scheme;
    layer.scheme_w2 = set.down.scheme;
    if (set.up.scheme != set.gate.scheme) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}*: gate_proj is stored as {}, up_proj as {}; they must share one "
                              "scheme",
                              prefix, set.gate.scheme, set.up.scheme));
    }
  }

  // From all experts of a layer to those, or the parts of them, that this rank computes.
  void Assemble(const ExpertLayer& layer) const {
    const ExpertShare& share = options_.share;
    moe::ExpertWeights experts =
        layer.set->Assemble(config_.hidden_size, config_.moe_intermediate_size);
    if (!share.experts.empty()) experts = moe::PickExperts(experts, share.experts[layer.moe_layer]);
    layer.to->experts = moe::SplitExperts(experts, share.tp_part, share.tp_parts);
  }

  // One tensor, or one set of tensors of a scheme, for each expert.
  void BindSeparateExperts(const std::string& prefix, ExpertSet& set) {
    const ExpertNames names = NamesOfExperts(prefix);
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const auto bind = [&](size_t e, std::string_view name, size_t rows, size_t cols,
                          ExpertProduct& product) {
      const std::string module = fmt::format("{}{}.{}", prefix, e, name);
      if (set.is_mine(e)) {
        product.SetScheme(module, matrices_.Bind(module, rows, cols, MatrixBinder::Use::kLinear,
                                                 product.matrices[e]));
        return;
      }
      const MatrixBinder::Skipped skipped = matrices_.Skip(module, rows, cols);
      product.SetScheme(module, skipped.moe_scheme);
      product.act_scales.push_back(skipped.act_scale);
    };
    for (size_t e = 0; e < set.size(); ++e) {
      bind(e, names.gate, inner, hidden, set.gate);
      bind(e, names.up, inner, hidden, set.up);
      bind(e, names.down, hidden, inner, set.down);
    }
  }

  // By a tensor of expert 0, whatever its scheme calls it.
  ExpertNames NamesOfExperts(const std::string& prefix) const {
    for (const ExpertNames& names : kExpertNames) {
      for (std::string_view suffix : {"weight", "qweight", "weight_packed"}) {
        if (source_.Has(fmt::format("{}0.{}.{}", prefix, names.gate, suffix))) return names;
      }
    }
    return kExpertNames[0];
  }

  // Banks [E, 2I, H] (gate rows, then up rows) and [E, H, I], as transformers 5 holds them.
  void BindStackedExperts(const std::string& prefix, ExpertSet& set) {
    const size_t count = set.size();
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const TensorView gate_up =
        source_.Take(prefix + "gate_up_proj", {count, 2 * inner, hidden}, kFloatDTypes);
    const TensorView down =
        source_.Take(prefix + "down_proj", {count, hidden, inner}, kFloatDTypes);
    for (const char* name : {"gate_up_proj", "down_proj"})
      source_.Tell(prefix + name, TensorRole::kMatrix);
    for (size_t e = 0; e < count; ++e) {
      const TensorView both = Part(gate_up, e);
      TensorView gate{both.data, both.dtype, Shape{inner, hidden}};
      TensorView up = gate;
      if (both.data != nullptr) up.data = both.data + inner * BytesOf(both.dtype, hidden);
      BindPart(prefix + "gate_up_proj", e, gate, set, set.gate);
      BindPart(prefix + "gate_up_proj", e, up, set, set.up);
      BindPart(prefix + "down_proj", e, Part(down, e), set, set.down);
    }
  }

  // Banks of gate, up and down: GGUF. [E, I, H] twice, [E, H, I]; perhaps with biases [E, I], [E,
  // H].
  void BindBanks(const std::string& prefix, ExpertSet& set) {
    const size_t count = set.size();
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const auto bind = [&](const std::string& name, size_t rows, size_t cols,
                          ExpertProduct& product) {
      const TensorView bank = source_.Take(name, {count, rows, cols}, source_.matrix_dtypes());
      source_.Tell(name, TensorRole::kMatrix);
      for (size_t e = 0; e < count; ++e) BindPart(name, e, Part(bank, e), set, product);
      if (!config_.expert_bias) return;
      const TensorView bias = source_.Take(name + "_bias", {count, rows}, kFloatDTypes);
      source_.Use(name + "_bias", bias);
      source_.Tell(name + "_bias", TensorRole::kVector);
      copies_.push_back([bias, rows, &product](Owned& owned) {
        const float* values = WidenedCopy(bias, owned);
        for (size_t e = 0; e < product.matrices.size(); ++e)
          product.bias.push_back(values + e * rows);
      });
    };
    bind(prefix + "gate_proj", inner, hidden, set.gate);
    bind(prefix + "up_proj", inner, hidden, set.up);
    bind(prefix + "down_proj", hidden, inner, set.down);
  }

  void BindPart(const std::string& bank, size_t e, const TensorView& part, ExpertSet& set,
                ExpertProduct& product) {
    if (set.is_mine(e)) {
      source_.Use(bank, part);
      product.SetScheme(
          bank, matrices_.BindPart(fmt::format("{}.{}", bank, e), part, product.matrices[e]));
    }
  }

  // Biases [E, 2I] (gate and up in turn) and [E, H].
  void BindInterleavedBiases(const std::string& prefix, ExpertSet& set) {
    const size_t count = set.size();
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const TensorView gate_up =
        source_.Take(prefix + "gate_up_proj_bias", {count, 2 * inner}, kFloatDTypes);
    const TensorView down = source_.Take(prefix + "down_proj_bias", {count, hidden}, kFloatDTypes);
    source_.Use(prefix + "gate_up_proj_bias", gate_up);
    source_.Use(prefix + "down_proj_bias", down);
    for (const char* name : {"gate_up_proj_bias", "down_proj_bias"})
      source_.Tell(prefix + name, TensorRole::kVector);
    copies_.push_back([=, &set](Owned& owned) {
      const float* w13_bias = WidenedCopy(gate_up, owned);
      const float* w2_bias = WidenedCopy(down, owned);
      set.gate.bias_stride = set.up.bias_stride = 2;
      for (size_t e = 0; e < count; ++e) {
        set.gate.bias.push_back(w13_bias + e * 2 * inner);
        set.up.bias.push_back(w13_bias + e * 2 * inner + 1);
        set.down.bias.push_back(w2_bias + e * hidden);
      }
    });
  }

  // Banks [E, H, 2I] (gate and up in turn) and [E, I, H], inputs first: no kernel reads that, so
  // the own experts are copied the other way round.
  void BindTransposedExperts(const std::string& prefix, ExpertSet& set) {
    const size_t count = set.size();
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const TensorView gate_up =
        source_.Take(prefix + "gate_up_proj", {count, hidden, 2 * inner}, kFloatDTypes);
    const TensorView down =
        source_.Take(prefix + "down_proj", {count, inner, hidden}, kFloatDTypes);
    for (const char* name : {"gate_up_proj", "down_proj"})
      source_.Tell(prefix + name, TensorRole::kMatrix);
    BindInterleavedBiases(prefix, set);
    for (ExpertProduct* product : {&set.gate, &set.up, &set.down})
      product->SetScheme(prefix, "unquant");
    for (size_t e = 0; e < count; ++e) {
      if (!set.is_mine(e)) continue;
      copied_bytes_ += hidden * inner * (2 * DTypeBytes(gate_up.dtype) + DTypeBytes(down.dtype));
      if (gate_up.data == nullptr || down.data == nullptr) continue;
      source_.Use(prefix + "gate_up_proj", Part(gate_up, e));
      source_.Use(prefix + "down_proj", Part(down, e));
    }
    NoteBank(prefix + "gate_up_proj", gate_up, set);
    NoteBank(prefix + "down_proj", down, set);
    copies_.push_back([=, this, &set](Owned& owned) {
      for (size_t e = 0; e < count; ++e) {
        if (set.is_mine(e)) CopyTransposed(Part(gate_up, e), Part(down, e), e, set, owned);
      }
    });
  }

  void CopyTransposed(const TensorView& both, const TensorView& last, size_t e, ExpertSet& set,
                      Owned& owned) const {
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const size_t wide = DTypeBytes(both.dtype), narrow = DTypeBytes(last.dtype);
    const size_t matrix = inner * hidden;
    std::byte* copy = NewBytes(matrix * (2 * wide + narrow), owned);
    if (!options_.look_only) {
      Transpose(both.dtype, both.data, 2 * inner, hidden, inner, 2, copy);
      Transpose(both.dtype, both.data + wide, 2 * inner, hidden, inner, 2, copy + matrix * wide);
      Transpose(last.dtype, last.data, hidden, inner, hidden, 1, copy + 2 * matrix * wide);
    }
    set.gate.matrices[e] = WeightMatrix::Dense(copy, both.dtype, inner, hidden);
    set.up.matrices[e] = WeightMatrix::Dense(copy + matrix * wide, both.dtype, inner, hidden);
    set.down.matrices[e] = WeightMatrix::Dense(copy + 2 * matrix * wide, last.dtype, hidden, inner);
    if (options_.look_only) return;
    source_.Release(both);
    source_.Release(last);
  }

  void NoteBank(const std::string& name, const TensorView& bank, const ExpertSet& set) {
    for (size_t e = 0; e < set.size(); ++e) {
      if (!set.is_mine(e)) continue;
      const TensorView part = Part(bank, e);
      // Named as the matrix that is computed: [outputs, inputs].
      StoredMatrix stored{fmt::format("{}.{}", name, e),
                          std::string(DTypeName(bank.dtype)),
                          {},
                          false,
                          part.shape[1],
                          part.shape[0],
                          part.NumBytes()};
      stored.dtype = bank.dtype;
      stored.is_repacked = true;
      matrices_.Note(std::move(stored));
    }
  }

  // gpt-oss: [E, 2I, H/32, 16] bytes of two codes, gate and up rows in turn, and [E, H, I/32, 16],
  // with a power of two for each 32 inputs. Used where they lie: gate and up are every other row.
  void BindMxfp4Experts(const std::string& prefix, ExpertSet& set) {
    const size_t hidden = config_.hidden_size, inner = config_.moe_intermediate_size;
    const Mxfp4Bank gate_up = TakeMxfp4(prefix + "gate_up_proj", 2 * inner, hidden, set);
    const Mxfp4Bank down = TakeMxfp4(prefix + "down_proj", hidden, inner, set);
    BindInterleavedBiases(prefix, set);
    for (ExpertProduct* product : {&set.gate, &set.up, &set.down})
      product->SetScheme(prefix, "mxfp4");
    copies_.push_back([=, this, &set](Owned&) {
      for (size_t e = 0; e < set.size(); ++e) {
        if (!set.is_mine(e)) continue;
        set.gate.matrices[e] = Mxfp4Matrix(gate_up, e, 2 * inner, hidden, 0, 2);
        set.up.matrices[e] = Mxfp4Matrix(gate_up, e, 2 * inner, hidden, 1, 2);
        set.down.matrices[e] = Mxfp4Matrix(down, e, hidden, inner, 0, 1);
      }
    });
  }

  struct Mxfp4Bank {
    std::string name;
    TensorView blocks, scales;
  };
  static constexpr size_t kMxBlock = 32;

  Mxfp4Bank TakeMxfp4(const std::string& name, size_t rows, size_t cols, const ExpertSet& set) {
    if (cols % kMxBlock != 0) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("tensor {}_blocks: {} inputs are no multiple of the block of {}",
                              name, cols, kMxBlock));
    }
    constexpr DType kBytes[] = {DType::kU8};
    const size_t blocks = cols / kMxBlock;
    Mxfp4Bank bank{name,
                   source_.Take(name + "_blocks", {set.size(), rows, blocks, kMxBlock / 2}, kBytes),
                   source_.Take(name + "_scales", {set.size(), rows, blocks}, kBytes)};
    source_.Tell(name + "_blocks", TensorRole::kCodes);
    source_.Tell(name + "_scales", TensorRole::kScales);
    for (size_t e = 0; e < set.size(); ++e) {
      if (!set.is_mine(e)) continue;
      StoredMatrix stored{fmt::format("{}.{}", name, e),
                          "F4_E2M1, a scale per 32 inputs; activations as they are",
                          {},
                          true,
                          rows,
                          cols,
                          rows * blocks * (kMxBlock / 2 + 1)};
      stored.scheme = "mxfp4";
      stored.dtype = DType::kF4E2M1;
      stored.block_rows = 1;
      stored.block_cols = kMxBlock;
      matrices_.Note(std::move(stored));
    }
    return bank;
  }

  // Rows first, first + step, … of one expert.
  WeightMatrix Mxfp4Matrix(const Mxfp4Bank& bank, size_t e, size_t rows, size_t cols, size_t first,
                           size_t step) const {
    const size_t groups = cols / kMxBlock;
    const std::byte* scales = bank.scales.data + e * rows * groups;
    const std::byte* end = options_.look_only ? scales : scales + rows * groups;
    const std::byte* nan = std::find(scales, end, std::byte{255});
    if (nan != end) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("tensor {}_scales: scale {} of expert {} is NaN (255)", bank.name,
                              nan - scales, e));
    }
    const auto is_zero = [](std::byte code) { return code == std::byte{0}; };
    const std::byte* blocks = bank.blocks.data + e * rows * cols / 2;
    if (std::all_of(scales, scales + rows * groups, is_zero) &&
        !std::all_of(blocks, blocks + rows * cols / 2, is_zero)) {
      throw Error(
          ErrorCode::kCorruptData,
          fmt::format("tensor {}_scales: all {} scales of expert {} are 0 and the codes are "
                      "not: they were never written",
                      bank.name, rows * groups, e));
    }
    WeightMatrix matrix =
        WeightMatrix::Dense(blocks + first * cols / 2, DType::kF4E2M1, rows / step, cols);
    matrix.stride = step * cols;
    matrix.format.scale_dtype = DType::kF8E8M0;
    matrix.format.scale_rows = 1;
    matrix.format.scale_cols = kMxBlock;
    matrix.scale = scales + first * groups;
    matrix.scale_stride = step * groups;
    return matrix;
  }

  const ModelConfig& config_;
  TensorSource& source_;
  const BindOptions& options_;
  MatrixBinder matrices_;
  std::deque<ExpertLayer> experts_;
  std::deque<WeightMatrix> kv_b_;  // of each layer, until it is split
  std::vector<std::pair<TensorView, std::vector<float>*>>
      vectors_;  // checked and read when all tensors are known to be there
  // What has to be stored another way, then; each keeps its memory in the vector that it is given.
  std::vector<std::function<void(Owned&)>> copies_;
  size_t copied_bytes_ = 0;
};

}  // namespace

TransformerWeights BindWeights(const ModelConfig& config, TensorSource& source,
                               const BindOptions& options) {
  return Binder(config, source, options).Bind();
}

}  // namespace switchyard
