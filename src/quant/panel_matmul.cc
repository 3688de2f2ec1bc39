#include "quant/panel_matmul.h"

#include <algorithm>
#include <array>

#include "kernels/convert/convert.h"
#include "kernels/decode/decode.h"
#include "kernels/panels/multiply.h"
#include "kernels/panels/pack.h"
#include "quant/act_quant.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/macros.h"

namespace switchyard::quant {
namespace {

using kernels::PanelPath;
using kernels::PanelRowLayout;

// Activation rows that one pass over a panel takes.
constexpr size_t kPassRows = 256;

// What rows of one kind become.
struct RecordPlan {
  PanelPath path = PanelPath::kF32;
  size_t act_group = 0;  // columns of a scale inside the record
  enum class From : uint8_t {
    kValues,       // the values, all scales applied
    kCodes,        // the codes, as values; the scale of the row stays outside
    kScaledCodes,  // the codes, and the scales of their groups
    kInt8,         // int8 codes; the scale of the row stays outside
    kFast          // the values, quantised here
  } from = From::kValues;
};

PanelPath Pairs(const kernels::PanelFormat& panels) {
  return TakesPath(panels, PanelPath::kBF16) ? PanelPath::kBF16 : PanelPath::kF32;
}

// `group`: columns of a scale of the rows.
RecordPlan PlanRecords(ActQuantKind kind, bool has_offset, size_t group,
                       const kernels::PanelFormat& panels, DType act_dtype) {
  using From = RecordPlan::From;
  const bool takes_int8 = TakesPath(panels, PanelPath::kInt8);
  switch (kind) {
    case ActQuantKind::kNone:
      if (act_dtype == DType::kI8 && takes_int8)
        return {PanelPath::kInt8, FastGroupOf(panels), From::kFast};
      if (act_dtype != DType::kF32) return {Pairs(panels), 0, From::kValues};
      return {PanelPath::kF32, 0, From::kValues};
    case ActQuantKind::kInt8Token:
    case ActQuantKind::kInt4Token:
    case ActQuantKind::kInt8Static:
      if (has_offset) return {PanelPath::kF32, 0, From::kValues};
      if (takes_int8) return {PanelPath::kInt8, 0, From::kInt8};
      return {Pairs(panels), 0, From::kCodes};
    case ActQuantKind::kFp8Token:
    case ActQuantKind::kFp8Tensor:
    case ActQuantKind::kFp8TensorStatic: return {Pairs(panels), 0, From::kCodes};
    case ActQuantKind::kFp8Group:
      if (group != panels.group) return {PanelPath::kF32, 0, From::kValues};
      return {Pairs(panels), group, From::kScaledCodes};
    case ActQuantKind::kMxFp8:
    case ActQuantKind::kMxFp4: return {Pairs(panels), 0, From::kValues};  // exact in bf16
  }
  return {};
}

// Rows of records in the arena.
struct RecordRows {
  RecordRows(Arena& arena, const PanelRowLayout& layout, size_t count)
      : layout(layout),
        data(arena.AllocateSpan<std::byte>(count * layout.bytes + 64).data()),
        rows(arena.AllocateSpan<const void*>(count)) {
    const auto misaligned = reinterpret_cast<uintptr_t>(data) % 64;
    if (misaligned != 0) data += 64 - misaligned;
    for (size_t i = 0; i < count; ++i) rows[i] = At(i);
  }
  std::byte* At(size_t i) const { return data + i * layout.bytes; }

