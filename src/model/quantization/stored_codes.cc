#include "model/quantization/stored_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/decode/decode.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

bool IsStatic(ActQuantKind kind) {
  return kind == ActQuantKind::kInt8Static || kind == ActQuantKind::kFp8TensorStatic;
}

bool IsFourBit(DType dtype) { return DTypeBits(dtype) == 4; }

// How a file may spell the type of the codes.
std::vector<DType> CodeDTypes(DType dtype) {
  if (dtype == DType::kI4) return {DType::kI8, DType::kU8};
  if (dtype == DType::kF4E2M1) return {DType::kU8, DType::kI8};
  return {dtype};
}

// e8m0 scales are plain bytes in most files.
std::vector<DType> ScaleDTypes(std::vector<DType> dtypes) {
  if (std::ranges::find(dtypes, DType::kF8E8M0) != dtypes.end()) dtypes.push_back(DType::kU8);
  return dtypes;
}

}  // namespace

std::vector<DType> FloatDTypes() { return {DType::kF32, DType::kBF16, DType::kF16}; }

std::vector<Shape> ScalarShapes() { return {Shape{1}, Shape{}, Shape{1, 1}}; }
std::vector<Shape> PerRowShapes(size_t rows) { return {Shape{rows, 1}, Shape{rows}}; }

float ScaleValue(const TensorView& view, size_t i) {
  return kernels::ScaleAt(view.dtype == DType::kU8 ? DType::kF8E8M0 : view.dtype, view.data, i);
}

void CheckScales(const MatrixTensors& tensors, std::string_view suffix, const TensorView& scales,
                 const TensorView& codes) {
  const size_t count = scales.NumElements();
  // The smallest power of two has the code 0: a scale that no weight needs.
  const bool is_power = scales.dtype == DType::kU8 || scales.dtype == DType::kF8E8M0;
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    const float scale = ScaleValue(scales, i);
    any = any || (is_power ? scales.data[i] != std::byte{0} : scale != 0.0f);
    if (std::isfinite(scale) && scale >= 0.0f) continue;
    tensors.Refuse(suffix, fmt::format("scale {} of {} is {}, expected a finite number that is not "
                                       "negative",
                                       i, count, scale));
  }
  if (any || count == 0) return;
  const std::byte* end = codes.data + codes.NumBytes();
  if (std::all_of(codes.data, end, [](std::byte code) { return code == std::byte{0}; })) return;
  tensors.Refuse(suffix, fmt::format("all {} scales are 0 and the codes are not: they were never "
                                     "written",
                                     count));
}

void RequireZeroOffsets(const MatrixTensors& tensors, std::string_view suffix,
                        const TensorView& offsets) {
  for (size_t i = 0; i < offsets.NumElements(); ++i) {
    const float offset = ScaleValue(offsets, i);
    if (offset != 0.0f)
      tensors.Refuse(suffix,
                     fmt::format("offset {} is {}, expected 0: weights with offsets are not "
                                 "computed",
                                 i, offset));
  }
}

float ActOffset(const MatrixTensors& tensors, std::string_view suffix, const TensorView& view) {
  const float offset = view.dtype == DType::kI8
                           ? static_cast<float>(*reinterpret_cast<const int8_t*>(view.data))
                           : ScaleValue(view, 0);
  if (offset >= -128.0f && offset <= 127.0f && offset == std::nearbyint(offset)) return offset;
  tensors.Refuse(suffix, fmt::format("is {}, expected a whole number in [-128, 127]", offset));
}

float PositiveScalar(const MatrixTensors& tensors, std::string_view suffix,
                     const TensorView& view) {
  const float value = ScaleValue(view, 0);
  if (value > 0.0f && std::isfinite(value)) return value;
  tensors.Refuse(suffix, fmt::format("is {}, expected a positive finite number", value));
}

std::string DescribeActivations(const ActQuant& act) {
  switch (act.kind) {
    case ActQuantKind::kNone: return "; activations as they are";
    case ActQuantKind::kInt8Token: return "; activations int8 per token";
    case ActQuantKind::kInt4Token: return "; activations int4 per token";
    case ActQuantKind::kInt8Static: return "; activations int8, static";
    case ActQuantKind::kFp8Token: return "; activations e4m3 per token";
    case ActQuantKind::kFp8Group: return fmt::format("; activations e4m3 per 1x{}", act.group);
    case ActQuantKind::kFp8Tensor: return "; activations e4m3 per batch";
    case ActQuantKind::kFp8TensorStatic: return "; activations e4m3, static";
    case ActQuantKind::kMxFp8: return "; activations mxfp8";
    case ActQuantKind::kMxFp4: return "; activations mxfp4";
  }
  return "";
}

size_t StoredCodes::ScaleRows(size_t rows) const {
  return options_.scale_rows == 0 ? std::max<size_t>(1, rows) : options_.scale_rows;
}
size_t StoredCodes::ScaleCols(size_t cols) const {
  return options_.scale_cols == 0 ? std::max<size_t>(1, cols) : options_.scale_cols;
}

