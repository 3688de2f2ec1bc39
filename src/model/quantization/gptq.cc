// quant_method "gptq" (contract 5.8): 4 or 8 bits, v1 and v2 zero points, desc_act.
#include <fmt/format.h>

#include <map>

#include "model/quantization/module_rules.h"
#include "model/quantization/quantization.h"
#include "model/quantization/repacked_codes.h"

namespace switchyard {
namespace {

class GptqRules : public QuantizationRules {
 public:
  // A line of "dynamic": for modules that match, other options, or none at all.
  struct Override {
    ModuleRegex modules;
    std::unique_ptr<GptqCodes> scheme;  // null: not quantised
  };
  GptqRules(const GptqCodes::Options& options, std::vector<Override> overrides,
            std::vector<std::string> left_out, bool quantises_head)
      : scheme_(options),
        overrides_(std::move(overrides)),
        left_out_(std::move(left_out)),
        quantises_head_(quantises_head) {}

  const StorageScheme* SchemeOf(std::string_view module) const override {
    if (module == "lm_head" && !quantises_head_) return nullptr;
    for (const Override& line : overrides_) {
      if (line.modules.Matches(module)) return line.scheme.get();
    }
    for (const std::string& line : left_out_) {
      if (NamesModule(line, module)) return nullptr;
    }
    return &scheme_;
  }

 private:
  GptqCodes scheme_;
  std::vector<Override> overrides_;
  std::vector<std::string> left_out_;
  bool quantises_head_;
};

size_t Bits(ConfigReader& config, size_t otherwise) {
  const size_t bits = config.Count("bits", 1, 32, otherwise);
  if (bits != 4 && bits != 8) config.Refuse("bits", "GPTQ with 4 and 8 bits is read");
  return bits;
}

// -1 means one group.
size_t Group(ConfigReader& config, size_t otherwise) {
  if (!config.Has("group_size")) return otherwise;
  const double group = config.Number("group_size", -1, 65536);
  if (group == -1) return 0;
  return config.Count("group_size", 1, 65536);
}

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  GptqCodes::Options options;
  options.bits = Bits(config, 4);
  options.group = Group(config, 128);
  const std::string format = config.Text("checkpoint_format", "gptq");
  if (format != "gptq" && format != "gptq_v2")
    config.Refuse("checkpoint_format", "known are gptq and gptq_v2");
  options.is_v2 = format == "gptq_v2";
  // With static groups the columns keep their places.
  options.has_order = config.Flag("desc_act", false) && !config.Flag("static_groups", false);
  config.Flag("sym", true);  // the zero points are in the file
  std::vector<GptqRules::Override> overrides;
  if (config.Has("dynamic")) {
    ConfigReader dynamic = config.Object("dynamic");
    for (const std::string& name : dynamic.NamesInOrder()) {
      ConfigReader line = dynamic.Object(name);
      GptqRules::Override parsed{
          ModuleRegex(name.starts_with("-:") || name.starts_with("+:") ? name.substr(2) : name),
          nullptr};
      if (!name.starts_with("-:")) {
        GptqCodes::Options other = options;
        other.bits = Bits(line, options.bits);
        other.group = Group(line, options.group);
        parsed.scheme = std::make_unique<GptqCodes>(other);
      }
      line.Ignore({"sym", "desc_act", "mse"});
      overrides.push_back(std::move(parsed));
    }
  }
  const bool quantises_head = config.Flag("lm_head", false);
  std::vector<std::string> left_out = ListedModules(config, {"modules_to_not_convert"});
  config.Ignore({"quant_method",
                 "group_size",
                 "damp_percent",
                 "damp_auto_increment",
                 "model_file_base_name",
                 "model_name_or_path",
                 "true_sequential",
                 "static_groups",
                 "modules_in_block_to_quantize",
                 "dataset",
                 "tokenizer",
                 "use_cuda_fp16",
                 "use_exllama",
                 "disable_exllama",
                 "max_input_length",
                 "batch_size",
                 "backend",
                 "block_name_to_quantize",
                 "cache_block_outputs",
                 "exllama_config",
                 "meta",
                 "model_seqlen",
                 "module_name_preceding_first_block",
                 "pad_token_id",
                 "quantizer",
                 "pack_dtype",
                 "is_marlin_format",
                 "uri",
                 "hyb_act"});
  return std::make_unique<GptqRules>(options, std::move(overrides), std::move(left_out),
                                     quantises_head);
}

}  // namespace

extern constinit const QuantizationProducer gptq_producer{
    "gptq", "4- or 8-bit groups with zero points, in any order of columns", &Read};

}  // namespace switchyard
