#include "quant/weight_quant.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

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

// Smallest and largest of values, at most and at least 0, and whether all are finite.
struct Range {
  float low = 0.0f, high = 0.0f;
  bool finite = true;

  void Add(std::span<const float> values) {
    float low_most = low, high_most = high;
    uint32_t bad = 0;
    for (float value : values) {
      const uint32_t exponent = std::bit_cast<uint32_t>(value) & 0x7f800000u;
      bad |= exponent == 0x7f800000u ? 1u : 0u;
      low_most = value < low_most ? value : low_most;
      high_most = value > high_most ? value : high_most;
    }
    low = low_most;
    high = high_most;
    finite = finite && bad == 0;
  }
};

// To the nearest whole number, ties to even, of |value| < 2^22: f32 has no fractions beyond 2^23.
// Loops of it become vector code, which calls of nearbyint do not.
float RoundToEven(float value) {
  constexpr float kNoFractions = 0x1.8p23f;
  return (value + kNoFractions) - kNoFractions;
}

// Codes of integer types between `least` and `largest`. Values far outside are cut off first: they
// become the extremes in any case.
void IntegerCodes(std::span<const float> values, float scale, int zero, float least, float largest,
                  uint8_t* codes) {
  constexpr float kFar = 0x1p20f;
  const auto offset = static_cast<float>(zero);
  for (size_t k = 0; k < values.size(); ++k) {
    const float scaled = std::min(std::max(values[k] / scale, -kFar), kFar);
    const float code = std::min(std::max(RoundToEven(scaled) + offset, least), largest);
    codes[k] = static_cast<uint8_t>(static_cast<int>(code) & 255);
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

  // `codes` is scratch for the codes of a row.
  void Quantize(std::vector<uint8_t>& codes) {
    for (size_t n = n0_; n < n1_; ++n) range_.Add(RowPart(n));
    const float scale = Scale();
    const int zero = Zero(scale);
    if (out_.format.has_zero) out_.zero[i_ * out_.scale_stride + j_] = static_cast<std::byte>(zero);
    codes.assign(k1_ - k0_, 0);
    for (size_t n = n0_; n < n1_; ++n) {
      if (range_.finite) Encode(RowPart(n), scale, zero, codes.data());
      Store(n, codes);
    }
  }

 private:
  std::span<const float> RowPart(size_t n) const { return w_.RowSpan(n).subspan(k0_, k1_ - k0_); }

  // Chooses the scale, stores it, and returns it as stored.
  float Scale() {
    const DType dtype = out_.format.dtype;
    const DType scale_dtype = out_.format.scale_dtype;
    const float largest = LargestCode(dtype);
    float scale = 0;
    if (!range_.finite) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (scale_dtype == DType::kF8E8M0) {
      const int exponent = MxExponent(std::max(-range_.low, range_.high), how_.mx_rule, largest,
                                      dtype == DType::kF8E4M3 ? 8 : std::ilogb(largest));
      scale = DecodeE8M0(EncodeE8M0(exponent));
    } else {
      const float range =
          out_.format.has_zero ? range_.high - range_.low : std::max(-range_.low, range_.high);
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
    if (!out_.format.has_zero || !range_.finite) return 0;
    return static_cast<int>(
        std::clamp(std::nearbyint(-range_.low / scale), 0.0f, LargestCode(out_.format.dtype)));
  }

  void Encode(std::span<const float> values, float scale, int zero, uint8_t* codes) const {
    const DType dtype = out_.format.dtype;
    if (dtype == DType::kF8E4M3) {
      for (size_t k = 0; k < values.size(); ++k) codes[k] = EncodeE4M3(values[k] / scale);
    } else if (dtype == DType::kF4E2M1) {
      for (size_t k = 0; k < values.size(); ++k)
        codes[k] = EncodeE2M1(values[k] / scale, how_.mx_rounding);
    } else {
      const float largest = LargestCode(dtype);
      const bool is_signed = dtype == DType::kI8 || dtype == DType::kI4;
      IntegerCodes(values, scale, zero, is_signed ? -largest : 0.0f, largest, codes);
    }
  }

  // Into row n of the matrix, from column k0_ on.
  void Store(size_t n, const std::vector<uint8_t>& codes) {
    const size_t at = n * out_.stride + k0_;
    if (DTypeBits(out_.format.dtype) == 8) {
      std::memcpy(out_.data.data() + at, codes.data(), codes.size());
      return;
    }
    if (at % 2 != 0 || codes.size() % 2 != 0) {
      for (size_t k = 0; k < codes.size(); ++k) out_.SetCode(n, k0_ + k, codes[k]);
      return;
    }
    for (size_t k = 0; k < codes.size(); k += 2) {
      const unsigned pair = (codes[k] & 15u) | (codes[k + 1] & 15u) << 4;
      out_.data[(at + k) / 2] = static_cast<std::byte>(pair);
    }
  }

  const ConstRows w_;
  const WeightQuant& how_;
  QuantMatrix& out_;
  const size_t i_, j_;
  size_t n0_ = 0, n1_ = 0, k0_ = 0, k1_ = 0;
  Range range_;
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
  std::vector<uint8_t> codes;
  for (size_t i = 0; i < out.grid_rows(); ++i) {
    for (size_t j = 0; j < out.scale_stride; ++j) Cell(w, how, out, i, j).Quantize(codes);
  }
  return out;
}

}  // namespace switchyard::quant
