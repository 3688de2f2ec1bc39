// quant_method "awq" (contract 5.6): AutoAWQ's gemm layout.
#include <fmt/format.h>

#include "model/quantization/quantization.h"
#include "model/quantization/repacked_codes.h"

namespace switchyard {
namespace {

// Fields that came under two names over time.
size_t EitherCount(ConfigReader& config, std::string_view name, std::string_view older, size_t min,
                   size_t max) {
  return config.Count(config.Has(name) || !config.Has(older) ? name : older, min, max);
}

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  if (EitherCount(config, "bits", "w_bit", 1, 32) != 4)
    config.Refuse(config.Has("bits") ? "bits" : "w_bit", "AWQ has 4 bits");
  const size_t group = EitherCount(config, "group_size", "q_group_size", 1, 65536);
  if (!config.Flag("zero_point", true))
    config.Refuse("zero_point", "AWQ without zero points is not known");
  if (config.Text("version", "gemm") != "gemm" && config.Text("version", "gemm") != "GEMM")
    config.Refuse("version", "only the gemm layout is read");
  std::vector<std::string> left_out = ListedModules(config, {"modules_to_not_convert"});
  config.Ignore({"quant_method", "bits", "w_bit", "group_size", "q_group_size", "backend",
                 "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"});
  return std::make_unique<OneSchemeRules>(std::make_unique<AwqCodes>(group), std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer awq_producer{
    "awq", "4-bit groups with zero points (AutoAWQ, gemm layout)", &Read};

}  // namespace switchyard
