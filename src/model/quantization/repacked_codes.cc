#include "model/quantization/repacked_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/quantization/stored_codes.h"
#include "quant/packing.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// How far a scale_bias may lie from what the weights say: f32 sums of up to 16384 terms.
constexpr double kScaleBiasTolerance = 1e-3;

template <typename T>
std::span<const T> Elements(const TensorView& view) {
  if (view.data == nullptr) return {};
  return {reinterpret_cast<const T*>(view.data), view.NumElements()};
}

void RequireMultiple(std::string_view dimension, size_t value, size_t step) {
  if (value % step == 0) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{} {} are no multiple of {}, which this packing needs", value, dimension, step));
}

size_t GroupsOf(size_t cols, size_t group) {
  if (group == 0) return 1;
  RequireMultiple("inputs", cols, group);
  return cols / group;
}

quant::PackedShape ShapeOf(const MatrixTensors& tensors, size_t group) {
  return {tensors.module, tensors.rows, tensors.cols, group};
}

std::string DescribeGroup(size_t group) {
  return group == 0 ? std::string("a scale per output")
                    : fmt::format("a scale per {} inputs", group);
}

// Products of finite scales, rounded to f16.
void RequireFinite(const MatrixTensors& tensors, std::span<const F16> combined) {
  for (size_t i = 0; i < combined.size(); ++i) {
    const float scale = ToFloat(combined[i]);
    if (std::isfinite(scale)) continue;
    tensors.Refuse("weight_scale_second",
                   fmt::format("element {} times the scale of its output is {} in F16, expected a "
                               "finite number",
                               i, scale));
  }
}

quant::RawScales ScalesOf(const TensorView& view) {
  return {view.dtype, {view.data, view.NumBytes()}};
}

}  // namespace

std::string AwqCodes::Describe() const {
  return fmt::format("U4, {} and a zero point; activations as they are", DescribeGroup(group_));
}

std::vector<StoredTensor> AwqCodes::Tensors(size_t rows, size_t cols) const {
  RequireMultiple("outputs", rows, 8);
  const size_t groups = GroupsOf(cols, group_);
  return {{"qweight", {Shape{cols, rows / 8}}, {DType::kI32}},
          {"qzeros", {Shape{groups, rows / 8}}, {DType::kI32}},
          {"scales", {Shape{groups, rows}}, {DType::kF16, DType::kBF16, DType::kF32}}};
}

WeightMatrix AwqCodes::Load(const MatrixTensors& tensors, WeightMemory& memory) const {
  CheckScales(tensors, "scales", tensors.views[2], tensors.views[0]);
  return memory.Keep(quant::ImportAwq(
      ShapeOf(tensors, group_), {Elements<int32_t>(tensors.views[0]),
                                 Elements<int32_t>(tensors.views[1]), ScalesOf(tensors.views[2])}));
}

std::string GptqCodes::Describe() const {
  return fmt::format("U{}, {} and a zero point; activations as they are", options_.bits,
                     DescribeGroup(options_.group));
}

std::vector<StoredTensor> GptqCodes::Tensors(size_t rows, size_t cols) const {
  const size_t per_word = 32 / options_.bits;
  RequireMultiple("outputs", rows, per_word);
  RequireMultiple("inputs", cols, per_word);
  const size_t groups = GroupsOf(cols, options_.group);
  return {{"qweight", {Shape{cols / per_word, rows}}, {DType::kI32}},
          {"qzeros", {Shape{groups, rows / per_word}}, {DType::kI32}},
          {"scales", {Shape{groups, rows}}, {DType::kF16, DType::kBF16, DType::kF32}},
          {"g_idx", {Shape{cols}}, {DType::kI32}, options_.has_order}};
}

WeightMatrix GptqCodes::Load(const MatrixTensors& tensors, WeightMemory& memory) const {
  CheckScales(tensors, "scales", tensors.views[2], tensors.views[0]);
  return memory.Keep(quant::ImportGptq(
      ShapeOf(tensors, options_.group),
      {options_.is_v2 ? quant::GptqFormat::kV2 : quant::GptqFormat::kV1, options_.bits,
       Elements<int32_t>(tensors.views[0]), Elements<int32_t>(tensors.views[1]),
       ScalesOf(tensors.views[2]), Elements<int32_t>(tensors.views[3]), options_.has_order}));
}

std::string PackQuantizedCodes::Describe() const {
  return fmt::format("{}{}, {}{}{}", options_.is_symmetric ? "I" : "U", options_.bits,
                     DescribeGroup(options_.group),
                     options_.is_symmetric ? "" : " and a zero point",
                     DescribeActivations(options_.act));
}

std::vector<StoredTensor> PackQuantizedCodes::Tensors(size_t rows, size_t cols) const {
  const size_t per_word = 32 / options_.bits;
  const size_t groups = GroupsOf(cols, options_.group);
  std::vector<StoredTensor> tensors = {
      {"weight_packed", {Shape{rows, quant::CeilDiv(cols, per_word)}}, {DType::kI32}},
      {"weight_scale", {Shape{rows, groups}}, FloatDTypes()},
      {"weight_shape", {Shape{2}}, {DType::kI64, DType::kI32}, false}};
  if (options_.group == 0) tensors[1].shapes = PerRowShapes(rows);
  if (!options_.is_symmetric) {
    tensors.push_back(
        {"weight_zero_point", {Shape{quant::CeilDiv(rows, per_word), groups}}, {DType::kI32}});
  }
  if (options_.has_order) tensors.push_back({"weight_g_idx", {Shape{cols}}, {DType::kI32}});
  return tensors;
}

