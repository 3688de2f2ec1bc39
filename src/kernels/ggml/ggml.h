// Rows of ggml's quantised blocks to f32.
#pragma once

#include <cstddef>

#include "switchyard/core/dtype.h"

namespace switchyard::kernels {

// Decodes n elements, whole blocks of `dtype` (IsGgmlBlock), to the bits that the definition of the
// format gives, on every instruction set: the operations and their order are those of gguf-py. No
// byte past the last block or out[n] is touched; `blocks` need not be aligned.
// Source: gguf/quants.py of the gguf package (ggml-org/llama.cpp).
void DecodeGgmlRow(DType dtype, const void* blocks, size_t n, float* out) noexcept;

// The same by the portable target.
void DecodeGgmlRowReference(DType dtype, const void* blocks, size_t n, float* out);

}  // namespace switchyard::kernels
