// The e4m3 code as an element type of kernels that leave its scale, and 256 of it, to their caller.
#pragma once

#include <cstdint>

#include "switchyard/core/small_floats.h"

namespace switchyard::kernels {

struct E4M3Code {
  int8_t bits;
};
static_assert(sizeof(E4M3Code) == 1);

// Kernels see an e4m3 code as its value divided by this.
inline constexpr float kE4M3Unit = 256.0f;

inline float ToKernelFloat(E4M3Code code) {
  return DecodeE4M3(static_cast<uint8_t>(code.bits)) * (1.0f / kE4M3Unit);
}

}  // namespace switchyard::kernels
