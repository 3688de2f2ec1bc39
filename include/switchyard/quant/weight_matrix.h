// A weight matrix as it lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"

namespace switchyard {

// [rows, cols] = [outputs, inputs] in any format; the fields are those of ExpertMatrices for one
// matrix, and what the checkpoint's scheme does with the activations that meet it. Non-owning; the
// bytes belong to a checkpoint.
struct WeightMatrix {
  MatrixFormat format;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;
  size_t scale_stride = 0;
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
  const std::byte* zero = nullptr;
  const float* tensor_scale = nullptr;
  const int32_t* column_group = nullptr;
  const float* bias = nullptr;  // [rows] that the scheme adds, in place of the layer's own
  ActQuant act;

  static WeightMatrix Dense(const std::byte* data, DType dtype, size_t rows, size_t cols) {
    WeightMatrix matrix;
    matrix.format.dtype = dtype;
    matrix.rows = rows;
    matrix.cols = matrix.stride = cols;
    matrix.data = data;
    return matrix;
  }

  DType dtype() const { return format.dtype; }
  // Where row `row` begins.
  const std::byte* RowAt(size_t row) const { return data + BytesOf(format.dtype, row * stride); }
  // A bank of this matrix alone, for the products of quant/expert_matmul.h; refers to *this.
  ExpertMatrices AsBank() const {
    ExpertMatrices bank;
    bank.format = format;
    bank.rows = rows;
    bank.cols = cols;
    bank.stride = stride;
    bank.scale_stride = scale_stride;
    bank.data = {&data, 1};
    if (scale != nullptr) bank.scale = {&scale, 1};
    if (zero != nullptr) bank.zero = {&zero, 1};
    if (tensor_scale != nullptr) bank.tensor_scale = {&tensor_scale, 1};
    if (column_group != nullptr) bank.column_group = {&column_group, 1};
    return bank;
  }
};

}  // namespace switchyard
