// The schemes of schemes.def.
#pragma once

#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe::schemes {

#define SY_SCHEME(name) extern const SchemeEntry name;
#include "moe/schemes/schemes.def"
#undef SY_SCHEME

inline constexpr const SchemeEntry* kBuiltin[] = {
#define SY_SCHEME(name) &name,
#include "moe/schemes/schemes.def"
#undef SY_SCHEME
};

}  // namespace switchyard::moe::schemes
