#include "default_model.h"

#include <array>

// Made by default_model.S.in: the first byte of a file, and the one behind its last.
#define SY_EMBED(symbol)                                                                \
  extern "C" __attribute__((visibility("hidden"))) const std::byte sy_embed_##symbol[]; \
  extern "C" __attribute__((visibility("hidden"))) const std::byte sy_embed_##symbol##_end[];
SY_EMBED(config)
SY_EMBED(generation_config)
SY_EMBED(weights)
SY_EMBED(tokenizer)
SY_EMBED(tokenizer_config)
#undef SY_EMBED

namespace switchyard {

std::span<const EmbeddedFile> DefaultModelFiles() {
  static const std::array files = {
      EmbeddedFile{"config.json", {sy_embed_config, sy_embed_config_end}},
      EmbeddedFile{"generation_config.json",
                   {sy_embed_generation_config, sy_embed_generation_config_end}},
      EmbeddedFile{"model.safetensors", {sy_embed_weights, sy_embed_weights_end}},
      EmbeddedFile{"tokenizer.json", {sy_embed_tokenizer, sy_embed_tokenizer_end}},
      EmbeddedFile{"tokenizer_config.json",
                   {sy_embed_tokenizer_config, sy_embed_tokenizer_config_end}},
  };
  return files;
}

}  // namespace switchyard
