#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/convert/convert.h"
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

class Binder {
 public:
  Binder(const ModelConfig& config, TensorSource& source, const ExpertShare& share)
      : config_(config), source_(source), share_(share) {}

  TransformerWeights Bind() {
    TransformerWeights weights;
    weights.layers.resize(config_.layers.size());
    weights.embedding =
        Matrix("model.embed_tokens.weight", config_.vocab_size, config_.hidden_size);
    BindHead(weights);
    Vector("model.norm.weight", config_.hidden_size, weights.final_norm);
    for (size_t i = 0; i < config_.layers.size(); ++i) BindLayer(i, weights.layers[i]);
    for (size_t i = 0; i < config_.num_draft_layers; ++i)
      source_.IgnoreAll(fmt::format("model.layers.{}.", config_.layers.size() + i),
                        "multi-token prediction is not used");
    source_.Finish();
    RequireSameTypes();
    for (const auto& [view, values] : vectors_) {
      values->resize(view.NumElements());
      kernels::ConvertToF32(view.data, view.dtype, values->size(), values->data());
    }
    weights.owned_bytes = copied_bytes_;
    RequireMemory();
    for (const auto& copy : copies_) copy(weights.owned);
    return weights;
  }

 private:
  WeightMatrix Matrix(const std::string& name, size_t rows, size_t cols) {
    const TensorView view = source_.Take(name, {rows, cols});
    source_.Use(name, view);
    return {view.data, view.dtype, rows, cols, cols};
  }

  // `values` is filled when all tensors are known to be there; its address must stay.
  void Vector(const std::string& name, size_t size, std::vector<float>& values) {
    vectors_.emplace_back(source_.Take(name, {size}), &values);
    source_.Use(name, vectors_.back().first);
  }

  void BindHead(TransformerWeights& weights) {
    const std::string name = "lm_head.weight";
    if (!config_.tie_word_embeddings) {
      weights.head = Matrix(name, config_.vocab_size, config_.hidden_size);
      return;
    }
    // The config decides, as in transformers: a tied model uses its embedding, whatever else lies
    // in the file.
    weights.head = weights.embedding;
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
    dense.gate = Matrix(prefix + "gate_proj.weight", inner, config_.hidden_size);
    dense.up = Matrix(prefix + "up_proj.weight", inner, config_.hidden_size);
    dense.down = Matrix(prefix + "down_proj.weight", config_.hidden_size, inner);
  }

  void BindLatentAttention(const std::string& prefix, AttentionWeights& attention) {
    const LatentAttention& latent = *config_.latent;
    const size_t q_size = config_.num_heads * config_.head_dim;
    const size_t kv_size = latent.kv_rank + config_.rope.rotary_dim;
    if (latent.q_rank == 0) {
      attention.q = Matrix(prefix + "q_proj.weight", q_size, config_.hidden_size);
    } else {
      attention.q_a = Matrix(prefix + "q_a_proj.weight", latent.q_rank, config_.hidden_size);
      Vector(prefix + "q_a_layernorm.weight", latent.q_rank, attention.q_a_norm);
      attention.q = Matrix(prefix + "q_b_proj.weight", q_size, latent.q_rank);
    }
    attention.kv_a = Matrix(prefix + "kv_a_proj_with_mqa.weight", kv_size, config_.hidden_size);
    Vector(prefix + "kv_a_layernorm.weight", latent.kv_rank, attention.kv_a_norm);
    const size_t head_rows = latent.nope_dim + latent.value_dim;
    const WeightMatrix kv_b =
        Matrix(prefix + "kv_b_proj.weight", config_.num_heads * head_rows, latent.kv_rank);
    SplitKeysAndValues(kv_b, attention);
    attention.o =
        Matrix(prefix + "o_proj.weight", config_.hidden_size, config_.num_heads * latent.value_dim);
    if (!config_.attention_bias) return;
    if (latent.q_rank != 0) Vector(prefix + "q_a_proj.bias", latent.q_rank, attention.q_a_bias);
    Vector(prefix + "kv_a_proj_with_mqa.bias", kv_size, attention.kv_a_bias);
    Vector(prefix + "o_proj.bias", config_.hidden_size, attention.o_bias);
  }

