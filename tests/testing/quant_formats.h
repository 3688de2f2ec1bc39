// Quantised formats and rows for tests, and their exact values.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/decode/decode.h"
#include "quant/weight_quant.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::testing {

// Every way to quantise a matrix, by name.
inline std::vector<std::pair<std::string, quant::WeightQuant>> AllWeightQuants() {
  using quant::WeightQuant;
  return {
      {"int8 channel", WeightQuant::Int8Channel()},
      {"int4 channel", WeightQuant::Int4Channel()},
      {"int4 group", WeightQuant::Int4Group(32, DType::kBF16)},
      {"uint4 group", WeightQuant::Uint4Group(64, DType::kF16)},
      {"fp8 tensor", WeightQuant::Fp8Tensor()},
      {"fp8 channel", WeightQuant::Fp8Channel()},
      {"fp8 block", WeightQuant::Fp8Block(128, 128)},
      {"mxfp8 ceil", WeightQuant::MxFp8(MxScaleRule::kCeil)},
      {"mxfp8 floor", WeightQuant::MxFp8(MxScaleRule::kOcpFloor)},
      {"mxfp4 ceil", WeightQuant::MxFp4(MxScaleRule::kCeil, MxRounding::kHalfToZero)},
      {"mxfp4 even", WeightQuant::MxFp4(MxScaleRule::kEven, MxRounding::kHalfToEven)},
      {"nvfp4", WeightQuant::NvFp4()},
      {"mxfp4 floor", WeightQuant::MxFp4(MxScaleRule::kOcpFloor, MxRounding::kHalfToEven)},
  };
}

// Every kind of activations, with static scales that suit unit normal values.
inline std::vector<ActQuant> AllActQuants() {
  std::vector<ActQuant> all;
  for (int kind = 0; kind <= static_cast<int>(ActQuantKind::kMxFp4); ++kind) {
    ActQuant how;
    how.kind = static_cast<ActQuantKind>(kind);
    how.scale = how.kind == ActQuantKind::kInt8Static ? 0.03f : 0.01f;
    all.push_back(how);
  }
  ActQuant offset = all[static_cast<size_t>(ActQuantKind::kInt8Static)];
  offset.offset = -12.0f;
  all.push_back(offset);
  ActQuant small_groups = all[static_cast<size_t>(ActQuantKind::kFp8Group)];
  small_groups.group = 64;
  small_groups.power_of_two_scale = true;
  all.push_back(small_groups);
  ActQuant ceil = all[static_cast<size_t>(ActQuantKind::kMxFp4)];
  ceil.mx_rule = MxScaleRule::kCeil;
  ceil.mx_rounding = MxRounding::kHalfToZero;
  all.push_back(ceil);
  return all;
}

// Element k of row i in f64.
inline double RowElement(const QuantRows& x, size_t i, size_t k) {
  const double code = kernels::CodeAt(x.dtype, x.Row(i), k);
  if (x.scale == nullptr) return code;
  const size_t at = i * x.scale_stride + k / x.scale_cols;
  return (code - double{x.offset}) * double{kernels::ScaleAt(x.scale_dtype, x.scale, at)};
}

}  // namespace switchyard::testing
