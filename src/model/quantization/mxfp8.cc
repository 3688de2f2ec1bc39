// quant_method "mxfp8" (contract 5.2): e4m3 with a power of two for 32 inputs.
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  StoredCodesOptions options;
  options.moe_scheme = "mxfp8";
  options.scale = config.Text("scale_name", "weight_scale_inv") == "weight_scale"
                      ? "weight_scale"
                      : "weight_scale_inv";
  options.scale_cols = 32;
  options.scale_dtypes = {DType::kF8E8M0};
  options.act.kind = ActQuantKind::kMxFp8;
  if (config.Has("weight_block_size") &&
      config.Counts("weight_block_size", 1, 65536) != std::vector<size_t>{1, 32})
    config.Refuse("weight_block_size", "mxfp8 has blocks of [1, 32]");
  if (config.Text("activation_scheme", "dynamic") != "dynamic")
    config.Refuse("activation_scheme", "mxfp8 activations are dynamic");
  std::vector<std::string> left_out =
      ListedModules(config, {"ignored_layers", "modules_to_not_convert"});
  config.Ignore({"quant_method", "fmt", "scale_fmt"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer mxfp8_producer{
    "mxfp8", "e4m3 with a power of two per 32 inputs, activations the same", &Read};

}  // namespace switchyard
