#include "model/convert/target.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "model/config_reader.h"
#include "model/quantization/online.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

using Kind = ModelPart::Kind;
using nlohmann::ordered_json;

constexpr std::string_view kGgufPrefix = "gguf-";

constexpr QuantizeScheme kSchemes[] = {
    {"bf16", "plain bfloat16, for a quantised checkpoint that is decoded", false},
    {"fp8_block", "e4m3 in 128x128 blocks (quant_method fp8, as DeepSeek-V3)", false},
    {"w8a8_int8", "int8 with a scale per output (compressed-tensors int-quantized)", false},
    {"w4a16_g32", "int4 with a scale per 32 inputs (compressed-tensors pack-quantized)", false},
    {"w4a16_g128", "int4 with a scale per 128 inputs (compressed-tensors pack-quantized)", false},
    {"awq", "u4 with a scale and a zero point per 128 inputs, rounded to nearest (AutoAWQ gemm)",
     false},
    {"gptq", "u4 with a scale per 128 inputs, symmetric, rounded to nearest (GPTQ v1)", false},
    {"mxfp4", "e2m1 with a power of two per 32 inputs (compressed-tensors; gpt-oss: its own)",
     false},
    {"gguf-f32", "GGUF, F32", true},
    {"gguf-f16", "GGUF, F16", true},
    {"gguf-bf16", "GGUF, BF16", true},
    {"gguf-q8_0", "GGUF, 8.5 bits", true},
    {"gguf-q4_0", "GGUF, 4.5 bits", true},
    {"gguf-q4_1", "GGUF, 5 bits", true},
    {"gguf-q5_0", "GGUF, 5.5 bits", true},
    {"gguf-q5_1", "GGUF, 6 bits", true},
    {"gguf-q2_k", "GGUF, 2.6 bits", true},
    {"gguf-q3_k", "GGUF, 3.4 bits", true},
    {"gguf-q4_k", "GGUF, 4.5 bits", true},
    {"gguf-q5_k", "GGUF, 5.5 bits", true},
    {"gguf-q6_k", "GGUF, 6.6 bits", true},
    {"gguf-iq4_nl", "GGUF, 4.5 bits, codes of unequal distance", true},
    {"gguf-mxfp4", "GGUF, experts e2m1 with a power of two per 32 inputs, the rest Q8_0", true},
};

// Numbers of general.file_type. Source: enum llama_ftype of llama.cpp.
struct FileType {
  DType dtype;
  uint32_t number;
};
constexpr FileType kFileTypes[] = {
    {DType::kF32, 0},        {DType::kF16, 1},      {DType::kGgmlQ40, 2},    {DType::kGgmlQ41, 3},
    {DType::kGgmlQ80, 7},    {DType::kGgmlQ50, 8},  {DType::kGgmlQ51, 9},    {DType::kGgmlQ2K, 10},
    {DType::kGgmlQ3K, 11},   {DType::kGgmlQ4K, 14}, {DType::kGgmlQ5K, 16},   {DType::kGgmlQ6K, 18},
    {DType::kGgmlIq4Nl, 25}, {DType::kBF16, 32},    {DType::kGgmlMxFp4, 38},
};

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

quant::WeightQuant OnlineWeights(std::string_view scheme) {
  return OnlineQuantization(scheme).scheme().weights;
}

// Matches the products of all experts: their names would be thousands of lines.
std::string ExpertExpression(const std::string& product) {
  return fmt::format(".*[.]experts[.][0-9]+[.]{}$", product);
}

ordered_json CompressedTensors(const std::string& format, ordered_json weights,
                               ordered_json activations, const LeftOut& left_out) {
  std::vector<std::string> ignore = left_out.modules;
  for (const std::string& product : left_out.expert_products)
    ignore.push_back("re:" + ExpertExpression(product));
  ordered_json group;
  group["targets"] = {"Linear"};
  group["weights"] = std::move(weights);
  group["input_activations"] = std::move(activations);
  group["output_activations"] = nullptr;
  ordered_json config;
  config["quant_method"] = "compressed-tensors";
  config["format"] = format;
  config["quantization_status"] = "compressed";
  config["config_groups"]["group_0"] = std::move(group);
  config["ignore"] = ignore;
  config["kv_cache_scheme"] = nullptr;
  return config;
}

