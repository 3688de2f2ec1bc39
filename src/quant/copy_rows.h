// Rows of any kind, copied in another order or side by side.
#pragma once

#include <cstddef>
#include <cstring>

#include "quant/act_quant.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::quant {

// Row i of the result is row row_of(i) of x: bytes and scales, in the arena. One scale for all rows
// stays where it is. (GatherRows of quant/linear.h gathers pointers instead.)
template <typename RowOf>
QuantRows CopyRows(ExecContext& context, const QuantRows& x, size_t num_rows, const RowOf& row_of) {
  QuantRows copied = x;
  copied.rows = num_rows;
  const size_t row_bytes = BytesOf(x.dtype, x.cols);
  // Codes start at multiples of 64 bytes, so that vector loads do not straddle cache lines.
  copied.stride = x.kind == ActQuantKind::kNone ? row_bytes : (row_bytes + 63) / 64 * 64;
  std::byte* data = context.arena.AllocateSpan<std::byte>(num_rows * copied.stride).data();
  copied.data = data;
  const size_t scale_bytes = x.ScaleRowBytes();
  std::byte* scales = context.arena.AllocateSpan<std::byte>(num_rows * scale_bytes).data();
  if (scale_bytes != 0) {
    copied.scale = scales;
    copied.scale_stride = scale_bytes / DTypeBytes(x.scale_dtype);
  }
  copied.scattered = nullptr;
  ForEachRow(context, num_rows, [&](size_t i) {
    const size_t from = row_of(i);
    std::memcpy(data + i * copied.stride, x.Row(from), row_bytes);
    if (scale_bytes != 0) std::memcpy(scales + i * scale_bytes, x.ScaleRow(from), scale_bytes);
  });
  return copied;
}

// The same, without a copy if the rows are scattered.
template <typename RowOf>
QuantRows PickRows(ExecContext& context, const QuantRows& x, size_t num_rows, const RowOf& row_of) {
  if (x.scattered == nullptr) return CopyRows(context, x, num_rows, row_of);
  const std::span<const std::byte*> scattered =
      context.arena.AllocateSpan<const std::byte*>(num_rows);
  for (size_t i = 0; i < num_rows; ++i) scattered[i] = x.scattered[row_of(i)];
  QuantRows picked = x;
  picked.rows = num_rows;
  picked.scattered = scattered.data();
  return picked;
}

}  // namespace switchyard::quant
