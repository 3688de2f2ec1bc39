// quant_method "mxfp4" (contract 5.10): gpt-oss. Its experts are banks of their own names, which
// the binder knows; the scheme says how one expert's rows lie in them.
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  StoredCodesOptions options;
  options.moe_scheme = "mxfp4";
  options.codes = "blocks";
  options.scale = "scales";
  options.dtype = DType::kF4E2M1;
  options.scale_cols = 32;
  options.scale_dtypes = {DType::kF8E8M0};
  std::vector<std::string> left_out = ListedModules(config, {"modules_to_not_convert"});
  config.Ignore({"quant_method", "dequantize"});
  return std::make_unique<OneSchemeRules>(std::make_unique<StoredCodes>(std::move(options)),
                                          std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer mxfp4_producer{
    "mxfp4", "gpt-oss: experts of e2m1 with a power of two per 32 inputs", &Read};

}  // namespace switchyard
