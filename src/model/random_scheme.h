// How the weights of a random model lie: as a checkpoint of a known scheme has them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "model/quantization/quantization.h"
#include "switchyard/core/dtype.h"
#include "switchyard/model/config.h"

namespace switchyard {

struct RandomScheme {
  std::string_view name;  // "w4a16_g128"
  DType dtype;            // of plain matrices and of vectors; f32 of the latter, and of routers, if
                          // these are blocks of ggml
  std::string_view rules = {};     // quantization_config but for the field `left_out`; or none
  std::string_view left_out = {};  // names the modules that are plain
  DType codes = DType::kF32;       // that rules store, packed or not: kI8 kF8E4M3 kU4 kF4E2M1
  DType scale_dtype = DType::kF32;
  size_t group = 0;               // inputs of a scale, which must divide those of a matrix; 0 = any
  uint32_t zeros = 0;             // words of zero points
  bool repacks = false;           // codes are copied on loading, so that the source's may be shared
  bool banks_in_gpt_oss = false;  // experts of gpt-oss lie in its own banks
};

// Errors: kNotFound with the closest known name and all others.
const RandomScheme& FindRandomScheme(std::string_view name);

// Whether the experts are gpt-oss's banks of codes.
bool HasMxfp4Banks(const RandomScheme& scheme, const ModelConfig& config);

// The config with experts as a checkpoint of this scheme has them: transposed banks are of floats
// alone, and one matrix for each expert has no bias.
ModelConfig ConfigFor(const RandomScheme& scheme, ModelConfig config);

// Null if there are none. Routers, embedding and head stay as they are, and MLPs of dense layers
// whose inputs do not fill groups: so do producers.
std::unique_ptr<QuantizationRules> RulesFor(const RandomScheme& scheme, const ModelConfig& config);

}  // namespace switchyard
