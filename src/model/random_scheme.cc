#include "model/random_scheme.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"
#include "switchyard/model/shapes.h"

namespace switchyard {
namespace {

constexpr std::string_view kFp8Block = R"({"quant_method": "fp8", "fmt": "e4m3",
    "activation_scheme": "dynamic", "weight_block_size": [128, 128]})";
constexpr std::string_view kInt8 = R"({"quant_method": "w8a8_int8"})";
constexpr std::string_view kPacked32 = R"({"quant_method": "compressed-tensors",
    "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights":
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}})";
constexpr std::string_view kPacked128 = R"({"quant_method": "compressed-tensors",
    "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights":
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}}})";
constexpr std::string_view kAwq = R"({"quant_method": "awq", "bits": 4, "group_size": 128,
    "zero_point": true, "version": "gemm"})";
constexpr std::string_view kGptq = R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
    "desc_act": false, "sym": true})";
constexpr std::string_view kMxfp4 = R"({"quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}}})";
constexpr std::string_view kNvfp4 = R"({"quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}})";

std::vector<RandomScheme> MakeSchemes() {
  std::vector<RandomScheme> schemes = {{.name = "bf16", .dtype = DType::kBF16},
                                       {.name = "f16", .dtype = DType::kF16},
                                       {.name = "f32", .dtype = DType::kF32},
                                       {.name = "fp8_block",
                                        .dtype = DType::kBF16,
                                        .rules = kFp8Block,
                                        .left_out = "modules_to_not_convert",
                                        .codes = DType::kF8E4M3},
                                       {.name = "w8a8_int8",
                                        .dtype = DType::kBF16,
                                        .rules = kInt8,
                                        .left_out = "ignore",
                                        .codes = DType::kI8},
                                       {.name = "w4a16_g32",
                                        .dtype = DType::kBF16,
                                        .rules = kPacked32,
                                        .left_out = "ignore",
                                        .codes = DType::kU4,
                                        .scale_dtype = DType::kBF16,
                                        .group = 32,
                                        .repacks = true},
                                       {.name = "w4a16_g128",
                                        .dtype = DType::kBF16,
                                        .rules = kPacked128,
                                        .left_out = "ignore",
                                        .codes = DType::kU4,
                                        .scale_dtype = DType::kBF16,
                                        .group = 128,
                                        .repacks = true},
                                       {.name = "awq",
                                        .dtype = DType::kBF16,
                                        .rules = kAwq,
                                        .left_out = "modules_to_not_convert",
                                        .codes = DType::kU4,
                                        .scale_dtype = DType::kF16,
                                        .group = 128,
                                        .zeros = 0x88888888u,
                                        .repacks = true},
                                       // One less is stored.
                                       {.name = "gptq",
                                        .dtype = DType::kBF16,
                                        .rules = kGptq,
                                        .left_out = "modules_to_not_convert",
                                        .codes = DType::kU4,
                                        .scale_dtype = DType::kF16,
                                        .group = 128,
                                        .zeros = 0x77777777u,
                                        .repacks = true},
                                       {.name = "mxfp4",
                                        .dtype = DType::kBF16,
                                        .rules = kMxfp4,
                                        .left_out = "ignore",
                                        .codes = DType::kF4E2M1,
                                        .scale_dtype = DType::kU8,
                                        .group = 32,
                                        .banks_in_gpt_oss = true},
                                       {.name = "nvfp4",
                                        .dtype = DType::kBF16,
                                        .rules = kNvfp4,
                                        .left_out = "ignore",
                                        .codes = DType::kF4E2M1,
                                        .scale_dtype = DType::kF8E4M3,
                                        .group = 16}};
  // Named as ggml names its types, in small letters; one of them is taken.
  static const std::vector<std::string> ggml_names = [] {
    std::vector<std::string> names;
    for (auto type = static_cast<size_t>(kFirstGgmlBlock);
         type <= static_cast<size_t>(kLastGgmlBlock); ++type) {
      std::string name(DTypeName(static_cast<DType>(type)));
      std::ranges::transform(name, name.begin(), [](char c) {
        return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      });
      names.push_back(name == "mxfp4" ? "mxfp4_gguf" : name);
    }
    return names;
  }();
  for (size_t i = 0; i < ggml_names.size(); ++i) {
    const auto dtype = static_cast<DType>(static_cast<size_t>(kFirstGgmlBlock) + i);
    schemes.push_back({.name = ggml_names[i], .dtype = dtype});
  }
  return schemes;
}

const std::vector<RandomScheme>& Schemes() {
  static const std::vector<RandomScheme> schemes = MakeSchemes();
  return schemes;
}

// Layers of floats beside a scheme, by the ends of their names.
std::vector<std::string> LeftOut(const RandomScheme& scheme, const ModelConfig& config) {
  std::vector<std::string> modules = {"model.embed_tokens", "lm_head", "gate", "router"};
  if (HasMxfp4Banks(scheme, config)) modules.emplace_back("self_attn");
  if (scheme.group == 0 || config.dense_intermediate_size % scheme.group == 0) return modules;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (!config.layers[i].is_moe) modules.push_back(fmt::format("model.layers.{}.mlp", i));
  }
  return modules;
}

}  // namespace

std::vector<std::string_view> RandomSchemes() {
  std::vector<std::string_view> names;
  for (const RandomScheme& scheme : Schemes()) names.push_back(scheme.name);
  return names;
}

const RandomScheme& FindRandomScheme(std::string_view name) {
  const auto found = std::ranges::find(Schemes(), name, &RandomScheme::name);
  if (found != Schemes().end()) return *found;
  const std::vector<std::string_view> known = RandomSchemes();
  const std::string_view close = ClosestName(name, known);
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no scheme \"{}\" for random weights{}; known: {}", name,
                          close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                          fmt::join(known, ", ")));
}

bool HasMxfp4Banks(const RandomScheme& scheme, const ModelConfig& config) {
  return scheme.banks_in_gpt_oss && config.experts_are_transposed;
}

ModelConfig ConfigFor(const RandomScheme& scheme, ModelConfig config) {
  if (scheme.rules.empty() || HasMxfp4Banks(scheme, config)) return config;
  if (config.experts_are_transposed) config.experts_are_transposed = config.expert_bias = false;
  return config;
}

std::unique_ptr<QuantizationRules> RulesFor(const RandomScheme& scheme, const ModelConfig& config) {
  if (scheme.rules.empty()) return nullptr;
  nlohmann::json json = nlohmann::json::parse(scheme.rules);
  json[std::string(scheme.left_out)] = LeftOut(scheme, config);
  ConfigReader reader = ConfigReader::Parse(fmt::format("scheme {}", scheme.name), json.dump());
  return ParseQuantization(reader, {});
}

}  // namespace switchyard