  // kv_b holds [Wk ; Wv] of each head. Wv is used where it lies, Wk is used transposed: copied.
  void SplitKeysAndValues(const WeightMatrix& kv_b, AttentionWeights& attention) {
    const LatentAttention latent = *config_.latent;
    const size_t head_rows = latent.nope_dim + latent.value_dim;
    for (size_t h = 0; h < config_.num_heads; ++h) {
      WeightMatrix value = kv_b;
      value.rows = latent.value_dim;
      if (kv_b.data != nullptr) value.data = kv_b.RowAt(h * head_rows + latent.nope_dim);
      attention.value_up.push_back(value);
      attention.key_up.push_back(
          {nullptr, kv_b.dtype, latent.kv_rank, latent.nope_dim, latent.nope_dim});
    }
    copied_bytes_ += BytesOf(kv_b.dtype, config_.num_heads * latent.kv_rank * latent.nope_dim);
    copies_.push_back([kv_b, head_rows, latent, &attention](auto& owned) {
      if (kv_b.data == nullptr) return;  // sizes alone are counted
      std::byte* copy = NewBytes(
          BytesOf(kv_b.dtype, attention.key_up.size() * latent.kv_rank * latent.nope_dim), owned);
      for (size_t h = 0; h < attention.key_up.size(); ++h) {
        Transpose(kv_b.dtype, kv_b.RowAt(h * head_rows), kv_b.stride, latent.nope_dim,
                  latent.kv_rank, 1, copy);
        attention.key_up[h].data = copy;
        copy += BytesOf(kv_b.dtype, latent.kv_rank * latent.nope_dim);
      }
    });
  }

  // Memory that the weights keep.
  static std::byte* NewBytes(size_t bytes, std::vector<std::shared_ptr<const void>>& owned) {
    const std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
    owned.push_back(memory);
    return memory.get();
  }

