// The shapes of scale grids that several schemes share.
#pragma once

#include <algorithm>

#include "switchyard/core/quant_format.h"

namespace switchyard::moe::schemes {

// Types that every runner reads scales of.
inline bool HasFloatScales(const MatrixFormat& format) {
  return format.scale_dtype == DType::kF32 || format.scale_dtype == DType::kF16 ||
         format.scale_dtype == DType::kBF16;
}

// Some grid of scales that every runner reads, powers of two among them.
inline bool HasGrid(const MatrixFormat& format) {
  return format.scale_rows != 0 && format.scale_cols != 0 &&
         (HasFloatScales(format) || format.scale_dtype == DType::kF8E8M0);
}

// One scale for the whole matrix.
inline bool IsPerTensor(const MatrixFormat& format, DType dtype, size_t rows, size_t cols) {
  return format.dtype == dtype && HasFloatScales(format) && !format.has_zero &&
         format.is_quantized() && format.scale_rows >= rows && format.scale_cols >= cols;
}

// One scale for each row of the matrix.
inline bool IsPerChannel(const MatrixFormat& format, DType dtype, size_t cols) {
  return format.dtype == dtype && HasFloatScales(format) && !format.has_zero &&
         format.scale_rows == 1 && format.scale_cols >= std::max<size_t>(1, cols);
}

// One scale for each group of columns of a row, or for the row.
inline bool IsGroupwise(const MatrixFormat& format, DType dtype) {
  return format.dtype == dtype && HasFloatScales(format) && format.scale_rows == 1 &&
         format.scale_cols != 0;
}

// OCP microscaling: a power of two for each 32 columns.
inline bool IsMx(const MatrixFormat& format, DType dtype) {
  return format.dtype == dtype && format.scale_dtype == DType::kF8E8M0 && !format.has_zero &&
         format.scale_rows == 1 && format.scale_cols == 32;
}

}  // namespace switchyard::moe::schemes
