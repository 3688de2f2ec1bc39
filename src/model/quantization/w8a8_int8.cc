// quant_method "w8a8_int8" (contract 5.9).
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  StoredCodesOptions options;
  options.moe_scheme = "w8a8_int8";
  options.dtype = DType::kI8;
  options.act.kind = ActQuantKind::kInt8Token;
  std::vector<std::string> left_out = ListedModules(config, {"ignore"});
  config.Ignore({"quant_method"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer w8a8_int8_producer{
    "w8a8_int8", "int8 with a scale per output, activations int8 per token", &Read};

}  // namespace switchyard
