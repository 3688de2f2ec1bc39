// What generation_config.json recommends.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "switchyard/model/files.h"

namespace switchyard {

// Absent fields are nullopt. Fields of the file that are not listed here have no effect.
struct GenerationDefaults {
  bool do_sample = false;  // false: greedy
  std::optional<double> temperature;
  std::optional<size_t> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::vector<size_t> eos_ids;
};

// Defaults if the file is absent. Errors: kCorruptData naming file and field.
GenerationDefaults ReadGenerationConfig(const ModelFiles& files);

}  // namespace switchyard
