#include "quant/matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::quant {

QuantMatrix QuantMatrix::Make(MatrixFormat format, size_t rows, size_t cols) {
  const bool has_scales = format.scale_rows != 0 || format.scale_cols != 0 || format.has_zero;
  QuantMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.stride = CeilDiv(cols, DTypeBlock(format.dtype)) * DTypeBlock(format.dtype);
  matrix.data.resize(BytesOf(format.dtype, rows * matrix.stride));
  if (has_scales) {
    if (format.scale_rows == 0) format.scale_rows = std::max<size_t>(1, rows);
    if (format.scale_cols == 0) format.scale_cols = std::max<size_t>(1, cols);
    matrix.scale_stride = CeilDiv(cols, format.scale_cols);
    const size_t count = CeilDiv(rows, format.scale_rows) * matrix.scale_stride;
    matrix.scale.resize(count * DTypeBytes(format.scale_dtype));
    if (format.has_zero) matrix.zero.resize(count);
  }
  matrix.format = format;
  return matrix;
}

void QuantMatrix::SetCode(size_t n, size_t k, int code) {
  SY_DCHECK(n < rows && k < cols);
  const size_t at = n * stride + k;
  if (DTypeBits(format.dtype) == 8) {
    data[at] = static_cast<std::byte>(code & 255);
    return;
  }
  std::byte& byte = data[at / 2];
  const auto nibble = static_cast<unsigned>(code & 15);
  byte = at % 2 == 0 ? (byte & std::byte{0xf0}) | static_cast<std::byte>(nibble)
                     : (byte & std::byte{0x0f}) | static_cast<std::byte>(nibble << 4);
}

void QuantMatrix::SetScale(size_t i, size_t j, float value) {
  std::byte* at = scale.data() + (i * scale_stride + j) * DTypeBytes(format.scale_dtype);
  const F16 f16 = ToF16(value);
  const BF16 bf16 = ToBF16(value);
  switch (format.scale_dtype) {
    case DType::kF16: std::memcpy(at, &f16, 2); break;
    case DType::kBF16: std::memcpy(at, &bf16, 2); break;
    case DType::kF8E8M0:
      *at = static_cast<std::byte>(std::isnan(value) ? 255 : EncodeE8M0(std::ilogb(value)));
      break;
    case DType::kF8E4M3: *at = static_cast<std::byte>(EncodeE4M3(value)); break;
    default: std::memcpy(at, &value, 4); break;
  }
}

WeightMatrix QuantMatrix::View() const {
  WeightMatrix view;
  view.format = format;
  view.rows = rows;
  view.cols = cols;
  view.stride = stride;
  view.scale_stride = scale_stride;
  view.data = data.data();
  if (format.is_quantized()) view.scale = scale.data();
  if (format.has_zero) view.zero = zero.data();
  if (format.has_tensor_scale) view.tensor_scale = &tensor_scale;
  if (format.has_column_groups) view.column_group = column_group.data();
  return view;
}

MatrixBank::MatrixBank(std::vector<QuantMatrix> matrices) : matrices_(std::move(matrices)) {
  for (const QuantMatrix& matrix : matrices_) {
    const QuantMatrix& first = matrices_.front();
    if (matrix.format != first.format || matrix.rows != first.rows || matrix.cols != first.cols) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("experts differ: a matrix of {} x {} {} and one of {} x {} {}",
                              first.rows, first.cols, DTypeName(first.format.dtype), matrix.rows,
                              matrix.cols, DTypeName(matrix.format.dtype)));
    }
    data_.push_back(matrix.data.data());
    if (first.format.is_quantized()) scale_.push_back(matrix.scale.data());
    if (first.format.has_zero) zero_.push_back(matrix.zero.data());
    if (first.format.has_tensor_scale) tensor_scale_.push_back(&matrix.tensor_scale);
    if (first.format.has_column_groups) column_group_.push_back(matrix.column_group.data());
  }
}

ExpertMatrices MatrixBank::View() const {
  ExpertMatrices view;
  if (matrices_.empty()) return view;
  const QuantMatrix& first = matrices_.front();
  view.format = first.format;
  view.rows = first.rows;
  view.cols = first.cols;
  view.stride = first.stride;
  view.scale_stride = first.scale_stride;
  view.data = data_;
  view.scale = scale_;
  view.zero = zero_;
  view.tensor_scale = tensor_scale_;
  view.column_group = column_group_;
  return view;
}

}  // namespace switchyard::quant