ordered_json Arguments(size_t bits, std::string_view type, std::string_view strategy,
                       ordered_json group, bool dynamic) {
  ordered_json arguments;
  arguments["num_bits"] = bits;
  arguments["type"] = type;
  arguments["symmetric"] = true;
  arguments["strategy"] = strategy;
  arguments["group_size"] = std::move(group);
  arguments["dynamic"] = dynamic;
  return arguments;
}

// Lists that know no expressions.
std::vector<std::string> AllNames(const LeftOut& left_out) {
  std::vector<std::string> names = left_out.modules;
  names.insert(names.end(), left_out.expert_modules.begin(), left_out.expert_modules.end());
  return names;
}

ordered_json AwqConfig(const LeftOut& left_out) {
  ordered_json config;
  config["quant_method"] = "awq";
  config["version"] = "gemm";
  config["bits"] = 4;
  config["group_size"] = 128;
  config["zero_point"] = true;
  config["backend"] = "autoawq";
  config["do_fuse"] = false;
  config["modules_to_not_convert"] = AllNames(left_out);
  return config;
}

// Modules are left out by regular expressions in `dynamic`.
ordered_json GptqConfig(const LeftOut& left_out) {
  ordered_json config;
  config["quant_method"] = "gptq";
  config["checkpoint_format"] = "gptq";
  config["bits"] = 4;
  config["group_size"] = 128;
  config["desc_act"] = false;
  config["sym"] = true;
  config["lm_head"] = false;
  config["true_sequential"] = true;
  config["dynamic"] = ordered_json::object();
  for (const std::string& product : left_out.expert_products)
    config["dynamic"]["-:" + ExpertExpression(product)] = ordered_json::object();
  for (const std::string& module : left_out.modules) {
    if (module == "lm_head") continue;
    std::string expression = "-:";
    for (char c : module) expression += c == '.' ? std::string("\\.") : std::string(1, c);
    config["dynamic"][expression + "$"] = ordered_json::object();
  }
  return config;
}

ordered_json Fp8Config(const LeftOut& left_out) {
  ordered_json config;
  config["quant_method"] = "fp8";
  config["fmt"] = "e4m3";
  config["activation_scheme"] = "dynamic";
  config["weight_block_size"] = {128, 128};
  config["modules_to_not_convert"] = AllNames(left_out);
  return config;
}

// As published gpt-oss checkpoints say it.
ordered_json Mxfp4Config() {
  ordered_json config;
  config["quant_method"] = "mxfp4";
  config["modules_to_not_convert"] = {"model.layers.*.self_attn", "model.layers.*.mlp.router",
                                      "model.embed_tokens", "lm_head"};
  return config;
}

ordered_json Mxfp4Arguments() {
  ordered_json weights = Arguments(4, "float", "group", 32, false);
  weights["scale_dtype"] = "torch.uint8";
  return weights;
}

}  // namespace

bool HasOwnMxfp4(const ModelConfig& config) { return config.architecture == "gpt_oss"; }

std::span<const QuantizeScheme> QuantizeSchemes() { return kSchemes; }

const QuantizeScheme& FindQuantizeScheme(std::string_view name) {
  const std::string lower = Lower(name);
  std::string known;
  for (const QuantizeScheme& scheme : kSchemes) {
    if (scheme.name == lower) return scheme;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", scheme.name);
  }
  const std::string gguf = std::string(kGgufPrefix) + lower;
  for (const QuantizeScheme& scheme : kSchemes) {
    // "bf16" is the folder's, and "mxfp4" too; the table has them first.
    if (scheme.name == gguf) return scheme;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("--scheme: there is no scheme {}; there are {}", QuoteForMessage(name), known));
}

