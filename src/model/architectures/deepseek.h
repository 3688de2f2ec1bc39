// What the DeepSeek families have in common.
#pragma once

#include "model/architectures/architecture.h"

namespace switchyard {

// Latent attention, leading dense layers, routed and shared experts. The way experts are chosen is
// left to the family.
ModelConfig ParseDeepseek(ConfigReader& config);

// Errors: kUnsupported naming the field if the experts cannot be grouped as the config says.
void RequireGroups(ConfigReader& config, const ModelConfig& model);

}  // namespace switchyard
