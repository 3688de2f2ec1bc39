#include "quant/act_quant.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/decode/decode.h"
#include "kernels/quantize/quantize.h"
#include "quant/matrix.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::quant {
namespace {

constexpr size_t kMxBlock = 32;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool IsStatic(ActQuantKind kind) {
  return kind == ActQuantKind::kInt8Static || kind == ActQuantKind::kFp8TensorStatic;
}
bool HasOneScale(ActQuantKind kind) { return IsStatic(kind) || kind == ActQuantKind::kFp8Tensor; }

void CheckSettings(const ActQuant& how) {
  if (IsStatic(how.kind) && !(how.scale > 0.0f && std::isfinite(how.scale))) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the input scale must be positive and finite, it is {}",
                            ActQuantKindName(how.kind), how.scale));
  }
  if (how.kind == ActQuantKind::kFp8Group && how.group == 0)
    throw Error(ErrorCode::kInvalidArgument, "fp8_group: the group size is 0");
}

float AmaxFloor(const ActQuant& how) {
  if (how.amax_floor > 0.0f) return how.amax_floor;
  return how.kind == ActQuantKind::kFp8Tensor ? 1e-12f : 1e-10f;
}

// Type and number of the codes and scales of one row.
QuantRows Layout(const ActQuant& how, size_t cols) {
  QuantRows layout;
  layout.kind = how.kind;
  layout.cols = cols;
  layout.scale_cols = std::max<size_t>(1, cols);
  switch (how.kind) {
    case ActQuantKind::kNone: SY_CHECK(false && "plain rows have no codes"); break;
    case ActQuantKind::kInt8Token:
    case ActQuantKind::kInt4Token:
    case ActQuantKind::kInt8Static: layout.dtype = DType::kI8; break;
    case ActQuantKind::kFp8Token:
    case ActQuantKind::kFp8Tensor:
    case ActQuantKind::kFp8TensorStatic: layout.dtype = DType::kF8E4M3; break;
    case ActQuantKind::kFp8Group:
      layout.dtype = DType::kF8E4M3;
      layout.scale_cols = how.group;
      break;
    case ActQuantKind::kMxFp8:
    case ActQuantKind::kMxFp4:
      layout.dtype = how.kind == ActQuantKind::kMxFp8 ? DType::kF8E4M3 : DType::kF4E2M1;
      layout.scale_dtype = DType::kF8E8M0;
      layout.scale_cols = kMxBlock;
      break;
  }
  const size_t scales = std::max<size_t>(1, CeilDiv(cols, layout.scale_cols));
  layout.scale_stride = HasOneScale(how.kind) ? 0 : scales;
  // Rows start at multiples of 64 bytes, so that vector loads do not straddle cache lines.
  layout.stride = (BytesOf(layout.dtype, cols) + 63) / 64 * 64;
  return layout;
}

void Int8Row(const float* x, size_t n, float largest, const ActQuant& how, int8_t* codes,
             float* scale) {
  float amax = kernels::MaxMagnitude(x, n);
  if (!std::isfinite(amax)) {
    *scale = kNaN;
    std::memset(codes, 0, n);
    return;
  }
  amax = std::max(amax, AmaxFloor(how));
  *scale = amax / largest;
  kernels::EncodeInt8(x, n, {largest / amax, 0.0f, -largest - 1.0f, largest}, codes);
}

void Fp8Group(const float* x, size_t n, const ActQuant& how, uint8_t* codes, float* scale) {
  const float amax = kernels::MaxMagnitude(x, n);
  if (!std::isfinite(amax)) {
    *scale = kNaN;
    std::memset(codes, 0, n);
    return;
  }
  const float floored = std::max(amax, AmaxFloor(how));
  *scale = how.power_of_two_scale
               ? std::ldexp(1.0f, MxExponent(floored, MxScaleRule::kCeil, kE4M3Max, 8))
               : floored / kE4M3Max;
  kernels::EncodeE4M3Row(x, n, *scale, codes);
}

void MxBlock(const float* x, size_t n, const ActQuant& how, uint8_t* codes, uint8_t* scale) {
  const bool fp8 = how.kind == ActQuantKind::kMxFp8;
  const float amax = kernels::MaxMagnitude(x, n);
  if (!std::isfinite(amax)) {
    *scale = 255;
    std::memset(codes, 0, BytesOf(fp8 ? DType::kF8E4M3 : DType::kF4E2M1, n));
    return;
  }
  *scale = EncodeE8M0(MxExponent(amax, how.mx_rule, fp8 ? kE4M3Max : kE2M1Max, fp8 ? 8 : 2));
  if (fp8) {
    kernels::EncodeE4M3Row(x, n, DecodeE8M0(*scale), codes);
  } else {
    kernels::EncodeE2M1Row(x, n, DecodeE8M0(*scale), how.mx_rounding, codes);
  }
}

// Codes of a row under the one scale of all rows.
void SharedScaleRow(const float* x, size_t n, const ActQuant& how, float scale, std::byte* codes) {
  if (how.kind == ActQuantKind::kInt8Static) {
    kernels::EncodeInt8(x, n, {1.0f / scale, how.offset, -128.0f, 127.0f},
                        reinterpret_cast<int8_t*>(codes));
    return;
  }
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  kernels::EncodeE4M3Row(x, n, scale, bytes);
  if (how.kind == ActQuantKind::kFp8TensorStatic) return;
  if (std::isfinite(kernels::MaxMagnitude(x, n))) return;
  for (size_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) bytes[i] = EncodeE4M3(kNaN);
  }
}

