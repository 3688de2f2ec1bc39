// The dispatchers of dispatchers.def.
#pragma once

#include <span>

#include "switchyard/moe/contract/dispatcher.h"

namespace switchyard::moe::dispatchers {

#define SY_DISPATCHER(name) extern const DispatcherEntry name;
#include "moe/dispatchers/dispatchers.def"
#undef SY_DISPATCHER

inline constexpr const DispatcherEntry* kBuiltin[] = {
#define SY_DISPATCHER(name) &name,
#include "moe/dispatchers/dispatchers.def"
#undef SY_DISPATCHER
};

}  // namespace switchyard::moe::dispatchers