WeightMatrix PackQuantizedCodes::Load(const MatrixTensors& tensors, WeightMemory& memory) const {
  CheckScales(tensors, "weight_scale", tensors.views[1], tensors.views[0]);
  if (const TensorView& shape = tensors.views[2]; shape.data != nullptr) {
    const auto at = [&](size_t i) {
      return shape.dtype == DType::kI64 ? Elements<int64_t>(shape)[i]
                                        : int64_t{Elements<int32_t>(shape)[i]};
    };
    if (at(0) != static_cast<int64_t>(tensors.rows) || at(1) != static_cast<int64_t>(tensors.cols))
      tensors.Refuse("weight_shape", fmt::format("is [{}, {}], expected [{}, {}]", at(0), at(1),
                                                 tensors.rows, tensors.cols));
  }
  size_t next = 3;
  quant::PackQuantizedTensors packed;
  packed.bits = options_.bits;
  packed.packed = Elements<int32_t>(tensors.views[0]);
  packed.scales = ScalesOf(tensors.views[1]);
  if (!options_.is_symmetric) packed.zero_points = Elements<int32_t>(tensors.views[next++]);
  if (options_.has_order) packed.g_idx = Elements<int32_t>(tensors.views[next++]);
  packed.keeps_order = options_.has_order;
  WeightMatrix matrix =
      memory.Keep(quant::ImportPackQuantized(ShapeOf(tensors, options_.group), packed));
  matrix.act = options_.act;
  return matrix;
}

std::string Int4Codes::Describe() const {
  return fmt::format("I4, {}{}", DescribeGroup(options_.group), DescribeActivations(options_.act));
}

std::vector<StoredTensor> Int4Codes::Tensors(size_t rows, size_t cols) const {
  if (options_.is_paired) RequireMultiple("outputs", rows, 2);
  std::vector<StoredTensor> tensors = {
      {"weight", {Shape{options_.is_paired ? rows / 2 : rows, cols}}, {DType::kI8}},
      {"weight_scale", PerRowShapes(rows), FloatDTypes()}};
  if (!options_.is_modelslim) return tensors;
  tensors.push_back({"weight_offset", PerRowShapes(rows), FloatDTypes(), false});
  // Sums of parts: one of an output, or 16 of w2.
  std::vector<Shape> parts = PerRowShapes(rows);
  for (size_t count : {16u, 8u, 4u, 2u}) parts.push_back(Shape{rows, count});
  tensors.push_back({"scale_bias", parts, {DType::kF32}, false});
  if (options_.group != 0) {
    const size_t groups = GroupsOf(cols, options_.group);
    tensors.push_back({"weight_scale_second", {Shape{rows, groups}}, FloatDTypes()});
    tensors.push_back({"weight_offset_second", {Shape{rows, groups}}, FloatDTypes(), false});
  }
  return tensors;
}

WeightMatrix Int4Codes::Load(const MatrixTensors& tensors, WeightMemory& memory) const {
  const TensorView& codes = tensors.views[0];
  CheckScales(tensors, "weight_scale", tensors.views[1], codes);
  if (options_.is_modelslim && tensors.Has(2))
    RequireZeroOffsets(tensors, "weight_offset", tensors.views[2]);
  quant::PackedShape shape = ShapeOf(tensors, 0);
  quant::RawScales scales = ScalesOf(tensors.views[1]);
  std::vector<F16> combined;
  if (options_.is_modelslim && options_.group != 0) {
    CheckScales(tensors, "weight_scale_second", tensors.views[4], codes);
    if (tensors.Has(5)) RequireZeroOffsets(tensors, "weight_offset_second", tensors.views[5]);
    const auto floats = [](const TensorView& view) {
      std::vector<float> values(view.NumElements());
      for (size_t i = 0; i < values.size(); ++i) values[i] = ScaleValue(view, i);
      return values;
    };
    combined = quant::CombineGroupScales(floats(tensors.views[1]), floats(tensors.views[4]));
    RequireFinite(tensors, combined);
    shape.group = options_.group;
    scales = {DType::kF16, std::as_bytes(std::span<const F16>(combined))};
  }
  const std::span<const int8_t> bytes = Elements<int8_t>(codes);
  quant::QuantMatrix imported = options_.is_paired
                                    ? quant::ImportPairedRows(shape, codes.shape[0], bytes, scales)
                                    : quant::ImportInt4Bytes(shape, codes.shape[0], bytes, scales);
  WeightMatrix matrix = memory.Keep(std::move(imported));
  matrix.act = options_.act;
  if (options_.is_modelslim && tensors.Has(3)) {
    const double off = quant::ScaleBiasDeviation(tensors.module + ".scale_bias", matrix.AsBank(), 0,
                                                 Elements<float>(tensors.views[3]));
    if (!(off <= kScaleBiasTolerance))
      tensors.Refuse("scale_bias",
                     fmt::format("differs from 8 times the sums of the weights by {:.2g}"
                                 " of their size: the file is damaged, or its weights "
                                 "are not those of this format",
                                 off));
  }
  return matrix;
}

}  // namespace switchyard
