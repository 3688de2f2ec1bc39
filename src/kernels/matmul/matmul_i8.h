// Exact products of 8-bit integers: activations times a weight matrix, both row-major along K.
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::kernels {

// sum[m, n] = sum over k of a[m, k] * w[n, k] in i32. k is at most kMaxInt8Depth, so nothing
// overflows, whatever the values.
//
// Shapes: a_rows: num_rows pointers to k values each; w: [n, k], row i at w + i * w_stride; out:
//   [num_rows, n], row i at out + i * out_stride elements. No byte past the k-th of a row is read.
struct MatmulI8Args {
  const int8_t* const* a_rows = nullptr;
  size_t num_rows = 0;
  const int8_t* w = nullptr;
  size_t w_stride = 0;
  size_t n = 0;
  size_t k = 0;
  size_t out_stride = 0;
};
inline constexpr size_t kMaxInt8Depth = size_t{1} << 16;

// out = sum, exact on every instruction set.
void MatmulI8I8(const MatmulI8Args& args, int32_t* out) noexcept;

// out[m, n] = sum[m, n] * (a_scale[m] * w_scale[n]): the sum rounded to f32, then both products.
// The same bits on every instruction set.
void MatmulI8I8Scaled(const MatmulI8Args& args, const float* a_scale, const float* w_scale,
                      float* out) noexcept;

// The scalar reference of MatmulI8I8.
void MatmulI8I8Reference(const MatmulI8Args& args, int32_t* out);

}  // namespace switchyard::kernels
