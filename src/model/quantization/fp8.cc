// quant_method "fp8" (contract 5.2): DeepSeek's and Qwen's blocks, or one scale per matrix.
#include <fmt/format.h>

#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

StoredCodesOptions Blocks(ConfigReader& config, bool is_static) {
  const std::vector<size_t> block = config.Counts("weight_block_size", 1, 65536);
  if (block.size() != 2)
    config.Refuse("weight_block_size", "expected two sizes: outputs and inputs of a block");
  if (is_static)
    config.Refuse("activation_scheme", "blocks of weights go with dynamic activations");
  StoredCodesOptions options;
  options.moe_scheme = "fp8_block";
  options.scale = "weight_scale_inv";
  options.scale_rows = block[0];
  options.scale_cols = block[1];
  options.scale_dtypes.push_back(DType::kF8E8M0);
  options.act.kind = ActQuantKind::kFp8Group;
  options.act.group = block[1];
  return options;
}

// Dynamic scales are per token: one per batch would let an answer depend on its neighbours.
StoredCodesOptions PerTensor(bool is_static) {
  StoredCodesOptions options;
  options.moe_scheme = is_static ? "fp8_tensor_static" : "fp8_channel";
  options.scale_rows = 0;
  options.act.kind = is_static ? ActQuantKind::kFp8TensorStatic : ActQuantKind::kFp8Token;
  return options;
}

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  for (std::string_view name : {"fmt", "weight_dtype"}) {
    if (config.Has(name) && config.Text(name) != "e4m3")
      config.Refuse(name, "only e4m3 weights are read");
  }
  const std::string activations = config.Text("activation_scheme", "dynamic");
  if (activations != "dynamic" && activations != "static")
    config.Refuse("activation_scheme", "known are dynamic and static");
  const bool is_static = activations == "static";
  StoredCodesOptions options =
      config.Has("weight_block_size") ? Blocks(config, is_static) : PerTensor(is_static);
  const std::string scale_format = config.Text("scale_fmt", "float");
  if (scale_format != "float" && scale_format != "ue8m0")
    config.Refuse("scale_fmt", "known are float and ue8m0");
  options.act.power_of_two_scale = scale_format == "ue8m0";
  std::vector<std::string> left_out =
      ListedModules(config, {"ignored_layers", "modules_to_not_convert"});
  config.Ignore({"quant_method", "is_checkpoint_fp8_serialized", "dequantize", "kv_cache_scheme"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer fp8_producer{
    "fp8", "DeepSeek's and Qwen's e4m3 in blocks, or with one scale per matrix", &Read};

}  // namespace switchyard
