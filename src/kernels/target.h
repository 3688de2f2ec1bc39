// Which of Highway's targets kernels dispatch to; tests use it to prove that they ran what they
// name.
#pragma once

#include <cstdint>

namespace switchyard::kernels {

// The target (one bit of hwy/detect_targets.h) that a dispatched kernel call runs on now.
int64_t DispatchedTarget();

}  // namespace switchyard::kernels
