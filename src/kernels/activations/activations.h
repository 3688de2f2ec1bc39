// The built-in activations, by the name of their formula.
#pragma once

#include <span>
#include <string_view>

#include "switchyard/core/activation.h"

namespace switchyard::kernels {

// The lines of activations.def.
std::span<const ActivationEntry> AllActivations();

// Errors: kNotFound listing the known names, with the closest first.
const ActivationEntry& FindActivation(std::string_view name);

}  // namespace switchyard::kernels
