// The runners of runners.def and the permute pairs of permutes.def.
#pragma once

#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe::runners {

#define SY_RUNNER(name) extern const RunnerEntry name;
#include "moe/runners/runners.def"
#undef SY_RUNNER
#define SY_PERMUTE(runner, format) extern const PermuteEntry runner##_##format;
#include "moe/runners/permutes.def"
#undef SY_PERMUTE

inline constexpr const RunnerEntry* kBuiltin[] = {
#define SY_RUNNER(name) &name,
#include "moe/runners/runners.def"
#undef SY_RUNNER
};

inline constexpr const PermuteEntry* kBuiltinPermutes[] = {
#define SY_PERMUTE(runner, format) &runner##_##format,
#include "moe/runners/permutes.def"
#undef SY_PERMUTE
};

}  // namespace switchyard::moe::runners
