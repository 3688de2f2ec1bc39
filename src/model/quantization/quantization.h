// What a checkpoint says about its quantisation: which scheme stores which module.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config_reader.h"
#include "model/quantization/scheme.h"
#include "switchyard/model/files.h"

namespace switchyard {

// The rules of one checkpoint. Schemes live as long as the rules.
class QuantizationRules {
 public:
  virtual ~QuantizationRules() = default;
  // Null: stored as plain floats. A module is what a linear layer is called, without ".weight".
  // Errors: those of the producer's rules.
  virtual const StorageScheme* SchemeOf(std::string_view module) const = 0;
  // Tensors that the producer adds and that nobody needs, by the end of their names.
  virtual std::span<const std::string_view> ignored_suffixes() const { return {}; }
};

// Rules of one scheme for everything that a list does not leave out; what most producers have.
class OneSchemeRules : public QuantizationRules {
 public:
  // `ignored_suffixes` must outlive the rules.
  OneSchemeRules(std::unique_ptr<StorageScheme> scheme, std::vector<std::string> left_out,
                 std::span<const std::string_view> ignored_suffixes = {});
  const StorageScheme* SchemeOf(std::string_view module) const override;
  std::span<const std::string_view> ignored_suffixes() const override { return ignored_suffixes_; }

 private:
  std::unique_ptr<StorageScheme> scheme_;
  std::vector<std::string> left_out_;
  std::span<const std::string_view> ignored_suffixes_;
};

// What a user may say about reading.
struct QuantizationOptions {
  bool w4a4_new_packing = false;  // setting moe-w4a4-new-packing (contract 5.4)
};

// A line of producers.def.
struct QuantizationProducer {
  std::string_view quant_method;  // as config.json spells it
  std::string_view summary;
  // Every field of `config` has to be understood: quantization_config, or the producer's own file.
  // Errors: kCorruptData, kUnsupported naming the field, expected and found.
  std::unique_ptr<QuantizationRules> (*read)(ConfigReader& config,
                                             const QuantizationOptions& options);
};

std::span<const QuantizationProducer* const> AllQuantizationProducers();

// The rules of a model folder: quantization_config (or compression_config) of config.json,
// quant_model_description*.json (ModelSlim) or hf_quant_config.json (ModelOpt). Null if there are
// none: nothing is quantised.
// Errors: those of the producers; kUnsupported naming an unknown quant_method and the known ones.
std::unique_ptr<QuantizationRules> ReadQuantization(const ModelFiles& files,
                                                    const QuantizationOptions& options);

// The rules that one config states, for tests and fuzzing.
// Errors: as ReadQuantization.
std::unique_ptr<QuantizationRules> ParseQuantization(ConfigReader& config,
                                                     const QuantizationOptions& options);

// Names of modules in fields that may be absent (modules_to_not_convert, ignored_layers, exclude).
std::vector<std::string> ListedModules(ConfigReader& config,
                                       std::initializer_list<std::string_view> fields);

}  // namespace switchyard
