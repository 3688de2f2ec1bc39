// Rows of any kind in another order.
#pragma once

#include <cstddef>
#include <cstring>

#include "quant/act_quant.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::moe::ascend {

// Row i of the result is row row_of(i) of x: bytes and scales, in the arena.
template <typename RowOf>
QuantRows GatherRows(ExecContext& context, const QuantRows& x, size_t num_rows,
                     const RowOf& row_of) {
  QuantRows gathered = x;
  gathered.rows = num_rows;
  const size_t row_bytes = BytesOf(x.dtype, x.cols);
  // Codes start at multiples of 64 bytes, so that vector loads do not straddle cache lines.
  gathered.stride = x.kind == ActQuantKind::kNone ? row_bytes : (row_bytes + 63) / 64 * 64;
  std::byte* data = context.arena.AllocateSpan<std::byte>(num_rows * gathered.stride).data();
  gathered.data = data;
  const size_t scale_bytes = x.scale == nullptr ? 0 : x.scale_stride * DTypeBytes(x.scale_dtype);
  std::byte* scales = context.arena.AllocateSpan<std::byte>(num_rows * scale_bytes).data();
  if (scale_bytes != 0) gathered.scale = scales;
  quant::ForEachRow(context, num_rows, [&](size_t i) {
    const size_t from = row_of(i);
    std::memcpy(data + i * gathered.stride, x.Row(from), row_bytes);
    if (scale_bytes != 0)
      std::memcpy(scales + i * scale_bytes, x.scale + from * scale_bytes, scale_bytes);
  });
  return gathered;
}

}  // namespace switchyard::moe::ascend
