// The config.json of a model that comes from another format: the reverse of ParseModelConfig.
#pragma once

#include <string>

#include "switchyard/model/config.h"

namespace switchyard {

// JSON with the fields of transformers.
// Errors: kUnsupported naming what the family's config.json cannot say.
std::string HubConfigOf(const ModelConfig& config);

}  // namespace switchyard
