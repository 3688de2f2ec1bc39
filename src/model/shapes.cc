#include "switchyard/model/shapes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

}  // namespace

std::vector<std::string_view> KnownShapes() {
  std::vector<std::string_view> names;
  for (const ShapeRow& row : kShapes) names.push_back(row.name);
  return names;
}

ModelConfig KnownShape(std::string_view name, size_t layers) {
  for (const ShapeRow& row : kShapes) {
    if (row.name != name) continue;
    if (layers > row.layers) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} has {} layers, {} were asked for", name, row.layers, layers));
    }
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
    config.layers.resize(layers == 0 ? row.layers : layers);
    return config;
  }
  const std::vector<std::string_view> known = KnownShapes();
  const std::string_view close = ClosestName(name, known);
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no shape \"{}\"{}; known: {}", name,
                          close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                          fmt::join(known, ", ")));
}

}  // namespace switchyard
