// Rows of quantised numbers to f32, by the one rule w = (q - zero) * scale. Contract 5.15.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// One row of n codes whose scales and zero points repeat every `group` columns, or are those of
// column_group[k] for column k.
//
// Shapes: q [n] of dtype (kF32 kF16 kBF16 kI8 kU8 kI4 kU4 kF8E4M3 kF4E2M1), 4-bit types from the
//   low nibble of the first byte; scale [ceil(n / group)] of scale_dtype (kF32 kF16 kBF16 kF8E8M0
//   kF8E4M3), or nullptr = 1; zero u8 [ceil(n / group)], or nullptr = 0; column_group [n] below
//   num_groups, or nullptr: then scale and zero have num_groups elements. tensor_scale multiplies
//   every scale. Or q [ceil(n / DTypeBlock)] blocks of ggml, whose scales are within them: scale
//   and zero are nullptr, and the last block is there as a whole.
struct CodeRow {
  DType dtype = DType::kF32;
  const void* q = nullptr;
  size_t n = 0;
  DType scale_dtype = DType::kF32;
  const void* scale = nullptr;
  const uint8_t* zero = nullptr;
  size_t group = 1;
  float tensor_scale = 1.0f;
  const int32_t* column_group = nullptr;
  size_t num_groups = 0;  // of column_group
};

// out[i] = (q[i] - zero) * scale. The difference is exact and the product is rounded once, to f32
// (the scale too, if there is a tensor_scale): the same bits on every instruction set. No byte past
// the n-th code, the last scale or out[n] is touched. A NaN code or scale gives NaN.
void DecodeRow(const CodeRow& row, float* out) noexcept;

// The same, plain loops.
void DecodeRowReference(const CodeRow& row, float* out);

// n codes of kI8 or kI4 as i8. Touches no byte past the n-th code.
void DecodeToInt8(DType dtype, const void* q, size_t n, int8_t* out) noexcept;

// Scale i of an array of scale_dtype, exact.
float ScaleAt(DType scale_dtype, const void* scale, size_t i);

// Scale of column k, tensor_scale included, and its zero point.
float ScaleOfColumn(const CodeRow& row, size_t k);
float ZeroOfColumn(const CodeRow& row, size_t k);

// Code i of a row of any of the types above, exact; of a block of ggml, the f32 value of element i.
double CodeAt(DType dtype, const void* q, size_t i);

}  // namespace switchyard::kernels
