// quant_method "quark" (contract 5.11): AMD's MXFP4, fp8 and int8, by layer.
#include <fmt/format.h>

#include "model/quantization/module_rules.h"
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

// "weight" or "input_tensors".
struct Spec {
  std::string dtype;
  std::string qscheme;
  size_t group = 0;
  bool is_dynamic = false;
  MxScaleRule rule = MxScaleRule::kOcpFloor;
};

MxScaleRule ReadRule(ConfigReader& config) {
  const std::string mode = config.Text("scale_calculation_mode", "even");
  if (mode == "even") return MxScaleRule::kEven;
  if (mode == "floor") return MxScaleRule::kOcpFloor;
  if (mode == "ceil") return MxScaleRule::kCeil;
  config.Refuse("scale_calculation_mode", "known are even, floor and ceil");
}

Spec ReadSpec(ConfigReader config) {
  Spec spec;
  spec.dtype = config.Text("dtype");
  spec.qscheme = config.Text("qscheme", "per_tensor");
  if (spec.qscheme != "per_tensor" && spec.qscheme != "per_channel" && spec.qscheme != "per_group")
    config.Refuse("qscheme", "known are per_tensor, per_channel and per_group");
  if (config.Has("group_size")) spec.group = config.Count("group_size", 1, 65536);
  spec.is_dynamic = config.Flag("is_dynamic", false);
  spec.rule = ReadRule(config);
  if (spec.dtype == "fp4" && config.Text("scale_format", "e8m0") != "e8m0")
    config.Refuse("scale_format", "fp4 weights with e8m0 scales are read");
  if (config.Text("round_method", "half_even") != "half_even")
    config.Refuse("round_method", "only half_even is known");
  if (config.Flag("is_scale_quant", false))
    config.Refuse("is_scale_quant", "quantised scales are not read");
  config.Ignore({"ch_axis", "mx_element_dtype", "observer_cls", "scale_type", "symmetric",
                 "zero_point_type", "qat_spec"});
  return spec;
}

bool IsMx(const Spec& spec) { return spec.qscheme == "per_group" && spec.group == 32; }

ActQuant ReadActivations(const ConfigReader& group, const Spec& spec) {
  ActQuant act;
  act.mx_rule = spec.rule;
  if (spec.dtype == "fp4" && IsMx(spec) && spec.is_dynamic) {
    act.kind = ActQuantKind::kMxFp4;
  } else if (spec.dtype == "fp8_e4m3" && IsMx(spec) && spec.is_dynamic) {
    act.kind = ActQuantKind::kMxFp8;
  } else if (spec.dtype == "fp8_e4m3" && !IsMx(spec)) {
    act.kind = spec.is_dynamic ? ActQuantKind::kFp8Token : ActQuantKind::kFp8TensorStatic;
  } else if (spec.dtype == "int8") {
    act.kind = spec.is_dynamic ? ActQuantKind::kInt8Token : ActQuantKind::kInt8Static;
  } else {
    group.Refuse("input_tensors", fmt::format("{} {} is not read", spec.dtype, spec.qscheme));
  }
  return act;
}

std::string_view Mxfp4Scheme(ActQuantKind act) {
  switch (act) {
    case ActQuantKind::kNone: return "mxfp4";
    case ActQuantKind::kMxFp4: return "mxfp4_w4a4";
    case ActQuantKind::kMxFp8: return "mxfp4_w4a8";
    case ActQuantKind::kFp8TensorStatic: return "mxfp4_fp8_static";
    default: return "";
  }
}

std::unique_ptr<StorageScheme> ReadScheme(ConfigReader& group) {
  for (std::string_view name : {"output_tensors", "bias"}) {
    if (group.Has(name)) group.Refuse(name, "outputs and biases are not quantised here");
  }
  group.Ignore({"target_device"});
  if (!group.Has("weight")) {
    group.Ignore({"input_tensors"});
    return nullptr;
  }
  const Spec weight = ReadSpec(group.Object("weight"));
  StoredCodesOptions options;
  if (group.Has("input_tensors"))
    options.act = ReadActivations(group, ReadSpec(group.Object("input_tensors")));
  const ActQuantKind act = options.act.kind;
  if (weight.dtype == "fp4" && IsMx(weight)) {
    options.dtype = DType::kF4E2M1;
    options.scale_cols = 32;
    options.scale_dtypes = {DType::kF8E8M0};
    options.moe_scheme = Mxfp4Scheme(act);
  } else if (weight.dtype == "fp8_e4m3" && weight.qscheme != "per_group") {
    options.scale_rows = weight.qscheme == "per_tensor" ? 0 : 1;
    options.moe_scheme = act == ActQuantKind::kFp8Token          ? "fp8_channel"
                         : act == ActQuantKind::kFp8TensorStatic ? "fp8_tensor_static"
                         : act == ActQuantKind::kNone            ? "fp8_weights"
                                                                 : "";
  } else if (weight.dtype == "int8" && weight.qscheme != "per_group") {
    options.dtype = DType::kI8;
    options.scale_rows = weight.qscheme == "per_tensor" ? 0 : 1;
    options.moe_scheme = act == ActQuantKind::kInt8Token    ? "w8a8_int8"
                         : act == ActQuantKind::kInt8Static ? "w8a8_int8_static"
                                                            : "";
  }
  if (options.moe_scheme.empty())
    group.Refuse("weight", fmt::format("{} {} with these activations is not read", weight.dtype,
                                       weight.qscheme));
  return std::make_unique<StoredCodes>(std::move(options));
}

class Rules : public QuantizationRules {
 public:
  struct Layer {
    std::string glob;
    std::unique_ptr<StorageScheme> scheme;
  };
  std::unique_ptr<StorageScheme> global;
  std::vector<Layer> layers;
  ModuleList excluded;

  const StorageScheme* SchemeOf(std::string_view module) const override {
    if (excluded.Contains(module)) return nullptr;
    for (const Layer& layer : layers) {
      if (MatchesGlob(layer.glob, module)) return layer.scheme.get();
    }
    return global.get();
  }
};

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  auto rules = std::make_unique<Rules>();
  ConfigReader global = config.Object("global_quant_config");
  rules->global = ReadScheme(global);
  if (config.Has("layer_quant_config")) {
    ConfigReader layers = config.Object("layer_quant_config");
    for (const std::string& name : layers.NamesInOrder()) {
      ConfigReader layer = layers.Object(name);
      rules->layers.push_back({name, ReadScheme(layer)});
    }
  }
  if (config.Has("layer_type_quant_config")) {
    ConfigReader types = config.Object("layer_type_quant_config");
    if (!types.Names().empty())
      config.Refuse("layer_type_quant_config", "schemes by type of layer are not read");
  }
  rules->excluded = ModuleList(ListedModules(config, {"exclude"}));
  if (config.Has("export")) {
    ConfigReader exported = config.Object("export");
    if (exported.Text("weight_format", "real_quantized") != "real_quantized")
      exported.Refuse("weight_format", "only real_quantized is read");
    exported.Ignore({"kv_cache_group", "min_kv_scale", "pack_method", "weight_merge_groups"});
  }
  if (config.Has("algo_config")) config.Ignore({"algo_config"});  // how the codes were chosen
  config.Ignore({"quant_method", "kv_cache_post_rope", "kv_cache_quant_config", "quant_mode",
                 "softmax_quant_spec", "version"});
  return rules;
}

}  // namespace

extern constinit const QuantizationProducer quark_producer{
    "quark", "AMD Quark: MXFP4 with MXFP4, MXFP8 or fp8 activations, fp8, int8", &Read};

}  // namespace switchyard
