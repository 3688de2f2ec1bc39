// Matrices in canonical form that own their memory. Contract 5.15.
#pragma once

#include <cstddef>
#include <vector>

#include "switchyard/core/quant_format.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard::quant {

// a / b rounded up, for any sizes (b > 0).
inline size_t CeilDiv(size_t a, size_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// One matrix [rows, cols]; the layout of its parts is that of ExpertMatrices.
struct QuantMatrix {
  MatrixFormat format;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;        // elements
  size_t scale_stride = 0;  // elements of a grid row
  std::vector<std::byte> data;
  std::vector<std::byte> scale;
  std::vector<std::byte> zero;
  float tensor_scale = 1.0f;          // of formats that have it
  std::vector<int32_t> column_group;  // [cols], of formats that have it

  // A matrix of zero bytes with a grid that fits it; column groups and tensor scale are the
  // caller's. 0 for scale_rows or scale_cols of a format with scales means the whole matrix.
  static QuantMatrix Make(MatrixFormat format, size_t rows, size_t cols);

  // Refers to *this. The activations are left as they are.
  WeightMatrix View() const;
  size_t bytes() const {
    return data.size() + scale.size() + zero.size() + column_group.size() * sizeof(int32_t);
  }
  size_t grid_rows() const { return scale_stride == 0 ? 0 : CeilDiv(rows, format.scale_rows); }
  // Stores into row n, column k of an integer type (two's complement for kI4).
  void SetCode(size_t n, size_t k, int code);
  // Stores scale (i, j) of the grid, rounded to the type of the scales; for kF8E8M0 a power of two.
  void SetScale(size_t i, size_t j, float value);
};

// One matrix per expert, all of one shape and format.
class MatrixBank {
 public:
  // Errors: kInvalidArgument if the matrices differ in shape or format.
  explicit MatrixBank(std::vector<QuantMatrix> matrices);
  MatrixBank(const MatrixBank&) = delete;
  MatrixBank& operator=(const MatrixBank&) = delete;
  MatrixBank(MatrixBank&&) = default;
  MatrixBank& operator=(MatrixBank&&) = default;

  // Refers to this bank and lives as long.
  ExpertMatrices View() const;
  const QuantMatrix& matrix(size_t expert) const { return matrices_[expert]; }
  size_t size() const { return matrices_.size(); }

 private:
  std::vector<QuantMatrix> matrices_;
  std::vector<const std::byte*> data_, scale_, zero_;
  std::vector<const float*> tensor_scale_;
  std::vector<const int32_t*> column_group_;
};

}  // namespace switchyard::quant
