// Element access of the scalar references.
#pragma once

#include <cstddef>

#include "switchyard/core/dtype.h"
#include "switchyard/core/macros.h"

namespace switchyard::kernels {

// Element i of a float array of any dtype, exactly.
inline double ElementAt(const void* data, DType dtype, size_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[i];
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kF16: return ToFloat(static_cast<const F16*>(data)[i]);
    case DType::kBF16: return ToFloat(static_cast<const BF16*>(data)[i]);
    default: SY_CHECK(false && "a float dtype"); return 0;
  }
}

}  // namespace switchyard::kernels