std::string StoredCodes::Describe() const {
  const StoredCodesOptions& o = options_;
  std::string scales = o.scale_rows == 0 && o.scale_cols == 0 ? "one scale"
                       : o.scale_cols == 0                    ? "a scale per output"
                       : o.scale_rows == 1
                           ? fmt::format("a scale per {} inputs", o.scale_cols)
                           : fmt::format("a scale per {}x{} block", o.scale_rows, o.scale_cols);
  if (!o.tensor_scale.empty()) scales += " and one for all";
  return fmt::format("{}, {}{}", DTypeName(o.dtype), scales, DescribeActivations(o.act));
}

std::string_view StoredCodes::act_scale() const {
  return IsStatic(options_.act.kind) ? options_.input_scale : std::string_view{};
}

std::vector<StoredTensor> StoredCodes::Tensors(size_t rows, size_t cols) const {
  const StoredCodesOptions& o = options_;
  const bool packed = IsFourBit(o.dtype);
  if (packed && cols % 2 != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} inputs cannot lie two in a byte", cols));
  }
  if (o.scale_rows == 1 && o.scale_cols != 0 && cols % o.scale_cols != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} inputs are no multiple of the group of {}", cols, o.scale_cols));
  }
  const size_t grid_rows = quant::CeilDiv(rows, ScaleRows(rows));
  const size_t grid_cols = quant::CeilDiv(cols, ScaleCols(cols));
  std::vector<Shape> scale_shapes = {Shape{grid_rows, grid_cols}};
  if (o.scale_rows == 0 && o.scale_cols == 0) scale_shapes = ScalarShapes();
  if (o.scale_rows == 1 && o.scale_cols == 0) scale_shapes = PerRowShapes(rows);
  std::vector<StoredTensor> tensors = {
      {o.codes, {Shape{rows, packed ? cols / 2 : cols}}, CodeDTypes(o.dtype)},
      {o.scale, scale_shapes, ScaleDTypes(o.scale_dtypes)}};
  if (!o.tensor_scale.empty()) tensors.push_back({o.tensor_scale, ScalarShapes(), FloatDTypes()});
  if (IsStatic(o.act.kind)) tensors.push_back({o.input_scale, ScalarShapes(), FloatDTypes()});
  if (!o.input_offset.empty()) {
    std::vector<DType> dtypes = FloatDTypes();
    dtypes.push_back(DType::kI8);
    tensors.push_back({o.input_offset, ScalarShapes(), dtypes, false});
  }
  if (!o.zero_offset.empty())
    tensors.push_back({o.zero_offset, PerRowShapes(rows), FloatDTypes(), false});
  tensors.insert(tensors.end(), o.unused.begin(), o.unused.end());
  return tensors;
}

WeightMatrix StoredCodes::Load(const MatrixTensors& tensors, WeightMemory& memory) const {
  const StoredCodesOptions& o = options_;
  const TensorView& codes = tensors.views[0];
  const TensorView& scales = tensors.views[1];
  CheckScales(tensors, o.scale, scales, codes);
  WeightMatrix matrix = WeightMatrix::Dense(codes.data, o.dtype, tensors.rows, tensors.cols);
  matrix.format.scale_dtype = scales.dtype == DType::kU8 ? DType::kF8E8M0 : scales.dtype;
  matrix.format.scale_rows = ScaleRows(tensors.rows);
  matrix.format.scale_cols = ScaleCols(tensors.cols);
  matrix.scale = scales.data;
  matrix.scale_stride = quant::CeilDiv(tensors.cols, matrix.format.scale_cols);
  matrix.act = o.act;
  size_t next = 2;
  if (!o.tensor_scale.empty()) {
    const float stored = PositiveScalar(tensors, o.tensor_scale, tensors.views[next++]);
    float* tensor_scale = memory.New<float>(1);
    *tensor_scale = o.tensor_scale_is_reciprocal ? 1.0f / stored : stored;
    if (!std::isfinite(*tensor_scale))
      tensors.Refuse(o.tensor_scale,
                     fmt::format("is {}, expected a number with a finite reciprocal", stored));
    matrix.format.has_tensor_scale = true;
    matrix.tensor_scale = tensor_scale;
  }
  if (IsStatic(o.act.kind))
    matrix.act.scale = PositiveScalar(tensors, o.input_scale, tensors.views[next++]);
  if (!o.input_offset.empty()) {
    const TensorView& view = tensors.views[next++];
    if (view.data != nullptr) matrix.act.offset = ActOffset(tensors, o.input_offset, view);
  }
  if (!o.zero_offset.empty()) {
    const TensorView& view = tensors.views[next++];
    if (view.data != nullptr) RequireZeroOffsets(tensors, o.zero_offset, view);
  }
  return matrix;
}

}  // namespace switchyard
