#include "kernels/matmul/matmul.h"
#include "kernels/matmul/matmul_i8.h"
#include "kernels/reference.h"

namespace switchyard::kernels {

void MatmulReference(const MatmulArgs& args, DType a_dtype, DType w_dtype) {
  const size_t w_row_bytes = args.w_stride * DTypeBytes(w_dtype);
  for (size_t m = 0; m < args.num_rows; ++m) {
    for (size_t n = 0; n < args.n; ++n) {
      const auto* w_row = static_cast<const std::byte*>(args.w) + n * w_row_bytes;
      double sum = 0;
      for (size_t k = 0; k < args.k; ++k)
        sum += ElementAt(args.a_rows[m], a_dtype, k) * ElementAt(w_row, w_dtype, k);
      args.out[m * args.out_stride + n] = static_cast<float>(sum);
    }
  }
}

void MatmulI8I8Reference(const MatmulI8Args& args, int32_t* out) {
  for (size_t m = 0; m < args.num_rows; ++m) {
    for (size_t n = 0; n < args.n; ++n) {
      int32_t sum = 0;
      for (size_t k = 0; k < args.k; ++k)
        sum += int32_t{args.a_rows[m][k]} * int32_t{args.w[n * args.w_stride + k]};
      out[m * args.out_stride + n] = sum;
    }
  }
}

}  // namespace switchyard::kernels
