// Rows of f32 into ggml's quantised blocks.
#pragma once

#include <cstddef>
#include <span>

#include "switchyard/core/dtype.h"

namespace switchyard::quant {

// Whether EncodeGgmlRow has an encoder for the type: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0, Q2_K to Q6_K, IQ4_NL
// and MXFP4.
bool CanEncodeGgml(DType dtype);

// Encodes one row into blocks of `dtype`, with small squared error.
//
// Scales are searched, not only taken from the largest value. For every run of elements with a
// scale of its own, several steps around the one that just reaches the extremes are tried; for
// each, the elements are rounded to codes and the scale (and offset) that fits these codes best
// follows from least squares; the one with the least error is kept. In the K types these scales are
// then rounded to codes of the scale of the block, where the neighbouring codes are tried too, and
// the scales of the block are fitted to all its codes by least squares, as long as that helps. A
// scale beyond f16 saturates at its largest finite value; what is too small for it becomes 0. So
// the result is finite for every finite row.
// Pure and deterministic: the same bits on every CPU; rows may be encoded concurrently.
//
// Shapes: x [n], n a multiple of DTypeBlock(dtype); out [BytesOf(dtype, n)] bytes.
// Errors: kInvalidArgument naming type, index and value for NaN and infinity; kUnsupported for a
//   type that CanEncodeGgml denies.
void EncodeGgmlRow(DType dtype, std::span<const float> x, std::span<std::byte> out);

}  // namespace switchyard::quant
