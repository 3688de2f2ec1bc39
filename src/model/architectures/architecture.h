// The model families, by name. Adding one: a file here and a line in architectures.def.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "model/config_reader.h"
#include "switchyard/model/config.h"

namespace switchyard {

struct ArchitectureEntry {
  std::string_view name;        // config.json "model_type"
  std::string_view class_name;  // config.json "architectures"[0]
  std::string_view summary;
  // Reads every field of config.json that it knows; the caller calls Finish, which refuses the
  // rest.
  ModelConfig (*parse)(ConfigReader& config);
};

// The lines of architectures.def.
std::span<const ArchitectureEntry* const> AllArchitectures();

// The architecture of a config.json, and its config.
// Errors: kUnsupported listing the known names; all those of ConfigReader.
ModelConfig ParseModelConfig(ConfigReader config);

// What all families share: sizes, heads, norms, rope, token ids; and the fields that have no effect
// on inference.
ModelConfig ParseCommonConfig(ConfigReader& config, double default_theta);
// The same of a family whose heads have parts: `rotary_dim` of its `head_dim` values are rotated.
ModelConfig ParseCommonConfig(ConfigReader& config, double default_theta, size_t head_dim,
                              size_t rotary_dim);

inline constexpr size_t kMaxSize = size_t{1} << 24;  // of any width, count or index in a config
inline constexpr size_t kMaxExperts = 65534;         // of a layer: ids travel as 16-bit numbers
inline constexpr size_t kMaxHeadGroup = 512;         // query heads that share a key head

}  // namespace switchyard