  const PanelRowLayout& layout;
  std::byte* data;
  std::span<const void*> rows;
};

// The codes of row i as floats.
void DecodeCodes(const QuantRows& x, size_t i, float* out) {
  kernels::DecodeRow({x.dtype, x.Row(i), x.cols, DType::kF32, nullptr, nullptr, 1}, out);
}

std::span<float> RowScales(Arena& arena, const QuantRows& x) {
  const std::span<float> scales = arena.AllocateSpan<float>(x.rows);
  for (size_t i = 0; i < x.rows; ++i) scales[i] = kernels::ScaleAt(x.scale_dtype, x.ScaleRow(i), 0);
  return scales;
}

void PackRecord(const QuantRows& x, size_t i, const RecordPlan& plan, const PanelRowLayout& layout,
                float* values, std::byte* out) {
  using From = RecordPlan::From;
  switch (plan.from) {
    case From::kInt8: return PackInt8Row(layout, reinterpret_cast<const int8_t*>(x.Row(i)), out);
    case From::kCodes: DecodeCodes(x, i, values); return PackFloatRow(layout, values, out);
    case From::kScaledCodes:
      DecodeCodes(x, i, values);
      return PackScaledRow(layout, values, reinterpret_cast<const float*>(x.ScaleRow(i)),
                           plan.act_group, out);
    case From::kValues:
    case From::kFast: break;
  }
  const float* row = values;
  if (x.is_plain_f32()) {
    row = reinterpret_cast<const float*>(x.Row(i));
  } else {
    DequantizeRow(x, i, values);
  }
  if (plan.from == From::kFast) {
    PackFastRow(layout, row, out);
  } else {
    PackFloatRow(layout, row, out);
  }
}

// All but the scales that stay outside.
ActRows PackRecords(ExecContext& context, const QuantRows& x, const RecordPlan& plan,
                    const kernels::PanelFormat& panels) {
  ActRows result;
  result.records = kernels::RowLayoutOf(panels, x.cols, plan.path, plan.act_group);
  result.cols = x.cols;
  const RecordRows records(context.arena, result.records, x.rows);
  result.rows = records.rows;
  ArenaScope scope(context.arena);
  const size_t stride = (x.cols + 15) / 16 * 16;
  float* values = context.arena.AllocateSpan<float>(context.pool.num_threads() * stride).data();
  constexpr size_t kRowsPerTask = 4;
  context.pool.Run((x.rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t worker) {
    const size_t end = std::min(x.rows, (task + 1) * kRowsPerTask);
    for (size_t i = task * kRowsPerTask; i < end; ++i)
      PackRecord(x, i, plan, result.records, values + worker * stride, records.At(i));
  });
  return result;
}

}  // namespace

PanelMatrix::PanelMatrix(const MatrixFormat& matrix, size_t cols) {
  const auto found = kernels::FindPanelFormat(matrix, cols);
  SY_CHECK(matrix.in_panels && found.has_value());
  format = *found;
  layout = kernels::LayoutOf(format, cols);
}

MatrixFormat InPanels(const MatrixFormat& format, size_t cols) {
  MatrixFormat result = format;
  result.in_panels = kernels::FindPanelFormat(format, cols).has_value();
  return result;
}

size_t PanelBytes(const MatrixFormat& format, size_t rows, size_t cols) {
  return kernels::NumPanels(rows) * PanelMatrix(format, cols).layout.panel_bytes;
}

void PackPanel(const ExpertMatrices& w, size_t expert, size_t index, std::byte* out) {
  const PanelMatrix panels(InPanels(w.format, w.cols), w.cols);
  std::array<kernels::CodeRow, kernels::kPanelRows> rows;
  const size_t first = index * kernels::kPanelRows;
  const size_t count = std::min(kernels::kPanelRows, w.rows - first);
  for (size_t r = 0; r < count; ++r) rows[r] = CodeRowOf(w, expert, first + r);
  kernels::PackPanel(panels.format, panels.layout, std::span(rows).first(count), out);
}

kernels::PanelRowLayout RecordsFor(const ActQuant& how, const MatrixFormat& weights, size_t cols,
                                   DType act_dtype) {
  const PanelMatrix panels(weights, cols);
  const bool has_offset = how.kind == ActQuantKind::kInt8Static && how.offset != 0.0f;
  const RecordPlan plan = PlanRecords(how.kind, has_offset, how.group, panels.format, act_dtype);
  return kernels::RowLayoutOf(panels.format, cols, plan.path, plan.act_group);
}

ActRows MakeRecords(ExecContext& context, const QuantRows& x, const MatrixFormat& weights,
                    DType act_dtype) {
  using From = RecordPlan::From;
  const PanelMatrix panels(weights, x.cols);
  const RecordPlan plan =
      PlanRecords(x.kind, x.offset != 0.0f, x.scale_cols, panels.format, act_dtype);
  ActRows result = PackRecords(context, x, plan, panels.format);
  if (plan.from == From::kCodes || plan.from == From::kInt8)
    result.row_scale = RowScales(context.arena, x);
  return result;
}

ActRows MakeRecords(ExecContext& context, const ActRows& x, const MatrixFormat& weights,
                    DType act_dtype) {
  const std::span<const std::byte*> elements =
      context.arena.AllocateSpan<const std::byte*>(x.rows.size());
  for (size_t i = 0; i < elements.size(); ++i)
    elements[i] = static_cast<const std::byte*>(x.rows[i]);
  QuantRows rows;
  rows.dtype = x.dtype;
  rows.rows = x.rows.size();
  rows.cols = x.cols;
  rows.scattered = elements.data();
  const PanelMatrix panels(weights, x.cols);
  const ActQuantKind kind = x.dtype == DType::kI8 ? ActQuantKind::kInt8Token : ActQuantKind::kNone;
  ActRows result = PackRecords(
      context, rows, PlanRecords(kind, false, x.cols, panels.format, act_dtype), panels.format);
  result.row_scale = x.row_scale;
  return result;
}

size_t PanelScratchFloats(const MatrixFormat& weights, size_t cols) {
  const PanelMatrix panels(weights, cols);
  size_t bytes = 0;
  for (PanelPath path : {PanelPath::kInt8, PanelPath::kBF16, PanelPath::kF32}) {
    for (size_t rows : {size_t{1}, kPassRows})
      bytes = std::max(bytes, kernels::PanelScratchBytes(panels.format, panels.layout, path, rows));
  }
  return bytes / sizeof(float) + 16;  // for a start at a cache line
}

void MultiplyPanels(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0, size_t n,
                    std::span<float> scratch, float* out, size_t out_stride) {
  SY_CHECK(x.are_records());
  const PanelMatrix panels(w.format, w.cols);
  const auto misaligned = reinterpret_cast<uintptr_t>(scratch.data()) % 64;
  kernels::PanelProduct product;
  product.format = &panels.format;
  product.layout = &panels.layout;
  product.rows_layout = &x.records;
  product.scratch =
      reinterpret_cast<std::byte*>(scratch.data()) + (misaligned == 0 ? 0 : 64 - misaligned);
  product.out_stride = out_stride;
  for (size_t j = 0; j < n; j += product.count) {
    const size_t row = n0 + j;
    product.panel = panels.Panel(w.data[expert], row / kernels::kPanelRows);
    product.first = row % kernels::kPanelRows;
    product.count = std::min(kernels::kPanelRows - product.first, n - j);
    for (size_t m = 0; m < x.rows.size(); m += kPassRows) {
      product.num_rows = std::min(kPassRows, x.rows.size() - m);
      product.rows = reinterpret_cast<const std::byte* const*>(x.rows.data() + m);
      product.row_scale = x.row_scale.empty() ? nullptr : x.row_scale.data() + m;
      product.out = out + m * out_stride + j;
      MultiplyPanel(product);
    }
  }
}

}  // namespace switchyard::quant
