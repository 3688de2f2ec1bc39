// A weight matrix as it lies in memory.
#pragma once

#include <cstddef>

#include "switchyard/core/dtype.h"

namespace switchyard {

// [rows, cols] = [outputs, inputs], row-major, row i at data + i * stride elements. Non-owning; the
// bytes belong to a checkpoint. The stride is a multiple of DTypeBlock(dtype).
struct WeightMatrix {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;

  const std::byte* RowAt(size_t row) const { return data + row * BytesOf(dtype, stride); }
};

}  // namespace switchyard
