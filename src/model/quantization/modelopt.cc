// quant_method "modelopt" (contract 5.14), and hf_quant_config.json: NVFP4 and fp8.
#include <fmt/format.h>

#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

// Scales of a KV cache, which is a choice of the run.
constexpr std::string_view kIgnoredSuffixes[] = {".k_scale", ".v_scale"};

StoredCodesOptions NvFp4(ConfigReader& config) {
  if (config.Count("group_size", 1, 65536, 16) != 16)
    config.Refuse("group_size", "NVFP4 has groups of 16");
  StoredCodesOptions options;
  options.moe_scheme = "nvfp4";
  options.dtype = DType::kF4E2M1;
  options.scale_cols = 16;
  options.scale_dtypes = {DType::kF8E4M3};
  options.tensor_scale = "weight_scale_2";
  options.unused = {{"input_scale", ScalarShapes(), {DType::kF32, DType::kBF16}, false}};
  return options;
}

StoredCodesOptions Fp8(bool per_tensor) {
  StoredCodesOptions options;
  options.moe_scheme = per_tensor ? "fp8_tensor_static" : "fp8_channel";
  options.scale_rows = per_tensor ? 0 : 1;
  options.act.kind = per_tensor ? ActQuantKind::kFp8TensorStatic : ActQuantKind::kFp8Token;
  return options;
}

std::unique_ptr<QuantizationRules> ReadRules(ConfigReader& config) {
  StoredCodesOptions options;
  const std::string algorithm = config.Text("quant_algo");
  if (algorithm == "NVFP4") {
    options = NvFp4(config);
  } else if (algorithm == "FP8" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    options = Fp8(algorithm == "FP8");
  } else {
    config.Refuse("quant_algo", "known are NVFP4, FP8 and FP8_PER_CHANNEL_PER_TOKEN");
  }
  std::vector<std::string> left_out = ListedModules(config, {"exclude_modules", "ignore"});
  config.Ignore({"quant_method", "group_size", "kv_cache_quant_algo", "kv_cache_scheme", "producer",
                 "config_groups", "has_zero_point", "pre_quant_scale"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out), kIgnoredSuffixes);
}

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  if (!config.Has("quantization")) return ReadRules(config);
  ConfigReader quantization = config.Object("quantization");
  config.Ignore({"producer"});
  return ReadRules(quantization);
}

}  // namespace

extern constinit const QuantizationProducer modelopt_producer{
    "modelopt", "NVIDIA ModelOpt: NVFP4 and fp8", &Read};

}  // namespace switchyard
