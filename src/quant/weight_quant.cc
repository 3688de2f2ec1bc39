#include "quant/weight_quant.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "kernels/decode/decode.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::quant {
namespace {

WeightQuant Of(DType dtype, DType scale_dtype, size_t scale_rows, size_t scale_cols) {
  WeightQuant how;
  how.format = {dtype, scale_dtype, scale_rows, scale_cols, false};
  return how;
}

float LargestCode(DType dtype) {
  switch (dtype) {
    case DType::kI8: return 127.0f;
    case DType::kI4: return 7.0f;
    case DType::kU8: return 255.0f;
    case DType::kU4: return 15.0f;
    case DType::kF8E4M3: return kE4M3Max;
    case DType::kF4E2M1: return kE2M1Max;
    default:
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("weights cannot be quantised to {}", DTypeName(dtype)));
  }
}

// One cell of the grid and what its values become.
class Cell {
 public:
  Cell(ConstRows w, const WeightQuant& how, QuantMatrix& out, size_t i, size_t j)
      : w_(w), how_(how), out_(out), i_(i), j_(j) {
    const MatrixFormat& format = out.format;
    n0_ = i * format.scale_rows;
    k0_ = j * format.scale_cols;
    n1_ = n0_ + std::min(w.rows - n0_, format.scale_rows);
    k1_ = k0_ + std::min(w.cols - k0_, format.scale_cols);
  }

  void Quantize() {
    Measure();
    const float scale = Scale();
    const int zero = Zero(scale);
    if (out_.format.has_zero) out_.zero[i_ * out_.scale_stride + j_] = static_cast<std::byte>(zero);
    for (size_t n = n0_; n < n1_; ++n) {
      for (size_t k = k0_; k < k1_; ++k)
        out_.SetCode(n, k, finite_ ? Code(w_.Row(n)[k] / scale, zero) : 0);
    }
  }

 private:
  void Measure() {
    for (size_t n = n0_; n < n1_; ++n) {
      for (float value : w_.RowSpan(n).subspan(k0_, k1_ - k0_)) {
        finite_ = finite_ && std::isfinite(value);
        low_ = std::min(low_, value);
        high_ = std::max(high_, value);
      }
    }
  }

  // Chooses the scale, stores it, and returns it as stored.
  float Scale() {
    const DType dtype = out_.format.dtype;
    const DType scale_dtype = out_.format.scale_dtype;
    const float largest = LargestCode(dtype);
    float scale = 0;
    if (!finite_) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (scale_dtype == DType::kF8E8M0) {
      const int exponent = MxExponent(std::max(-low_, high_), how_.mx_rule, largest,
                                      dtype == DType::kF8E4M3 ? 8 : std::ilogb(largest));
      scale = DecodeE8M0(EncodeE8M0(exponent));
    } else {
      const float range = out_.format.has_zero ? high_ - low_ : std::max(-low_, high_);
      const float smallest = scale_dtype == DType::kF16      ? 0x1p-14f
                             : scale_dtype == DType::kF8E4M3 ? 0x1p-9f
                                                             : FLT_MIN;
      scale = std::max(range / largest / out_.tensor_scale, smallest);
    }
    out_.SetScale(i_, j_, scale);
    return kernels::ScaleAt(scale_dtype, out_.scale.data(), i_ * out_.scale_stride + j_) *
           out_.tensor_scale;
  }

  int Zero(float scale) const {
    if (!out_.format.has_zero || !finite_) return 0;
    return static_cast<int>(
        std::clamp(std::nearbyint(-low_ / scale), 0.0f, LargestCode(out_.format.dtype)));
  }

  int Code(float scaled, int zero) const {
    const DType dtype = out_.format.dtype;
    if (dtype == DType::kF8E4M3) return EncodeE4M3(scaled);
    if (dtype == DType::kF4E2M1) return EncodeE2M1(scaled, how_.mx_rounding);
    const float largest = LargestCode(dtype);
    const bool is_signed = dtype == DType::kI8 || dtype == DType::kI4;
    return static_cast<int>(std::clamp(std::nearbyint(scaled) + static_cast<float>(zero),
                                       is_signed ? -largest : 0.0f, largest));
  }

  const ConstRows w_;
  const WeightQuant& how_;
  QuantMatrix& out_;
  const size_t i_, j_;
  size_t n0_ = 0, n1_ = 0, k0_ = 0, k1_ = 0;
  bool finite_ = true;
  float low_ = 0, high_ = 0;
};

}  // namespace

WeightQuant WeightQuant::Int8Channel() { return Of(DType::kI8, DType::kF32, 1, 0); }
WeightQuant WeightQuant::Int4Channel() { return Of(DType::kI4, DType::kF32, 1, 0); }
WeightQuant WeightQuant::Int4Group(size_t group, DType scale_dtype) {
  return Of(DType::kI4, scale_dtype, 1, group);
}
WeightQuant WeightQuant::Uint4Group(size_t group, DType scale_dtype) {
  WeightQuant how = Of(DType::kU4, scale_dtype, 1, group);
  how.format.has_zero = true;
  return how;
}
WeightQuant WeightQuant::Fp8Tensor() {
  WeightQuant how = Of(DType::kF8E4M3, DType::kF32, 0, 0);
  return how;
}
WeightQuant WeightQuant::Fp8Channel() { return Of(DType::kF8E4M3, DType::kF32, 1, 0); }
WeightQuant WeightQuant::Fp8Block(size_t rows, size_t cols) {
  return Of(DType::kF8E4M3, DType::kF32, rows, cols);
}
WeightQuant WeightQuant::MxFp8(MxScaleRule rule) {
  WeightQuant how = Of(DType::kF8E4M3, DType::kF8E8M0, 1, 32);
  how.mx_rule = rule;
  return how;
}
WeightQuant WeightQuant::MxFp4(MxScaleRule rule, MxRounding rounding) {
  WeightQuant how = Of(DType::kF4E2M1, DType::kF8E8M0, 1, 32);
  how.mx_rule = rule;
  how.mx_rounding = rounding;
  return how;
}

WeightQuant WeightQuant::NvFp4() {
  WeightQuant how = Of(DType::kF4E2M1, DType::kF8E4M3, 1, 16);
  how.format.has_tensor_scale = true;
  return how;
}

namespace {

// With it the largest scale of a group is the largest e4m3.
float TensorScale(ConstRows w) {
  float amax = 0;
  for (size_t n = 0; n < w.rows; ++n) {
    for (float value : w.RowSpan(n)) {
      if (std::isfinite(value)) amax = std::max(amax, std::fabs(value));
    }
  }
  return std::max(amax / (kE4M3Max * kE2M1Max), FLT_MIN);
}

}  // namespace

QuantMatrix QuantizeMatrix(ConstRows w, const WeightQuant& how) {
  LargestCode(how.format.dtype);  // throws for other types
  MatrixFormat format = how.format;
  if (format.scale_rows == 0) format.scale_rows = std::max<size_t>(1, w.rows);
  if (format.scale_cols == 0) format.scale_cols = std::max<size_t>(1, w.cols);
  QuantMatrix out = QuantMatrix::Make(format, w.rows, w.cols);
  if (format.has_tensor_scale) out.tensor_scale = TensorScale(w);
  for (size_t i = 0; i < out.grid_rows(); ++i) {
    for (size_t j = 0; j < out.scale_stride; ++j) Cell(w, how, out, i, j).Quantize();
  }
  return out;
}

}  // namespace switchyard::quant
