// The metadata of a GGUF file that is made from a model in another format: the reverse of
// ReadGgufConfig.
#pragma once

#include <string_view>

#include "switchyard/model/config.h"
#include "switchyard/model/gguf.h"

namespace switchyard {

// Name of the architecture in GGUF: "qwen3moe" for "qwen3_moe".
// Errors: kUnsupported if the format has none that this engine knows.
std::string_view GgufArchitectureOf(const ModelConfig& config);

// Sets general.architecture and all keys of the architecture. Latent attention is described as
// newer files have it, with the keys' and values' matrices apart. What no key can say is left for
// RequireSameConfig to find.
void SetGgufConfig(const ModelConfig& config, GgufWriter& writer);

}  // namespace switchyard
