// Shapes of well-known models, for measurements with random weights.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "switchyard/model/config.h"

namespace switchyard {

// Names that KnownShape takes.
std::vector<std::string_view> KnownShapes();

// The shape by name ("olmoe-1b-7b"), cut to its first `layers` layers (0 = all).
// Errors: kNotFound with the closest known name; kInvalidArgument if the model has fewer layers.
// Source: the models' published config.json.
ModelConfig KnownShape(std::string_view name, size_t layers);

// Names of the ways in which Model::Random stores weights: "bf16", "w4a16_g128", "q4_k".
std::vector<std::string_view> RandomSchemes();

}  // namespace switchyard