  // Pages of files can be dropped and read again, copies cannot.
  void RequireMemory() const {
    const size_t available = AvailableBytes();
    if (copied_bytes_ == 0 || available == 0 || copied_bytes_ <= available) return;
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("weights that are stored transposed take {} bytes as copies, {} are "
                            "available",
                            copied_bytes_, available));
  }

  void BindAttention(const std::string& prefix, AttentionWeights& attention) {
    if (config_.latent) return BindLatentAttention(prefix, attention);
    const size_t q_size = config_.num_heads * config_.head_dim;
    const size_t kv_size = config_.num_kv_heads * config_.head_dim;
    attention.q = Matrix(prefix + "q_proj.weight", q_size, config_.hidden_size);
    attention.k = Matrix(prefix + "k_proj.weight", kv_size, config_.hidden_size);
    attention.v = Matrix(prefix + "v_proj.weight", kv_size, config_.hidden_size);
    attention.o = Matrix(prefix + "o_proj.weight", config_.hidden_size, q_size);
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
    for (std::string_view name : kMoeBlockNames) {
      const std::string candidate = fmt::format("{}{}.", layer_prefix, name);
      if (source_.Has(candidate + "gate.weight")) block = candidate;
    }
    const std::string router = block + (config_.experts_are_transposed ? "router" : "gate");
    layer.router = Matrix(router + ".weight", config_.num_experts, config_.hidden_size);
    if (config_.router_bias) Vector(router + ".bias", config_.num_experts, layer.router_bias);
    if (config_.router_correction_bias)
      Vector(router + ".e_score_correction_bias", config_.num_experts,
             layer.router_correction_bias);
    if (config_.shared_intermediate_size != 0)
      BindDense(block + "shared_experts.", config_.shared_intermediate_size, layer.dense);
    is_mine_.assign(config_.num_experts, share_.experts.empty());
    if (!share_.experts.empty()) {
      for (int32_t expert : share_.experts[num_moe_])
        is_mine_.at(static_cast<size_t>(expert)) = true;
    }
    moe::ExpertWeights& experts = layer.experts;
    experts.hidden_size = config_.hidden_size;
    experts.intermediate_size = config_.moe_intermediate_size;
    if (config_.experts_are_transposed) {
      return BindTransposedExperts(block + "experts.", layer);
    }
    if (source_.Has(block + "experts.gate_up_proj")) {
      BindStackedExperts(block + "experts.", experts);
    } else {
      BindSeparateExperts(block + "experts.", experts);
    }
    TakeShare(experts);
  }

  // From all experts of a layer to those, or the parts of them, that this rank computes.
  void TakeShare(moe::ExpertWeights& experts) { TakeShare(experts, num_moe_++); }
  void TakeShare(moe::ExpertWeights& experts, size_t moe_layer) const {
    if (!share_.experts.empty()) experts = moe::PickExperts(experts, share_.experts[moe_layer]);
    experts = moe::SplitExperts(experts, share_.tp_part, share_.tp_parts);
  }

  // Banks [E, H, 2I] (gate and up in turn) and [E, I, H], inputs first: no kernel reads that, so
  // the own experts are copied the other way round. With biases [E, 2I] and [E, H].
  void BindTransposedExperts(const std::string& prefix, LayerWeights& layer) {
    const size_t count = config_.num_experts;
    const size_t hidden = config_.hidden_size;
    const size_t inner = config_.moe_intermediate_size;
    const TensorView gate_up = source_.Take(prefix + "gate_up_proj", {count, hidden, 2 * inner});
    const TensorView down = source_.Take(prefix + "down_proj", {count, inner, hidden});
    const TensorView gate_up_bias = source_.Take(prefix + "gate_up_proj_bias", {count, 2 * inner});
    const TensorView down_bias = source_.Take(prefix + "down_proj_bias", {count, hidden});
    source_.Use(prefix + "gate_up_proj_bias", gate_up_bias);
    source_.Use(prefix + "down_proj_bias", down_bias);
    for (size_t e = 0; e < count; ++e) {
      if (!is_mine_[e]) continue;
      copied_bytes_ += hidden * inner * (2 * DTypeBytes(gate_up.dtype) + DTypeBytes(down.dtype));
      if (gate_up.data == nullptr || down.data == nullptr) continue;
      source_.Use(prefix + "gate_up_proj", Part(gate_up, e));
      source_.Use(prefix + "down_proj", Part(down, e));
    }
    SetShape(layer.experts, gate_up.dtype, down.dtype);
    copies_.push_back([=, this, mine = is_mine_, moe_layer = num_moe_++, &layer](auto& owned) {
      if (gate_up.data == nullptr) return;  // sizes alone are counted
      moe::ExpertWeights& experts = layer.experts;
      experts.w1.bias_stride = experts.w3.bias_stride = 2;
      const float* w13_bias = WidenedCopy(gate_up_bias, owned);
      const float* w2_bias = WidenedCopy(down_bias, owned);
      for (size_t e = 0; e < count; ++e) {
        for (moe::ExpertBank* bank : {&experts.w1, &experts.w3, &experts.w2})
          bank->data.push_back(nullptr);
        experts.w1.bias.push_back(w13_bias + e * 2 * inner);
        experts.w3.bias.push_back(w13_bias + e * 2 * inner + 1);
        experts.w2.bias.push_back(w2_bias + e * hidden);
        if (!mine[e]) continue;
        const size_t wide = DTypeBytes(gate_up.dtype), narrow = DTypeBytes(down.dtype);
        const size_t matrix = inner * hidden;
        std::byte* copy = NewBytes(matrix * (2 * wide + narrow), owned);
        const std::byte* both = Part(gate_up, e).data;
        Transpose(gate_up.dtype, both, 2 * inner, hidden, inner, 2, copy);
        Transpose(gate_up.dtype, both + wide, 2 * inner, hidden, inner, 2, copy + matrix * wide);
        Transpose(down.dtype, Part(down, e).data, hidden, inner, hidden, 1,
                  copy + 2 * matrix * wide);
        experts.w1.data[e] = copy;
        experts.w3.data[e] = copy + matrix * wide;
        experts.w2.data[e] = copy + 2 * matrix * wide;
      }
      TakeShare(experts, moe_layer);
    });
  }

  // Expert e of a bank [E, …].
  static TensorView Part(const TensorView& bank, size_t e) {
    const size_t rows = bank.shape[1], cols = bank.shape[2];
    const size_t bytes = rows * cols * DTypeBytes(bank.dtype);
    return {bank.data == nullptr ? nullptr : bank.data + e * bytes, bank.dtype, Shape{rows, cols}};
  }

  static const float* WidenedCopy(const TensorView& view,
                                  std::vector<std::shared_ptr<const void>>& owned) {
    const size_t count = view.NumElements();
    auto* copy = reinterpret_cast<float*>(NewBytes(count * sizeof(float), owned));
    kernels::ConvertToF32(view.data, view.dtype, count, copy);
    return copy;
  }

  // Banks [E, 2I, H] (gate rows, then up rows) and [E, H, I], as transformers 5 holds them.
  void BindStackedExperts(const std::string& prefix, moe::ExpertWeights& experts) {
    const size_t count = config_.num_experts;
    const size_t hidden = experts.hidden_size;
    const size_t inner = experts.intermediate_size;
    const TensorView gate_up = source_.Take(prefix + "gate_up_proj", {count, 2 * inner, hidden});
    const TensorView down = source_.Take(prefix + "down_proj", {count, hidden, inner});
    SetShape(experts, gate_up.dtype, down.dtype);
    for (size_t e = 0; e < count; ++e) {
      const TensorView both = Part(gate_up, e);
      const TensorView last = Part(down, e);
      if (is_mine_[e]) {
        source_.Use(prefix + "gate_up_proj", both);
        source_.Use(prefix + "down_proj", last);
      }
      experts.w1.data.push_back(both.data);
      experts.w3.data.push_back(both.data + both.NumElements() / 2 * DTypeBytes(both.dtype));
      experts.w2.data.push_back(last.data);
    }
  }

  // Formats and shapes of the banks, whose pointers follow.
  static void SetShape(moe::ExpertWeights& experts, DType w13, DType w2) {
    for (moe::ExpertBank* bank : {&experts.w1, &experts.w3}) {
      bank->format.dtype = w13;
      bank->rows = experts.intermediate_size;
      bank->cols = experts.hidden_size;
    }
    experts.w2.format.dtype = w2;
    experts.w2.rows = experts.hidden_size;
    experts.w2.cols = experts.intermediate_size;
  }

  void BindSeparateExperts(const std::string& prefix, moe::ExpertWeights& experts) {
    ExpertNames names = kExpertNames[0];
    for (const ExpertNames& candidate : kExpertNames) {
      if (source_.Has(fmt::format("{}0.{}.weight", prefix, candidate.gate))) names = candidate;
    }
    const size_t hidden = experts.hidden_size;
    const size_t inner = experts.intermediate_size;
    bool is_first = true;
    for (size_t e = 0; e < config_.num_experts; ++e) {
      const auto take = [&](std::string_view name, size_t rows, size_t cols) {
        const std::string full = fmt::format("{}{}.{}.weight", prefix, e, name);
        if (!is_mine_[e]) {
          source_.Skip(full, {rows, cols});
          return TensorView{};
        }
        const TensorView view = source_.Take(full, {rows, cols});
        source_.Use(full, view);
        return view;
      };
      const TensorView gate = take(names.gate, inner, hidden);
      const TensorView up = take(names.up, inner, hidden);
      const TensorView down = take(names.down, hidden, inner);
      experts.w1.data.push_back(gate.data);
      experts.w3.data.push_back(up.data);
      experts.w2.data.push_back(down.data);
      if (!is_mine_[e]) continue;
      if (is_first) SetShape(experts, gate.dtype, down.dtype);
      is_first = false;
      const std::string name = fmt::format("{}{}", prefix, e);
      same_type_.push_back({name, experts.w1.format.dtype, gate.dtype});
      same_type_.push_back({name, experts.w1.format.dtype, up.dtype});
      same_type_.push_back({name, experts.w2.format.dtype, down.dtype});
    }
  }

  // Experts of a layer are multiplied by one kernel.
  struct SameType {
    std::string expert;
    DType expected, found;
  };
  void RequireSameTypes() const {
    for (const SameType& pair : same_type_) {
      if (pair.expected == pair.found) continue;
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}: its weights are {}, those of the first expert are {}; experts of a "
                      "layer must share one type",
                      pair.expert, DTypeName(pair.found), DTypeName(pair.expected)));
    }
  }

  const ModelConfig& config_;
  TensorSource& source_;
  const ExpertShare& share_;
  size_t num_moe_ = 0;         // MoE layers so far
  std::vector<bool> is_mine_;  // [E] of the present one
  std::vector<std::pair<TensorView, std::vector<float>*>>
      vectors_;  // checked and read when all tensors are known to be there
  // What has to be stored another way, then; each keeps its memory in the vector that it is given.
  std::vector<std::function<void(std::vector<std::shared_ptr<const void>>&)>> copies_;
  size_t copied_bytes_ = 0;
  std::vector<SameType> same_type_;
};

