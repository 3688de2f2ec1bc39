#include "model/quantization/quantization.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/quantization/module_rules.h"
#include "switchyard/core/error.h"

namespace switchyard {

#define SY_PRODUCER(name) extern const QuantizationProducer name##_producer;
#include "model/quantization/producers.def"
#undef SY_PRODUCER

namespace {

constexpr const QuantizationProducer* kProducers[] = {
#define SY_PRODUCER(name) &name##_producer,
#include "model/quantization/producers.def"
#undef SY_PRODUCER
};

const QuantizationProducer& FindProducer(const std::string& file, const std::string& method) {
  std::vector<std::string_view> known;
  for (const QuantizationProducer* producer : kProducers) {
    if (producer->quant_method == method) return *producer;
    known.push_back(producer->quant_method);
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: quantization_config.quant_method is {}; known are {}", file,
                          QuoteForMessage(method), fmt::join(known, ", ")));
}

// All errors begin with the name of the file.
std::unique_ptr<QuantizationRules> ReadRules(const std::string& method, ConfigReader& config,
                                             const QuantizationOptions& options) {
  const QuantizationProducer& producer = FindProducer(config.file_name(), method);
  try {
    std::unique_ptr<QuantizationRules> rules = producer.read(config, options);
    config.Finish();
    return rules;
  } catch (const Error& error) {  // of an expression, which knows no file
    if (error.message().starts_with(config.file_name())) throw;
    throw Error(error.code(), fmt::format("{}: {}", config.file_name(), error.message()));
  }
}

// The file of this name, or one that is named after the scheme too.
std::string FindDescription(const ModelFiles& files) {
  for (const std::string& name : files.Names()) {
    if (name.starts_with("quant_model_description") && name.ends_with(".json")) return name;
  }
  return {};
}

std::unique_ptr<QuantizationRules> ReadFile(const ModelFiles& files, const std::string& name,
                                            std::string_view method,
                                            const QuantizationOptions& options) {
  ConfigReader config = ConfigReader::Parse(files.PathOf(name), files.ReadText(name));
  return ReadRules(std::string(method), config, options);
}

}  // namespace

std::span<const QuantizationProducer* const> AllQuantizationProducers() { return kProducers; }

OneSchemeRules::OneSchemeRules(std::unique_ptr<StorageScheme> scheme,
                               std::vector<std::string> left_out,
                               std::span<const std::string_view> ignored_suffixes)
    : scheme_(std::move(scheme)),
      left_out_(std::move(left_out)),
      ignored_suffixes_(ignored_suffixes) {}

const StorageScheme* OneSchemeRules::SchemeOf(std::string_view module) const {
  const bool is_left_out = std::ranges::any_of(
      left_out_, [&](const std::string& line) { return NamesModule(line, module); });
  return is_left_out ? nullptr : scheme_.get();
}

std::vector<std::string> ListedModules(ConfigReader& config,
                                       std::initializer_list<std::string_view> fields) {
  std::vector<std::string> modules;
  for (std::string_view field : fields) {
    if (!config.Has(field)) continue;
    for (std::string& module : config.Texts(field)) modules.push_back(std::move(module));
  }
  return modules;
}

std::unique_ptr<QuantizationRules> ParseQuantization(ConfigReader& config,
                                                     const QuantizationOptions& options) {
  std::string method = config.Text("quant_method");
  if (method.starts_with("modelopt_")) method = "modelopt";  // "modelopt_fp4"
  return ReadRules(method, config, options);
}

std::unique_ptr<QuantizationRules> ReadQuantization(const ModelFiles& files,
                                                    const QuantizationOptions& options) {
  const std::string description = FindDescription(files);
  ConfigReader config =
      ConfigReader::Parse(files.PathOf("config.json"), files.ReadText("config.json"));
  for (std::string_view name : {"quantization_config", "compression_config"}) {
    if (!config.Has(name)) continue;
    ConfigReader quantization = config.Object(name);
    // ModelSlim's engines name themselves there; the rules are in its own file.
    if (!description.empty() && quantization.Has("quant_method") &&
        (quantization.Text("quant_method") == "ascend" ||
         quantization.Text("quant_method") == "modelslim"))
      break;
    return ParseQuantization(quantization, options);
  }
  if (!description.empty()) return ReadFile(files, description, "modelslim", options);
  constexpr std::string_view kModelOpt = "hf_quant_config.json";
  if (files.Has(kModelOpt)) return ReadFile(files, std::string(kModelOpt), "modelopt", options);
  return nullptr;
}

}  // namespace switchyard
