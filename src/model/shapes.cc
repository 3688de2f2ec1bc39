#include "switchyard/model/shapes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"

namespace switchyard {
namespace {

struct ShapeRow {
  std::string_view name;
  std::string_view architecture;
  size_t hidden, layers, heads, kv_heads, head_dim, experts, top_k, inner, vocab, context;
  double theta, eps;
  QkNorm qk_norm;
  bool renormalize;
};

constexpr ShapeRow kShapes[] = {
    {"olmoe-1b-7b", "olmoe", 2048, 16, 16, 16, 128, 64, 8, 1024, 50304, 4096, 1e4, 1e-5,
     QkNorm::kFull, false},
    {"qwen3-30b-a3b", "qwen3_moe", 2048, 48, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6, 1e-6,
     QkNorm::kPerHead, true},
    {"qwen3-235b-a22b", "qwen3_moe", 4096, 94, 64, 4, 128, 128, 8, 1536, 151936, 40960, 1e6, 1e-6,
     QkNorm::kPerHead, true},
    {"mixtral-8x7b", "mixtral", 4096, 32, 32, 8, 128, 8, 2, 14336, 32000, 32768, 1e6, 1e-5,
     QkNorm::kNone, true},
    {"tiny-qwen3moe", "qwen3_moe", 256, 2, 4, 2, 64, 8, 2, 256, 1024, 4096, 1e6, 1e-6,
     QkNorm::kPerHead, true},
};

// Models with parts that a row has no place for.
struct DeepseekRow {
  std::string_view name;
  size_t hidden, layers, dense_layers, heads, q_rank, experts, top_k, inner, shared, dense_inner,
      vocab;
};
constexpr DeepseekRow kDeepseekShapes[] = {
    {"deepseek-v2-lite", 2048, 27, 1, 16, 0, 64, 6, 1408, 2, 10944, 102400},
    {"deepseek-v3", 7168, 61, 3, 128, 1536, 256, 8, 2048, 1, 18432, 129280},
};
// Sigmoid routing with a bias for the choice, and heads of which a part is rotated.
struct SigmoidRow {
  std::string_view name;
  std::string_view architecture;
  size_t hidden, layers, dense_layers, heads, experts, inner, shared_inner, dense_inner, vocab,
      context;
  double theta, eps;
  QkNorm qk_norm;
  bool attention_bias;
};
constexpr SigmoidRow kSigmoidShapes[] = {
    {"glm-4.5-air", "glm4_moe", 4096, 46, 1, 96, 128, 1408, 1408, 10944, 151552, 131072, 1e6, 1e-5,
     QkNorm::kNone, true},
    {"minimax-m2", "minimax_m2", 3072, 62, 0, 48, 256, 1536, 0, 0, 200064, 196608, 5e6, 1e-6,
     QkNorm::kFull, false},
};
struct GptOssRow {
  std::string_view name;
  size_t layers, experts;
};
constexpr GptOssRow kGptOssShapes[] = {{"gpt-oss-20b", 24, 32}, {"gpt-oss-120b", 36, 128}};

ModelConfig FromRow(const ShapeRow& row) {
  ModelConfig config;
  config.architecture = row.architecture;
  config.vocab_size = row.vocab;
  config.hidden_size = row.hidden;
  config.num_heads = row.heads;
  config.num_kv_heads = row.kv_heads;
  config.head_dim = row.head_dim;
  config.max_positions = row.context;
  config.norm_eps = row.eps;
  config.qk_norm = row.qk_norm;
  config.rope.theta = row.theta;
  config.rope.rotary_dim = row.head_dim;
  config.rope.max_positions = row.context;
  config.moe_intermediate_size = row.inner;
  config.num_experts = row.experts;
  config.top_k = row.top_k;
  config.renormalize = row.renormalize;
  config.layers.resize(row.layers);
  return config;
}

ModelConfig FromRow(const DeepseekRow& row) {
  const bool is_v3 = row.q_rank != 0;
  ModelConfig config =
      FromRow(ShapeRow{row.name, is_v3 ? "deepseek_v3" : "deepseek_v2", row.hidden, row.layers,
                       row.heads, row.heads, 128 + 64, row.experts, row.top_k, row.inner, row.vocab,
                       163840, 1e4, 1e-6, QkNorm::kNone, is_v3});
  config.latent =
      LatentAttention{.q_rank = row.q_rank, .kv_rank = 512, .nope_dim = 128, .value_dim = 128};
  config.rope.rotary_dim = 64;
  config.rope.interleaved = true;
  config.dense_intermediate_size = row.dense_inner;
  config.shared_intermediate_size = row.shared * row.inner;
  for (size_t i = 0; i < row.dense_layers; ++i) config.layers[i].is_moe = false;
  if (!is_v3) return config;
  config.scoring_func = moe::ScoringFunc::kSigmoid;
  config.router_correction_bias = true;
  config.num_expert_groups = 8;
  config.top_k_groups = 4;
  config.routed_scaling_factor = 2.5;
  return config;
}

ModelConfig FromRow(const SigmoidRow& row) {
  ModelConfig config = FromRow(ShapeRow{row.name, row.architecture, row.hidden, row.layers,
                                        row.heads, 8, 128, row.experts, 8, row.inner, row.vocab,
                                        row.context, row.theta, row.eps, row.qk_norm, true});
  config.rope.rotary_dim = 64;
  config.attention_bias = row.attention_bias;
  config.dense_intermediate_size = row.dense_inner;
  config.shared_intermediate_size = row.shared_inner;
  for (size_t i = 0; i < row.dense_layers; ++i) config.layers[i].is_moe = false;
  config.scoring_func = moe::ScoringFunc::kSigmoid;
  config.router_correction_bias = true;
  return config;
}

ModelConfig FromRow(const GptOssRow& row) {
  ModelConfig config =
      FromRow(ShapeRow{row.name, "gpt_oss", 2880, row.layers, 64, 8, 64, row.experts, 4, 2880,
                       201088, 131072, 150000, 1e-5, QkNorm::kNone, true});
  config.attention_bias = config.attention_sinks = config.router_bias = config.expert_bias = true;
  config.experts_are_transposed = true;
  config.routing = moe::RoutingPolicy::kTopKThenSoftmax;
  config.activation = "swiglu_oai";
  config.activation_alpha = 1.702f;
  config.activation_limit = 7.0f;
  for (size_t i = 0; i < row.layers; i += 2) config.layers[i].window = 128;
  return config;
}

// Calls body(row) for all rows of all tables.
template <typename Body>
void ForEachRow(const Body& body) {
  for (const ShapeRow& row : kShapes) body(row);
  for (const DeepseekRow& row : kDeepseekShapes) body(row);
  for (const SigmoidRow& row : kSigmoidShapes) body(row);
  for (const GptOssRow& row : kGptOssShapes) body(row);
}

}  // namespace

std::vector<std::string_view> KnownShapes() {
  std::vector<std::string_view> names;
  ForEachRow([&](const auto& row) { names.push_back(row.name); });
  return names;
}

ModelConfig KnownShape(std::string_view name, size_t layers) {
  std::optional<ModelConfig> config;
  ForEachRow([&](const auto& row) {
    if (row.name == name) config = FromRow(row);
  });
  if (!config) {
    const std::vector<std::string_view> known = KnownShapes();
    const std::string_view close = ClosestName(name, known);
    throw Error(ErrorCode::kNotFound,
                fmt::format("there is no shape \"{}\"{}; known: {}", name,
                            close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                            fmt::join(known, ", ")));
  }
  if (layers > config->layers.size()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} has {} layers, {} were asked for",
                                                         name, config->layers.size(), layers));
  }
  if (layers != 0) config->layers.resize(layers);
  return *std::move(config);
}

}  // namespace switchyard
