#include "switchyard/model/generation_config.h"

#include "model/config_reader.h"

namespace switchyard {

GenerationDefaults ReadGenerationConfig(const ModelFiles& files) {
  GenerationDefaults defaults;
  const std::string name = "generation_config.json";
  if (!files.Has(name)) return defaults;
  ConfigReader config = ConfigReader::Parse(files.PathOf(name), files.ReadText(name));
  defaults.do_sample = config.Flag("do_sample", false);
  defaults.temperature = config.OptionalNumber("temperature", 0.0, 100.0);
  defaults.top_k = config.OptionalCount("top_k", 0, size_t{1} << 30);
  defaults.top_p = config.OptionalNumber("top_p", 0.0, 1.0);
  defaults.min_p = config.OptionalNumber("min_p", 0.0, 1.0);
  defaults.repetition_penalty = config.OptionalNumber("repetition_penalty", 0.0, 100.0);
  defaults.eos_ids = config.Counts("eos_token_id", 0, size_t{1} << 30, {});
  return defaults;
}

}  // namespace switchyard