// Codes and scales of a row that has scales of its own.
void OwnScaleRow(const float* x, const QuantRows& layout, const ActQuant& how, std::byte* codes,
                 std::byte* scales) {
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  if (how.kind == ActQuantKind::kInt8Token || how.kind == ActQuantKind::kInt4Token) {
    const float largest = how.kind == ActQuantKind::kInt8Token ? 127.0f : 7.0f;
    return Int8Row(x, layout.cols, largest, how, reinterpret_cast<int8_t*>(codes),
                   reinterpret_cast<float*>(scales));
  }
  for (size_t group = 0; group < layout.scale_stride; ++group) {
    const size_t first = group * layout.scale_cols;
    const size_t n = std::min(layout.scale_cols, layout.cols - first);
    uint8_t* at = bytes + BytesOf(layout.dtype, first);
    if (layout.scale_dtype == DType::kF8E8M0) {
      MxBlock(x + first, n, how, at, reinterpret_cast<uint8_t*>(scales) + group);
    } else {
      Fp8Group(x + first, n, how, at, reinterpret_cast<float*>(scales) + group);
    }
  }
}

// amax over the finite values of all counted rows, over 448.
float TensorScale(ExecContext& context, ConstRows x, const ActQuant& how,
                  std::span<const uint8_t> counted) {
  ArenaScope scope(context.arena);
  const std::span<float> amax = context.arena.AllocateSpan<float>(x.rows);
  ForEachRow(context, x.rows, [&](size_t i) {
    const bool counts = counted.empty() || counted[i] != 0;
    amax[i] = counts ? kernels::MaxFiniteMagnitude(x.Row(i), x.cols) : 0.0f;
  });
  float most = AmaxFloor(how);
  for (float value : amax) most = std::max(most, value);
  return most / kE4M3Max;
}

}  // namespace

int MxExponent(float amax, MxScaleRule rule, float largest, int largest_exponent) {
  if (amax == 0.0f) return -127;
  if (rule == MxScaleRule::kEven) {
    const uint32_t rounded = (std::bit_cast<uint32_t>(amax) + 0x200000u) & 0xff800000u;
    const auto value = std::bit_cast<float>(rounded);  // infinity beyond the largest f32
    return (std::isinf(value) ? 128 : std::ilogb(value)) - largest_exponent;
  }
  if (rule == MxScaleRule::kOcpFloor) return std::ilogb(amax) - largest_exponent;
  int exponent = 0;
  const double fraction = std::frexp(double{amax} / double{largest}, &exponent);  // in [0.5, 1)
  return fraction == 0.5 ? exponent - 1 : exponent;
}

QuantRows QuantizeRows(ExecContext& context, ConstRows x, const ActQuant& how,
                       std::span<const uint8_t> counted) {
  SY_CHECK(counted.empty() || counted.size() == x.rows);
  if (how.kind == ActQuantKind::kNone) return QuantRows::Plain(x);
  CheckSettings(how);
  QuantRows result = Layout(how, x.cols);
  result.rows = x.rows;
  const size_t scale_row_bytes = result.scale_stride * DTypeBytes(result.scale_dtype);
  std::byte* codes = context.arena.AllocateSpan<std::byte>(x.rows * result.stride).data();
  std::byte* scales =
      context.arena
          .AllocateSpan<std::byte>(HasOneScale(how.kind) ? sizeof(float) : x.rows * scale_row_bytes)
          .data();
  float shared = how.scale;
  if (how.kind == ActQuantKind::kFp8Tensor) shared = TensorScale(context, x, how, counted);
  if (HasOneScale(how.kind)) std::memcpy(scales, &shared, sizeof(float));
  if (how.kind == ActQuantKind::kInt8Static) result.offset = how.offset;
  ForEachRow(context, x.rows, [&](size_t i) {
    std::byte* row = codes + i * result.stride;
    if (!counted.empty() && counted[i] == 0) {
      std::memset(row, 0, result.stride);
      std::memset(scales + i * scale_row_bytes, 0, scale_row_bytes);
    } else if (HasOneScale(how.kind)) {
      SharedScaleRow(x.Row(i), x.cols, how, shared, row);
    } else {
      OwnScaleRow(x.Row(i), result, how, row, scales + i * scale_row_bytes);
    }
  });
  result.data = codes;
  result.scale = scales;
  return result;
}

void DequantizeRow(const QuantRows& x, size_t i, float* out) {
  kernels::CodeRow row;
  row.dtype = x.dtype;
  row.q = x.Row(i);
  row.n = x.cols;
  row.group = x.scale_cols;
  row.scale_dtype = x.scale_dtype;
  const std::byte* scale = x.has_scale() ? x.ScaleRow(i) : nullptr;
  if (x.offset == 0.0f) {
    row.scale = scale;
    kernels::DecodeRow(row, out);
    return;
  }
  kernels::DecodeRow(row, out);
  const float factor = kernels::ScaleAt(x.scale_dtype, scale, 0);
  for (size_t k = 0; k < x.cols; ++k) out[k] = (out[k] - x.offset) * factor;
}

void DequantizeRows(ExecContext& context, const QuantRows& x, Rows out) {
  SY_CHECK_EQ(out.rows, x.rows);
  SY_CHECK_EQ(out.cols, x.cols);
  ForEachRow(context, x.rows, [&](size_t i) { DequantizeRow(x, i, out.Row(i)); });
}

}  // namespace switchyard::quant
