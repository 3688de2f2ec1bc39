// Views of activations: rows of floats with a stride.
#pragma once

#include <cstddef>
#include <span>

#include "switchyard/core/macros.h"

namespace switchyard {

// [rows, cols] of T, row i at data + i * stride (elements). Non-owning; empty when rows == 0.
template <typename T>
struct RowsView {
  T* data = nullptr;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;

  RowsView() = default;
  RowsView(T* data_in, size_t rows_in, size_t cols_in, size_t stride_in)
      : data(data_in), rows(rows_in), cols(cols_in), stride(stride_in) {}
  RowsView(T* data_in, size_t rows_in, size_t cols_in)
      : RowsView(data_in, rows_in, cols_in, cols_in) {}
  // A mutable view converts to a read-only one.
  template <typename U>
    requires(std::is_same_v<const U, T>)
  RowsView(const RowsView<U>& other)  // NOLINT(google-explicit-constructor)
      : RowsView(other.data, other.rows, other.cols, other.stride) {}

  T* Row(size_t i) const {
    SY_DCHECK(i < rows);
    return data + i * stride;
  }
  std::span<T> RowSpan(size_t i) const { return {Row(i), cols}; }
  RowsView Slice(size_t first, size_t count) const {
    SY_DCHECK(first + count <= rows);
    return RowsView(data + first * stride, count, cols, stride);
  }
};

using Rows = RowsView<float>;
using ConstRows = RowsView<const float>;

}  // namespace switchyard