std::unique_ptr<Encoding> FolderEncoding(std::string_view scheme, const ModelConfig& config) {
  if (HasOwnMxfp4(config)) {
    if (scheme == "mxfp4") {
      return CodesEncoding(
          {OnlineWeights("mxfp4"), "blocks", "scales", DType::kU8, /*mx_blocks=*/true});
    }
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--scheme {}: checkpoints of {} store their experts as mxfp4 or as "
                            "transposed floats; write mxfp4 or a GGUF type",
                            scheme, config.architecture));
  }
  if (scheme == "bf16") return UnscaledEncoding(DType::kBF16);
  if (scheme == "fp8_block") {
    return CodesEncoding({OnlineWeights(scheme), "weight", "weight_scale_inv", DType::kF32});
  }
  if (scheme == "w8a8_int8")
    return CodesEncoding({OnlineWeights(scheme), "weight", "weight_scale", DType::kF32});
  if (scheme == "mxfp4")
    return CodesEncoding({OnlineWeights(scheme), "weight_packed", "weight_scale", DType::kU8});
  if (scheme == "awq") return AwqEncoding(OnlineWeights(scheme));
  if (scheme == "gptq") return GptqEncoding(128);
  return PackQuantizedEncoding(OnlineWeights(scheme));
}

std::string QuantizationConfigOf(std::string_view scheme, const ModelConfig& config,
                                 const LeftOut& left_out) {
  if (scheme == "bf16") return {};
  if (scheme == "fp8_block") return Fp8Config(left_out).dump();
  if (scheme == "awq") return AwqConfig(left_out).dump();
  if (scheme == "gptq") return GptqConfig(left_out).dump();
  if (scheme == "w8a8_int8") {
    return CompressedTensors("int-quantized", Arguments(8, "int", "channel", nullptr, false),
                             Arguments(8, "int", "token", nullptr, true), left_out)
        .dump();
  }
  if (scheme == "mxfp4") {
    return HasOwnMxfp4(config)
               ? Mxfp4Config().dump()
               : CompressedTensors("mxfp4-pack-quantized", Mxfp4Arguments(), nullptr, left_out)
                     .dump();
  }
  const size_t group = OnlineWeights(scheme).format.scale_cols;
  return CompressedTensors("pack-quantized", Arguments(4, "int", "group", group, false), nullptr,
                           left_out)
      .dump();
}

bool TakesPart(std::string_view scheme, const ModelConfig& config, Kind kind) {
  if (scheme == "bf16") return kind != Kind::kRouter;
  if (HasOwnMxfp4(config)) return kind == Kind::kExpert;
  return kind == Kind::kLinear || kind == Kind::kExpert;
}

GgufTarget GgufTargetOf(std::string_view scheme) {
  const std::string_view type = scheme.substr(kGgufPrefix.size());
  for (const FileType& row : kFileTypes) {
    if (Lower(DTypeName(row.dtype)) == type) return {row.dtype, row.number};
  }
  throw Error(ErrorCode::kInternal, fmt::format("the scheme {} has no type", scheme));
}

namespace {

DType SmallBlocks(DType dtype) {
  switch (dtype) {
    case DType::kGgmlQ2K:
    case DType::kGgmlQ3K: return DType::kGgmlIq4Nl;
    case DType::kGgmlQ4K: return DType::kGgmlQ50;
    case DType::kGgmlQ5K: return DType::kGgmlQ51;
    case DType::kGgmlQ6K: return DType::kGgmlQ80;
    default: return dtype;
  }
}

}  // namespace

GgufChoice ChooseGgufType(const GgufTarget& target, GgufRole role, size_t cols) {
  if (role == GgufRole::kRouter) return {DType::kF32, "routers stay F32"};
  if (!IsGgmlBlock(target.dtype)) return {target.dtype, {}};
  GgufChoice choice{target.dtype, {}};
  const bool is_output = role == GgufRole::kOutput || role == GgufRole::kTiedEmbedding;
  if (target.dtype == DType::kGgmlMxFp4 && role != GgufRole::kExperts) {
    choice = {DType::kGgmlQ80, "MXFP4 is for experts"};
  } else if (is_output && target.dtype != DType::kGgmlQ80) {
    choice = {DType::kGgmlQ6K, "the output matrix is Q6_K"};
  }
  if (cols % DTypeBlock(choice.dtype) == 0) return choice;
  const std::string why =
      fmt::format("{} inputs are no multiple of the block of {}", cols, DTypeBlock(choice.dtype));
  choice = {SmallBlocks(choice.dtype), why};
  if (cols % DTypeBlock(choice.dtype) != 0) choice.dtype = DType::kF16;
  return choice;
}

}  // namespace switchyard
