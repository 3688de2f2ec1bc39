// inspect --placement: which rank, NUMA node and memory holds what.
#pragma once

#include <string>

#include "switchyard/core/settings.h"

namespace switchyard::cli {

// Loads the model on all ranks and prints one line for each: its node, CPUs and threads, its
// experts, and how much of their memory is on its node. Errors: those of loading.
int InspectPlacement(const std::string& model, bool json, const Settings& settings);

}  // namespace switchyard::cli
