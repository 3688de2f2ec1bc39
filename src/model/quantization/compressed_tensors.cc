// quant_method "compressed-tensors" (contract 5.12): groups of modules, each with a scheme of its
// own.
#include <fmt/format.h>

#include <map>

#include "model/quantization/module_rules.h"
#include "model/quantization/quantization.h"
#include "model/quantization/repacked_codes.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

// "weights" or "input_activations" of a group.
struct Arguments {
  size_t bits = 0;
  bool is_float = false;
  bool is_symmetric = true;
  bool is_dynamic = false;
  std::string strategy;
  size_t group = 0;
  std::vector<size_t> block;  // of outputs and inputs
  bool has_order = false;
};

Arguments ReadArguments(ConfigReader config) {
  Arguments arguments;
  arguments.bits = config.Count("num_bits", 1, 16);
  const std::string type = config.Text("type", "int");
  if (type != "int" && type != "float") config.Refuse("type", "known are int and float");
  arguments.is_float = type == "float";
  arguments.is_symmetric = config.Flag("symmetric", true);
  // NVFP4 writes "local": scales of groups are dynamic, that of the tensor is stored.
  if (config.Has("dynamic") && config.IsText("dynamic")) {
    if (config.Text("dynamic") != "local") config.Refuse("dynamic", "known are true, false, local");
    arguments.is_dynamic = true;
  } else {
    arguments.is_dynamic = config.Flag("dynamic", false);
  }
  arguments.strategy = config.Text("strategy", "tensor");
  if (config.Has("group_size") && config.Number("group_size", -1, 65536) > 0)
    arguments.group = config.Count("group_size", 1, 65536);
  const bool has_groups = arguments.strategy == "group" || arguments.strategy == "tensor_group";
  if (has_groups && arguments.group == 0 && !config.Has("group_size"))
    config.Refuse("group_size", fmt::format("strategy {} needs one", arguments.strategy));
  if (config.Has("block_structure")) arguments.block = config.Counts("block_structure", 1, 65536);
  if (config.Has("actorder")) {
    // "weight" and "static" reorder nothing on disk.
    const std::string order = config.IsText("actorder") ? config.Text("actorder") : "group";
    arguments.has_order = order == "group" || order == "dynamic";
  }
  config.Ignore({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"});
  return arguments;
}

[[noreturn]] void Refuse(const ConfigReader& group, std::string_view field,
                         const Arguments& found) {
  group.Refuse(field, fmt::format("{} {} bits, strategy {} is not read",
                                  found.is_float ? "float" : "int", found.bits, found.strategy));
}

// What becomes of activations: the kind, and for static scales the tensors that StoredCodes reads.
ActQuant ReadActivations(ConfigReader& group) {
  ActQuant act;
  if (!group.Has("input_activations")) return act;
  const Arguments in = ReadArguments(group.Object("input_activations"));
  if (in.is_dynamic && !in.is_symmetric)
    group.Refuse("input_activations", "dynamic activations with zero points are not computed");
  const bool per_token = in.strategy == "token" || (in.strategy == "tensor" && in.is_dynamic);
  if (!in.is_float && in.bits == 8) {
    if (per_token && in.is_dynamic) {
      act.kind = ActQuantKind::kInt8Token;
    } else if (in.strategy == "tensor") {
      act.kind = ActQuantKind::kInt8Static;
    }
  } else if (!in.is_float && in.bits == 4 && per_token && in.is_dynamic) {
    act.kind = ActQuantKind::kInt4Token;
  } else if (in.is_float && in.bits == 8) {
    if (per_token && in.is_dynamic) {
      act.kind = ActQuantKind::kFp8Token;
    } else if (in.strategy == "tensor") {
      act.kind = ActQuantKind::kFp8TensorStatic;
    } else if (in.strategy == "group" && in.group == 32) {
      act.kind = ActQuantKind::kMxFp8;
    } else if (in.strategy == "group" && in.is_dynamic && in.group != 0) {
      act.kind = ActQuantKind::kFp8Group;
      act.group = in.group;
    }
  } else if (in.is_float && in.bits == 4 && in.strategy == "group" && in.group == 32) {
    act.kind = ActQuantKind::kMxFp4;
    act.mx_rule = MxScaleRule::kEven;
  } else if (in.is_float && in.bits == 4 && in.group == 16) {
    return act;  // NVFP4: weights alone, see docs/quantization.md
  }
  if (act.kind == ActQuantKind::kNone) Refuse(group, "input_activations", in);
  return act;
}

std::unique_ptr<StorageScheme> Fp8(const ConfigReader& group, const Arguments& weights,
                                   const ActQuant& act) {
  StoredCodesOptions options;
  options.act = act;
  options.input_offset = {};
  if (weights.strategy == "group" && weights.group == 32) {
    options.moe_scheme = "mxfp8";
    options.scale_cols = 32;
    options.scale_dtypes = {DType::kF8E8M0};
    if (act.kind != ActQuantKind::kMxFp8) Refuse(group, "weights", weights);
  } else if (weights.strategy == "block" && weights.block.size() == 2) {
    options.moe_scheme = "fp8_block";
    options.scale_rows = weights.block[0];
    options.scale_cols = weights.block[1];
    if (act.kind != ActQuantKind::kFp8Group) Refuse(group, "weights", weights);
  } else if (weights.strategy == "tensor" || weights.strategy == "channel") {
    options.scale_rows = weights.strategy == "tensor" ? 0 : 1;
    options.moe_scheme = act.kind == ActQuantKind::kFp8TensorStatic ? "fp8_tensor_static"
                         : act.kind == ActQuantKind::kFp8Token      ? "fp8_channel"
                                                                    : "fp8_weights";
    if (act.kind != ActQuantKind::kFp8TensorStatic && act.kind != ActQuantKind::kFp8Token &&
        act.kind != ActQuantKind::kNone)
      Refuse(group, "weights", weights);
  } else {
    Refuse(group, "weights", weights);
  }
  return std::make_unique<StoredCodes>(std::move(options));
}

std::unique_ptr<StorageScheme> Int8(const ConfigReader& group, const Arguments& weights,
                                    const ActQuant& act) {
  if (weights.strategy != "channel" && weights.strategy != "tensor")
    Refuse(group, "weights", weights);
  StoredCodesOptions options;
  options.dtype = DType::kI8;
  options.scale_rows = weights.strategy == "tensor" ? 0 : 1;
  options.act = act;
  if (act.kind == ActQuantKind::kInt8Static) {
    options.moe_scheme = "w8a8_int8_static";
    options.input_offset = "input_zero_point";
  } else if (act.kind == ActQuantKind::kInt8Token) {
    options.moe_scheme = "w8a8_int8";
  } else {
    group.Refuse("input_activations", "int8 weights that lie unpacked go with int8 activations");
  }
  return std::make_unique<StoredCodes>(std::move(options));
}

std::unique_ptr<StorageScheme> Fp4(const ConfigReader& group, const Arguments& weights,
                                   const ActQuant& act) {
  StoredCodesOptions options;
  options.codes = "weight_packed";
  options.dtype = DType::kF4E2M1;
  options.act = act;
  if (weights.group == 16) {
    options.moe_scheme = "nvfp4";
    options.scale_cols = 16;
    options.scale_dtypes = {DType::kF8E4M3};
    options.tensor_scale = "weight_global_scale";
    options.tensor_scale_is_reciprocal = true;
    options.unused = {{"input_global_scale", ScalarShapes(), {DType::kF32, DType::kBF16}, false}};
  } else if (weights.group == 32) {
    options.scale_cols = 32;
    options.scale_dtypes = {DType::kF8E8M0};
    options.moe_scheme = act.kind == ActQuantKind::kNone    ? "mxfp4"
                         : act.kind == ActQuantKind::kMxFp4 ? "mxfp4_w4a4"
                         : act.kind == ActQuantKind::kMxFp8 ? "mxfp4_w4a8"
                                                            : "";
  }
  if (options.moe_scheme.empty()) Refuse(group, "weights", weights);
  return std::make_unique<StoredCodes>(std::move(options));
}

// 4 or 8 bits in words, or 4 bits one in a byte.
std::unique_ptr<StorageScheme> Int4(const ConfigReader& group, const Arguments& weights,
                                    const ActQuant& act, bool is_packed) {
  if (weights.strategy != "group" && weights.strategy != "channel")
    Refuse(group, "weights", weights);
  const bool plain = act.kind == ActQuantKind::kNone;
  if (!plain && act.kind != ActQuantKind::kInt8Token && act.kind != ActQuantKind::kInt4Token)
    group.Refuse("input_activations", "int4 weights go with int8, int4 or plain activations");
  if (!plain && (!weights.is_symmetric || weights.has_order || weights.bits != 4))
    Refuse(group, "weights", weights);
  if (is_packed) {
    if (act.kind == ActQuantKind::kInt4Token)
      group.Refuse("input_activations", "packed weights go with int8 or plain activations");
    return std::make_unique<PackQuantizedCodes>(
        PackQuantizedCodes::Options{weights.bits, weights.strategy == "channel" ? 0 : weights.group,
                                    weights.is_symmetric, weights.has_order, act});
  }
  if (plain || weights.strategy != "channel") Refuse(group, "weights", weights);
  Int4Codes::Options options;
  options.moe_scheme = act.kind == ActQuantKind::kInt8Token ? "w4a8_int" : "w4a4_int";
  options.act = act;
  return std::make_unique<Int4Codes>(options);
}

std::unique_ptr<StorageScheme> ReadScheme(ConfigReader& group, const std::string& format) {
  const Arguments weights = ReadArguments(group.Object("weights"));
  const ActQuant act = ReadActivations(group);
  if (group.Has("output_activations"))
    group.Refuse("output_activations", "outputs are not quantised here");
  if (weights.is_float && weights.bits == 8) return Fp8(group, weights, act);
  if (weights.is_float && weights.bits == 4) return Fp4(group, weights, act);
  const bool is_packed = format == "pack-quantized" || format == "marlin-24";
  if (format == "marlin-24") group.Refuse("weights", "the layout marlin-24 is not read");
  if (!weights.is_float && (weights.bits == 4 || (weights.bits == 8 && is_packed)))
    return Int4(group, weights, act, is_packed);
  if (!weights.is_float && weights.bits == 8) return Int8(group, weights, act);
  Refuse(group, "weights", weights);
}

class Rules : public QuantizationRules {
 public:
  struct Group {
    ModuleList targets;
    std::unique_ptr<StorageScheme> scheme;
  };
  Rules(std::vector<Group> groups, ModuleList ignored)
      : groups_(std::move(groups)), ignored_(std::move(ignored)) {}

  const StorageScheme* SchemeOf(std::string_view module) const override {
    if (ignored_.Contains(module)) return nullptr;
    // A name or an expression says more than a class.
    for (const Group& group : groups_) {
      if (group.targets.Names(module)) return group.scheme.get();
    }
    for (const Group& group : groups_) {
      if (group.targets.has_class()) return group.scheme.get();
    }
    return nullptr;
  }
  std::span<const std::string_view> ignored_suffixes() const override {
    static constexpr std::string_view kSuffixes[] = {".k_scale", ".v_scale", ".q_scale"};
    return kSuffixes;
  }

 private:
  std::vector<Group> groups_;
  ModuleList ignored_;
};

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  if (config.Text("quantization_status", "compressed") != "compressed" &&
      config.Text("quantization_status") != "frozen")
    config.Refuse("quantization_status", "only compressed checkpoints are read");
  const std::string format = config.Text("format", "dense");
  if (config.Has("sparsity_config")) {
    ConfigReader sparsity = config.Object("sparsity_config");
    if (sparsity.Text("format", "dense") != "dense")
      sparsity.Refuse("format", "sparse weights are not read");
    sparsity.Ignore({"global_sparsity", "registry_requires_subclass", "sparsity_structure",
                     "ignore", "targets"});
  }
  std::vector<Rules::Group> groups;
  ConfigReader all = config.Object("config_groups");
  for (const std::string& name : all.NamesInOrder()) {
    ConfigReader group = all.Object(name);
    std::vector<std::string> targets = group.Texts("targets");
    const std::string own = group.Text("format", format);
    groups.push_back({ModuleList(std::move(targets)), ReadScheme(group, own)});
  }
  if (groups.empty()) config.Refuse("config_groups", "there is no group");
  ModuleList ignored(ListedModules(config, {"ignore"}));
  // Scales for a KV cache are a choice of the run, not of the file: --kv-dtype.
  config.Ignore({"quant_method", "quantization_status", "global_compression_ratio", "version",
                 "transform_config", "kv_cache_scheme", "run_compressed"});
  return std::make_unique<Rules>(std::move(groups), std::move(ignored));
}

}  // namespace

extern constinit const QuantizationProducer compressed_tensors_producer{
    "compressed-tensors", "LLM Compressor: fp8, int8, W4A16, W8A16, W4A8, MXFP4, NVFP4 by group",
    &Read};

}  // namespace switchyard
