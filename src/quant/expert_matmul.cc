#include "quant/expert_matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/convert/convert.h"
#include "kernels/decode/decode.h"
#include "kernels/ggml/ggml.h"
#include "kernels/matmul/matmul_i8.h"
#include "kernels/panels/pack.h"
#include "quant/act_quant.h"
#include "quant/panel_matmul.h"
#include "switchyard/core/macros.h"

namespace switchyard::quant {
namespace {

// Decoded weights of one pass over the activations; stays in L2.
constexpr size_t kTileBytes = size_t{256} << 10;

bool IsDense(const MatrixFormat& format) {
  if (format.in_panels) return false;
  const bool is_float =
      format.dtype == DType::kF32 || format.dtype == DType::kF16 || format.dtype == DType::kBF16;
  return is_float && !format.is_quantized();
}

// Whether the integer product gives sum * row scale * column scale.
bool TakesInt8(const MatrixFormat& weights, size_t cols) {
  return (weights.dtype == DType::kI8 || weights.dtype == DType::kI4) && weights.is_quantized() &&
         weights.scale_cols >= cols && !weights.has_zero && !weights.has_tensor_scale &&
         !weights.has_column_groups && cols <= kernels::kMaxInt8Depth;
}

bool HasRowScale(const QuantRows& x) { return x.has_scale() && x.scale_cols >= x.cols; }

std::span<const float> RowScales(Arena& arena, const QuantRows& x) {
  const std::span<float> scales = arena.AllocateSpan<float>(x.rows);
  for (size_t i = 0; i < x.rows; ++i) scales[i] = kernels::ScaleAt(x.scale_dtype, x.ScaleRow(i), 0);
  return scales;
}

std::span<const void* const> PointersTo(Arena& arena, const QuantRows& x) {
  const std::span<const void*> pointers = arena.AllocateSpan<const void*>(x.rows);
  for (size_t i = 0; i < x.rows; ++i) pointers[i] = x.Row(i);
  return pointers;
}

// f32 rows that start at multiples of 64 bytes.
Rows AllocateAlignedRows(Arena& arena, size_t rows, size_t cols) {
  const size_t stride = (cols + 15) / 16 * 16;
  return Rows(arena.AllocateSpan<float>(rows * stride).data(), rows, cols, stride);
}

ActRows PointTo(Arena& arena, ConstRows x) {
  return {DType::kF32, PointersTo(arena, QuantRows::Plain(x)), x.cols};
}

// Plain rows of any float type in f32.
ConstRows Widened(ExecContext& context, const QuantRows& x) {
  if (x.is_plain_f32()) return x.F32();
  const Rows rows = AllocateAlignedRows(context.arena, x.rows, x.cols);
  DequantizeRows(context, x, rows);
  return rows;
}

// The type in which plain rows are multiplied.
DType PlainDType(const MatrixFormat& weights, DType act_dtype) {
  const bool as_asked =
      IsDense(weights) && kernels::FindMatmul(act_dtype, weights.dtype) != nullptr;
  return as_asked ? act_dtype : DType::kF32;
}

ActRows PlainRows(ExecContext& context, const QuantRows& x, const MatrixFormat& weights,
                  DType act_dtype) {
  const DType dtype = PlainDType(weights, act_dtype);
  if (dtype != DType::kF32 && x.dtype == dtype)
    return {dtype, PointersTo(context.arena, x), x.cols};
  return PrepareActivations(context, Widened(context, x), dtype);
}

ActRows CodeRows(ExecContext& context, const QuantRows& x, const MatrixFormat& weights) {
  Arena& arena = context.arena;
  if (!HasRowScale(x)) return PointTo(arena, Widened(context, x));
  if (x.dtype == DType::kI8 && x.offset == 0.0f && TakesInt8(weights, x.cols))
    return {DType::kI8, PointersTo(arena, x), x.cols, RowScales(arena, x)};
  // The codes alone are exact in f32, so the scale is left to the end.
  const Rows values = AllocateAlignedRows(arena, x.rows, x.cols);
  ForEachRow(context, x.rows, [&](size_t i) {
    float* row = values.Row(i);
    kernels::DecodeRow({x.dtype, x.Row(i), x.cols, DType::kF32, nullptr, nullptr, 1}, row);
    if (x.offset == 0.0f) return;
    for (size_t k = 0; k < x.cols; ++k) row[k] -= x.offset;
  });
  ActRows result = PointTo(arena, values);
  result.row_scale = RowScales(arena, x);
  return result;
}

size_t DecodedStride(const ExpertMatrices& w) { return (w.cols + 15) / 16 * 16; }

// Rows that are decoded at a time.
size_t TileRows(const ExpertMatrices& w) {
  const size_t fit = kTileBytes / (std::max<size_t>(1, DecodedStride(w)) * sizeof(float));
  return std::clamp<size_t>(fit / kernels::kMatmulRowStep * kernels::kMatmulRowStep,
                            kernels::kMatmulRowStep, 64);
}

void MultiplyDense(const ActRows& x, DType dtype, const std::byte* w, size_t stride, size_t n,
                   float* out, size_t out_stride) {
  kernels::MatmulArgs args;
  args.a_rows = x.rows.data();
  args.num_rows = x.rows.size();
  args.w = w;
  args.w_stride = stride;
  args.n = n;
  args.k = x.cols;
  args.out = out;
  args.out_stride = out_stride;
  MatmulFor(x.dtype, dtype)(args);
  if (x.row_scale.empty()) return;
  for (size_t m = 0; m < x.rows.size(); ++m) {
    for (size_t j = 0; j < n; ++j) out[m * out_stride + j] *= x.row_scale[m];
  }
}

// Weights of kI8 lie there already; those of kI4 are widened into the scratch, after the scales.
void MultiplyInt8(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0, size_t n,
                  float* scratch, float* out, size_t out_stride) {
  kernels::MatmulI8Args args;
  args.a_rows = reinterpret_cast<const int8_t* const*>(x.rows.data());
  args.num_rows = x.rows.size();
  args.n = n;
  args.k = x.cols;
  args.out_stride = out_stride;
  float* w_scale = scratch;
  for (size_t j = 0; j < n; ++j) {
    const kernels::CodeRow row = CodeRowOf(w, expert, n0 + j);
    w_scale[j] = kernels::ScaleAt(row.scale_dtype, row.scale, 0);
  }
  if (w.format.dtype == DType::kI8) {
    args.w = reinterpret_cast<const int8_t*>(w.data[expert]) + n0 * w.stride;
    args.w_stride = w.stride;
  } else {
    auto* codes = reinterpret_cast<int8_t*>(scratch + (n + 15) / 16 * 16);
    args.w_stride = (w.cols + 63) / 64 * 64;
    for (size_t j = 0; j < n; ++j) {
      kernels::DecodeToInt8(w.format.dtype, CodeRowOf(w, expert, n0 + j).q, w.cols,
                            codes + j * args.w_stride);
    }
    args.w = codes;
  }
  kernels::MatmulI8I8Scaled(args, x.row_scale.data(), w_scale, out);
}

}  // namespace

kernels::CodeRow CodeRowOf(const ExpertMatrices& w, size_t expert, size_t n) {
  const MatrixFormat& format = w.format;
  SY_DCHECK(!format.in_panels);
  kernels::CodeRow row;
  row.dtype = format.dtype;
  row.q = w.data[expert] + BytesOf(format.dtype, n * w.stride);
  row.n = w.cols;
  if (!format.is_quantized()) return row;
  const size_t at = n / format.scale_rows * w.scale_stride;
  row.group = format.scale_cols;
  row.scale_dtype = format.scale_dtype;
  if (!w.scale.empty()) row.scale = w.scale[expert] + at * DTypeBytes(format.scale_dtype);
  if (format.has_zero) row.zero = reinterpret_cast<const uint8_t*>(w.zero[expert]) + at;
  if (format.has_tensor_scale) row.tensor_scale = *w.tensor_scale[expert];
  if (!format.has_column_groups) return row;
  row.column_group = w.column_group[expert];
  row.num_groups = w.scale_stride;
  return row;
}

ActRows PrepareExpertRows(ExecContext& context, const QuantRows& x, const ActQuant& how,
                          const MatrixFormat& weights, DType act_dtype,
                          std::span<const uint8_t> counted) {
  if (weights.in_panels) {
    const bool quantises = x.kind == ActQuantKind::kNone && how.kind != ActQuantKind::kNone;
    if (!quantises) return MakeRecords(context, x, weights, act_dtype);
    return MakeRecords(context, QuantizeRows(context, Widened(context, x), how, counted), weights,
                       act_dtype);
  }
  if (x.kind != ActQuantKind::kNone) return CodeRows(context, x, weights);
  if (how.kind == ActQuantKind::kNone) return PlainRows(context, x, weights, act_dtype);
  return CodeRows(context, QuantizeRows(context, Widened(context, x), how, counted), weights);
}

DType ExpertRowDType(const ActQuant& how, const MatrixFormat& weights, size_t cols,
                     DType act_dtype) {
  if (weights.in_panels) return DType::kF32;
  if (how.kind == ActQuantKind::kNone) return PlainDType(weights, act_dtype);
  const bool int8 = how.kind == ActQuantKind::kInt8Token || how.kind == ActQuantKind::kInt4Token ||
                    (how.kind == ActQuantKind::kInt8Static && how.offset == 0.0f);
  return int8 && TakesInt8(weights, cols) ? DType::kI8 : DType::kF32;
}

size_t ExpertScratchFloats(const ExpertMatrices& w, size_t n) {
  if (w.format.in_panels) return PanelScratchFloats(w.format, w.cols);
  if (IsDense(w.format)) return 0;
  // The second term holds the scales of the integer product and the rounding of its strides.
  const size_t rows = std::min(n, TileRows(w));
  return rows * DecodedStride(w) + rows * 16 + 16;
}

void MultiplyExpert(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0, size_t n,
                    std::span<float> scratch, float* out, size_t out_stride) {
  SY_CHECK_EQ(x.cols, w.cols);
  SY_CHECK(expert < w.num_experts() && n0 + n <= w.rows);
  SY_CHECK(scratch.size() >= ExpertScratchFloats(w, n));
  const DType dtype = w.format.dtype;
  if (w.format.in_panels) return MultiplyPanels(x, w, expert, n0, n, scratch, out, out_stride);
  if (IsDense(w.format)) {
    return MultiplyDense(x, dtype, w.data[expert] + BytesOf(dtype, n0 * w.stride), w.stride, n, out,
                         out_stride);
  }
  const bool int8 = x.dtype == DType::kI8;
  if (int8) SY_CHECK(TakesInt8(w.format, w.cols) && x.row_scale.size() == x.rows.size());
  const size_t tile = TileRows(w);
  const size_t stride = DecodedStride(w);
  for (size_t j = 0; j < n; j += tile) {
    const size_t rows = std::min(tile, n - j);
    if (int8) {
      MultiplyInt8(x, w, expert, n0 + j, rows, scratch.data(), out + j, out_stride);
      continue;
    }
    for (size_t r = 0; r < rows; ++r)
      DecodeMatrixRow(w, expert, n0 + j + r, scratch.data() + r * stride);
    MultiplyDense(x, DType::kF32, reinterpret_cast<const std::byte*>(scratch.data()), stride, rows,
                  out + j, out_stride);
  }
}

double MatrixElement(const ExpertMatrices& w, size_t expert, size_t n, size_t k) {
  if (w.format.in_panels) {
    const PanelMatrix panels(w.format, w.cols);
    return kernels::PanelElement(panels.format, panels.layout,
                                 panels.Panel(w.data[expert], n / kernels::kPanelRows),
                                 n % kernels::kPanelRows, k);
  }
  const kernels::CodeRow row = CodeRowOf(w, expert, n);
  const double code = kernels::CodeAt(row.dtype, row.q, k);
  if (row.scale == nullptr && row.zero == nullptr) return code;
  return (code - double{kernels::ZeroOfColumn(row, k)}) * double{kernels::ScaleOfColumn(row, k)};
}

void MatrixRow(const ExpertMatrices& w, size_t expert, size_t n, std::span<double> out) {
  const DType dtype = w.format.dtype;
  if (w.format.in_panels) {
    const PanelMatrix panels(w.format, w.cols);
    const std::byte* panel = panels.Panel(w.data[expert], n / kernels::kPanelRows);
    for (size_t k = 0; k < out.size(); ++k)
      out[k] =
          kernels::PanelElement(panels.format, panels.layout, panel, n % kernels::kPanelRows, k);
    return;
  }
  if (!IsGgmlBlock(dtype)) {
    for (size_t k = 0; k < out.size(); ++k) out[k] = MatrixElement(w, expert, n, k);
    return;
  }
  // A block is defined as a whole, so an element alone costs as much as all of its block.
  const size_t elements = DTypeBlock(dtype);
  const std::byte* blocks = w.data[expert] + BytesOf(dtype, n * w.stride);
  float block[256];
  for (size_t k = 0; k < out.size(); k += elements) {
    kernels::DecodeGgmlRowReference(dtype, blocks + BytesOf(dtype, k), elements, block);
    std::copy_n(block, std::min(elements, out.size() - k), out.begin() + static_cast<ptrdiff_t>(k));
  }
}

void DecodeMatrixRow(const ExpertMatrices& w, size_t expert, size_t n, float* out) {
  if (w.format.in_panels) {
    const PanelMatrix panels(w.format, w.cols);
    return kernels::DecodePanelRow(panels.format, panels.layout,
                                   panels.Panel(w.data[expert], n / kernels::kPanelRows),
                                   n % kernels::kPanelRows, w.cols, out);
  }
  kernels::DecodeRow(CodeRowOf(w, expert, n), out);
}

}  // namespace switchyard::quant
