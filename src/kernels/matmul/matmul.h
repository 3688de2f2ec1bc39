// Products of activations with a weight matrix, both row-major along K: the work of every linear
// layer and expert.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// out[m, n] = sum over k of a[m, k] * w[n, k].
//
// Shapes: a: num_rows row pointers, each to k elements of the kernel's activation type; w: [n, k]
//   of its weight type, row i at w + i * w_stride elements; out: [num_rows, n] f32, row i at out +
//   i * out_stride.
// Row pointers instead of a matrix let the MoE runner read each token where it lies, without
// gathering it per expert. No byte past the k-th element of a row is read. out must not overlap the
// inputs.
struct MatmulArgs {
  const void* const* a_rows = nullptr;
  size_t num_rows = 0;
  const void* w = nullptr;
  size_t w_stride = 0;  // elements
  size_t n = 0;
  size_t k = 0;
  float* out = nullptr;
  size_t out_stride = 0;  // elements
};

// Deterministic: each out[m, n] is summed in an order that depends on k and the instruction set
//   alone, so one row gives the same bits alone, in any batch and in any split of n.
using MatmulFn = void (*)(const MatmulArgs&) noexcept;

struct MatmulKernel {
  std::string_view name;
  DType a_dtype;
  DType w_dtype;
  MatmulFn run;
};

// The rows of kernels.def.
std::span<const MatmulKernel> AllMatmulKernels();

// The kernel for these types, or nullptr.
const MatmulKernel* FindMatmul(DType a_dtype, DType w_dtype);

// The scalar reference: plain loops, sums in f64, any supported pair of dtypes.
void MatmulReference(const MatmulArgs& args, DType a_dtype, DType w_dtype);

// Multiples of this many weight rows avoid a slower edge case; work is split along n in such
// multiples.
inline constexpr size_t kMatmulRowStep = 4;

}  // namespace switchyard::kernels
