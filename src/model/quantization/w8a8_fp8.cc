// quant_method "w8a8_fp8": e4m3 with a scale per output.
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  StoredCodesOptions options;
  options.moe_scheme = "fp8_channel";
  options.act.kind = ActQuantKind::kFp8Token;
  std::vector<std::string> left_out = ListedModules(config, {"ignore"});
  config.Ignore({"quant_method", "is_dynamic"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer w8a8_fp8_producer{
    "w8a8_fp8", "e4m3 with a scale per output, activations e4m3 per token", &Read};

}  // namespace switchyard
