// Everything that this build brings, put into a registry.
#pragma once

#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe {

// Adds every line of the .def tables. Call once, then add your own entries, then build layers.
// Errors: kInvalidArgument naming the key, if one is taken already.
void RegisterBuiltins(Registry& registry);

// A registry with the builtins and nothing else, made on first use.
const Registry& BuiltinRegistry();

}  // namespace switchyard::moe
