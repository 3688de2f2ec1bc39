#include "switchyard/simulate/shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"
#include "switchyard/model/shapes.h"

namespace switchyard::simulate {
namespace {

// Bytes of one weight of an expert, scales included (moe-contract 5), and of the other weights.
struct SchemeRow {
  std::string_view name;
  double expert_bytes, other_bytes;
};
constexpr SchemeRow kSchemes[] = {
    {"bf16", 2, 2},
    {"f16", 2, 2},
    {"f32", 4, 4},
    {"fp8_block", 1 + 4.0 / (128 * 128), 2},
    {"w8a8_int8", 1, 2},  // a scale per channel is below a thousandth
    {"mxfp8", 1 + 1.0 / 32, 2},
    {"w4a8_int", 0.5, 2},
    {"mxfp4", 0.5 + 1.0 / 32, 2},
    {"awq", 0.5 + 2.5 / 128, 2},  // groups of 128: a 16-bit scale and a 4-bit zero
};

const SchemeRow& FindScheme(std::string_view name) {
  std::vector<std::string_view> known;
  for (const SchemeRow& row : kSchemes) {
    if (row.name == name) return row;
    known.push_back(row.name);
  }
  throw Error(ErrorCode::kUnsupported, fmt::format("--shape: there is no scheme {}; known: {}",
                                                   QuoteForMessage(name), fmt::join(known, ", ")));
}

double Product(size_t a, size_t b) { return static_cast<double>(a) * static_cast<double>(b); }

// Parameters of the projections, and what a key costs a token.
void SetHeads(const ModelConfig& config, ModelShape& shape) {
  const size_t query = config.num_heads * config.head_dim;
  const size_t key = config.num_kv_heads * config.head_dim;
  shape.attention_params = Product(config.hidden_size, 2 * query + 2 * key);
  shape.flops_per_key = Product(4, query);
}

// One latent row for each key, read by all heads: a dot product with all of it, and a sum of its
// first part.
void SetLatentHeads(const ModelConfig& config, ModelShape& shape) {
  const LatentAttention& latent = *config.latent;
  const size_t row = config.kv_shape().key_dim;
  const double queries =
      latent.q_rank == 0
          ? Product(config.hidden_size, config.num_heads * config.head_dim)
          : Product(latent.q_rank, config.hidden_size + config.num_heads * config.head_dim);
  shape.attention_params =
      queries + Product(config.hidden_size, row) +
      Product(latent.kv_rank, config.num_heads * (latent.nope_dim + latent.value_dim)) +
      Product(config.num_heads * latent.value_dim, config.hidden_size);
  shape.flops_per_key = Product(2 * config.num_heads, row + latent.kv_rank);
}

ModelShape FromConfig(std::string_view name) {
  const ModelConfig config = KnownShape(name, 0);
  ModelShape shape;
  shape.name = name;
  shape.hidden = config.hidden_size;
  shape.inner = config.moe_intermediate_size;
  shape.num_experts = config.num_experts;
  shape.top_k = config.top_k;
  shape.moe_layers = config.num_moe_layers();
  shape.dense_layers = config.layers.size() - shape.moe_layers;
  config.latent ? SetLatentHeads(config, shape) : SetHeads(config, shape);
  shape.dense_params = 3 * Product(config.hidden_size, config.dense_intermediate_size);
  shape.shared_params = 3 * Product(config.hidden_size, config.shared_intermediate_size);
  shape.head_params = Product(config.hidden_size, config.vocab_size);
  shape.kv_bytes = Product(2, config.kv_shape().elements());  // bf16 keys and values
  return shape;
}

}  // namespace

ModelShape FindShape(std::string_view name_and_scheme) {
  const size_t colon = name_and_scheme.find(':');
  const std::string_view name = name_and_scheme.substr(0, colon);
  const std::vector<std::string_view> known = KnownShapes();
  if (std::find(known.begin(), known.end(), name) == known.end()) {
    const std::string_view close = ClosestName(name, known);
    throw Error(ErrorCode::kNotFound,
                fmt::format("there is no shape {}{}; known: {}", QuoteForMessage(name),
                            close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                            fmt::join(known, ", ")));
  }
  const SchemeRow& scheme =
      FindScheme(colon == std::string_view::npos ? std::string_view("bf16")
                                                 : name_and_scheme.substr(colon + 1));
  ModelShape shape = FromConfig(name);
  shape.scheme = scheme.name;
  shape.expert_bytes_per_weight = scheme.expert_bytes;
  shape.other_bytes_per_weight = scheme.other_bytes;
  return shape;
}

}  // namespace switchyard::simulate
