#include "moe/ep/wire.h"

#include <cstring>

#include "switchyard/core/macros.h"

namespace switchyard::moe {

ValueLayout ValueLayout::Of(const QuantRows& rows) {
  ValueLayout layout;
  layout.meta = rows;
  layout.meta.rows = 0;
  layout.meta.data = nullptr;
  layout.meta.scale = nullptr;
  layout.data_bytes = BytesOf(rows.dtype, rows.cols);
  if (rows.kind == ActQuantKind::kNone) return layout;
  SY_CHECK(rows.scale_cols != 0);
  const size_t scales = (rows.cols + rows.scale_cols - 1) / rows.scale_cols;
  layout.scale_bytes = scales * DTypeBytes(rows.scale_dtype);
  // Scales start at a multiple of their size.
  layout.data_bytes = (layout.data_bytes + 7) / 8 * 8;
  return layout;
}

void ValueLayout::Pack(const QuantRows& rows, size_t row, std::byte* to) const {
  std::memcpy(to, rows.Row(row), BytesOf(rows.dtype, rows.cols));
  if (scale_bytes == 0) return;
  std::memcpy(to + data_bytes, rows.ScaleRow(row), scale_bytes);
}

QuantRows ValueLayout::View(const std::byte* from) const {
  QuantRows row = meta;
  row.rows = 1;
  row.data = from;
  row.stride = data_bytes;
  if (scale_bytes != 0) {
    row.scale = from + data_bytes;
    row.scale_stride = scale_bytes / DTypeBytes(row.scale_dtype);
  }
  return row;
}

WireLayout::WireLayout(const ValueLayout& values, size_t top_k) : values_(values), top_k_(top_k) {
  const size_t ids_end = sizeof(uint32_t) + top_k * sizeof(uint16_t);
  weights_at_ = (ids_end + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  header_bytes_ = WireUp(weights_at_ + top_k * sizeof(float));
}

void WireLayout::PackHeader(const TopKOutput& topk, size_t token, std::byte* row) const {
  const auto number = static_cast<uint32_t>(token);
  std::memcpy(row, &number, sizeof(number));
  auto* ids = reinterpret_cast<uint16_t*>(row + sizeof(uint32_t));
  auto* weights = reinterpret_cast<float*>(row + weights_at_);
  for (size_t k = 0; k < top_k_; ++k) {
    const int32_t id = topk.Ids(token)[k];
    ids[k] = id < 0 ? static_cast<uint16_t>(kMaxExperts) : static_cast<uint16_t>(id);
    weights[k] = topk.Weights(token)[k];
  }
}

}  // namespace switchyard::moe