// Adds up what a binder asks for.
class CountingSource : public TensorSource {
 public:
  explicit CountingSource(DType dtype) : dtype_(dtype) {}
  bool Has(std::string_view name) const override {
    return name.find("gate_up_proj") == std::string_view::npos &&
           name.find("block_sparse_moe") == std::string_view::npos;
  }
  TensorView Take(std::string_view, const Shape& shape) override {
    size_t count = 0;
    SY_CHECK(shape.NumElements(count));
    bytes_ += (count * DTypeBytes(dtype_) + 63) / 64 * 64;
    return {nullptr, dtype_, Shape{0}};
  }
  void Skip(std::string_view, const Shape&) override {}
  void Ignore(std::string_view, std::string_view) override {}
  void Finish() override {}
  size_t bytes() const { return bytes_; }

 private:
  DType dtype_;
  size_t bytes_ = 0;
};

}  // namespace

TransformerWeights BindWeights(const ModelConfig& config, TensorSource& source,
                               const ExpertShare& share) {
  return Binder(config, source, share).Bind();
}

WeightBytes RandomWeightBytes(const ModelConfig& config, DType dtype, const ExpertShare& share) {
  CountingSource source(dtype);
  const TransformerWeights weights = Binder(config, source, share).Bind();
  return {source.bytes(), weights.owned_bytes};
}

}  // namespace switchyard
