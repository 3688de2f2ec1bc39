// The shapes of scale grids that several schemes share.
#pragma once

#include "switchyard/core/quant_format.h"

namespace switchyard::moe::schemes {

// One scale for the whole matrix.
inline bool IsPerTensor(const MatrixFormat& format, DType dtype, size_t rows, size_t cols) {
  return format.dtype == dtype && !format.has_zero && format.scale_rows >= rows &&
         format.scale_cols >= cols && format.is_quantized();
}

// One scale for each row of the matrix.
inline bool IsPerChannel(const MatrixFormat& format, DType dtype, size_t cols) {
  return format.dtype == dtype && !format.has_zero && format.scale_rows == 1 &&
         format.scale_cols >= cols;
}

// One scale for each group of columns of a row, or for the row.
inline bool IsGroupwise(const MatrixFormat& format, DType dtype) {
  return format.dtype == dtype && format.scale_rows == 1 && format.scale_cols != 0 &&
         format.scale_dtype != DType::kF8E8M0;
}

// OCP microscaling: a power of two for each 32 columns.
inline bool IsMx(const MatrixFormat& format, DType dtype) {
  return format.dtype == dtype && format.scale_dtype == DType::kF8E8M0 && !format.has_zero &&
         format.scale_rows == 1 && format.scale_cols == 32;
}

}  // namespace switchyard::moe::schemes
