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

constexpr std::string_view kDeepSeekV3 = "deepseek-v3";

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

// Latent attention: one compressed row of 512 + 64 values per key, read by all heads.
ModelShape DeepSeekV3() {
  constexpr double kHidden = 7168, kHeads = 128, kQueryRank = 1536, kKeyRank = 512, kRotary = 64,
                   kHeadDim = 128;
  ModelShape shape;
  shape.name = kDeepSeekV3;
  shape.hidden = 7168;
  shape.inner = 2048;
  shape.num_experts = 256;
  shape.top_k = 8;
  shape.moe_layers = 58;
  shape.dense_layers = 3;
  shape.attention_params = kHidden * kQueryRank + kQueryRank * kHeads * (kHeadDim + kRotary) +
                           kHidden * (kKeyRank + kRotary) + kKeyRank * kHeads * 2 * kHeadDim +
                           kHeads * kHeadDim * kHidden;
  shape.dense_params = 3 * kHidden * 18432;
  shape.shared_params = shape.expert_params();
  shape.head_params = kHidden * 129280;
  shape.kv_bytes = 2 * (kKeyRank + kRotary);
  shape.flops_per_key = 2 * kHeads * (2 * kKeyRank + kRotary);
  return shape;
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
  const size_t query = config.num_heads * config.head_dim;
  const size_t key = config.num_kv_heads * config.head_dim;
  shape.attention_params = Product(config.hidden_size, 2 * query + 2 * key);
  shape.dense_params = 3 * Product(config.hidden_size, config.dense_intermediate_size);
  shape.head_params = Product(config.hidden_size, config.vocab_size);
  shape.kv_bytes = 2 * Product(2, key);  // bf16 keys and values
  shape.flops_per_key = Product(4, query);
  return shape;
}

}  // namespace

std::vector<std::string_view> ShapeNames() {
  std::vector<std::string_view> names = KnownShapes();
  if (std::find(names.begin(), names.end(), kDeepSeekV3) == names.end())
    names.push_back(kDeepSeekV3);
  return names;
}

ModelShape FindShape(std::string_view name_and_scheme) {
  const size_t colon = name_and_scheme.find(':');
  const std::string_view name = name_and_scheme.substr(0, colon);
  const std::vector<std::string_view> known = ShapeNames();
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
  ModelShape shape = name == kDeepSeekV3 ? DeepSeekV3() : FromConfig(name);
  shape.scheme = scheme.name;
  shape.expert_bytes_per_weight = scheme.expert_bytes;
  shape.other_bytes_per_weight = scheme.other_bytes;
  return shape;
}

}  // namespace switchyard::simulate
