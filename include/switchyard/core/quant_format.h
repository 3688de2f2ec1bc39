// How quantised numbers lie in memory: matrices of weights with their scales, and rows of
// activations with theirs. Contract 5.15, 3.1, 4.1.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/dtype.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/rows.h"
#include "switchyard/core/small_floats.h"

namespace switchyard {

// The canonical form of every weight (contract 5.15): w[n, k] = (q[n, k] - zero) * scale.
//
// q is row-major with K innermost. Scales lie on a grid [ceil(N / scale_rows), ceil(K /
//   scale_cols)], row-major: per tensor scale_rows = N, scale_cols = K; per channel 1, K; groups
//   along K 1, g; blocks 128, 128. Zero points are u8 on the same grid.
//   Two formats have more: one f32 for the whole matrix on all scales (NVFP4), or groups of columns
//   that do not lie side by side (GPTQ with desc_act): grid column column_group[k] serves column k.
struct MatrixFormat {
  DType dtype = DType::kF32;        // of q: kF32 kF16 kBF16 kI8 kU8 kI4 kU4 kF8E4M3 kF4E2M1,
                                    // or blocks of ggml, which hold their scales themselves
  DType scale_dtype = DType::kF32;  // kF32 kF16 kBF16 kF8E8M0 kF8E4M3
  size_t scale_rows = 0;            // 0 = there are no scales
  size_t scale_cols = 0;
  bool has_zero = false;
  bool has_tensor_scale = false;
  bool has_column_groups = false;
  bool in_panels = false;  // the same codes and scales, in the order in which products read them
                           // (kernels/panels/panel.h): data is all of a matrix; no stride, and
                           // scales and zero points are in it

  bool is_quantized() const { return scale_rows != 0; }
  friend bool operator==(const MatrixFormat&, const MatrixFormat&) = default;
};

// One matrix per local expert, all of one shape and format, wherever each lies: a stacked bank and
// one tensor per expert are read alike, without a copy. Gate and up rows that alternate in one bank
// are two of these with twice the stride.
//
// Shapes: data: L pointers to [rows, cols]; row n at BytesOf(dtype, n * stride) bytes, stride even
//   for 4-bit types. scale, zero: L pointers each, or empty; grid row i at i * scale_stride
//   elements. bias: L pointers to f32 [rows], every bias_stride-th value, or empty. tensor_scale: L
//   pointers to one f32 each, column_group: L pointers to [cols], or empty. With format.in_panels
//   data alone is there, beside bias. Non-owning.
struct ExpertMatrices {
  MatrixFormat format;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;
  size_t scale_stride = 0;
  size_t bias_stride = 1;
  std::span<const std::byte* const> data;
  std::span<const std::byte* const> scale;
  std::span<const std::byte* const> zero;
  std::span<const float* const> bias;
  std::span<const float* const> tensor_scale;
  std::span<const int32_t* const> column_group;

  size_t num_experts() const { return data.size(); }
};

// How activations become codes before a product. Contract 3.1, 4.1.2; an amax is over one row
// unless said otherwise, codes are rounded half to even.
enum class ActQuantKind : uint8_t {
  kNone,
  kInt8Token,        // scale amax / 127
  kInt4Token,        // scale amax / 7, codes clipped to [-8, 7], one in a byte
  kInt8Static,       // code = clamp(round(x * (1 / scale) + offset)), the given scale and offset
  kFp8Token,         // e4m3, scale amax / 448
  kFp8Group,         // e4m3, scale amax / 448 of each `group` columns
  kFp8Tensor,        // e4m3, one scale over all rows
  kFp8TensorStatic,  // e4m3, the given scale
  kMxFp8,            // e4m3, e8m0 scale of each 32 columns
  kMxFp4             // e2m1, e8m0 scale of each 32 columns
};
// "int8_token", "fp8_group", …: the names that configurations use.
std::string_view ActQuantKindName(ActQuantKind kind);

// How the exponent of an MX block is chosen. The two differ by up to one binade, so it is recorded
// per tensor (contract 4.1.2).
enum class MxScaleRule : uint8_t {
  kOcpFloor,  // floor(log2(amax)) - emax, codes saturate
  kCeil,      // ceil(log2(amax / largest code)), nothing saturates
  kEven       // kOcpFloor of amax rounded to one bit of mantissa, half up (Quark's "even")
};

// What a layer does with its activations. Only the fields that a kind names are read.
struct ActQuant {
  ActQuantKind kind = ActQuantKind::kNone;
  MxScaleRule mx_rule = MxScaleRule::kOcpFloor;
  MxRounding mx_rounding = MxRounding::kHalfToEven;  // kMxFp4
  size_t group = 128;                                // kFp8Group
  bool power_of_two_scale = false;  // kFp8Token, kFp8Group: round the scale up to a power of two
  float amax_floor = 0.0f;          // of the dynamic int8, int4 and fp8 kinds; 0 = 1e-10, and 1e-12
                                    // for kFp8Tensor
  float scale = 1.0f;               // of the static kinds
  float offset = 0.0f;              // kInt8Static

  friend bool operator==(const ActQuant&, const ActQuant&) = default;
};

// Rows of activations, plain or as codes with scales: what travels between ranks, and what a
// grouped product takes. Non-owning, usually in the arena of the step.
//
// Shapes: data [rows, cols] of dtype, row i at i * stride bytes; scale: row i at i * scale_stride
//   elements of scale_dtype, ceil(cols / scale_cols) of them (one for the per-token kinds; a single
//   one with scale_stride 0 for the per-tensor kinds). Or rows lie where they have arrived: row i
//   at scattered[i], its scales scale_offset bytes behind; data, stride, scale and scale_stride
//   then say nothing.
struct QuantRows {
  ActQuantKind kind = ActQuantKind::kNone;
  DType dtype = DType::kF32;  // with kNone: kF32, kBF16 or kF16
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;
  const std::byte* data = nullptr;
  DType scale_dtype = DType::kF32;
  size_t scale_cols = 0;
  size_t scale_stride = 0;
  const std::byte* scale = nullptr;
  float offset = 0.0f;                          // kInt8Static: value = (code - offset) * scale
  const std::byte* const* scattered = nullptr;  // [rows], or null; not of is_plain_f32()
  size_t scale_offset = 0;                      // 0 = scattered rows without scales

  // Shapes: x [rows, cols] f32; the result refers to it.
  static QuantRows Plain(ConstRows x) {
    QuantRows plain;
    plain.rows = x.rows;
    plain.cols = x.cols;
    plain.stride = x.stride * sizeof(float);
    plain.data = reinterpret_cast<const std::byte*>(x.data);
    return plain;
  }
  bool is_plain_f32() const { return kind == ActQuantKind::kNone && dtype == DType::kF32; }
  // The rows of is_plain_f32().
  ConstRows F32() const {
    SY_DCHECK(is_plain_f32() && scattered == nullptr);
    return ConstRows(reinterpret_cast<const float*>(data), rows, cols, stride / sizeof(float));
  }
  const std::byte* Row(size_t i) const {
    SY_DCHECK(i < rows);
    return scattered != nullptr ? scattered[i] : data + i * stride;
  }
  bool has_scale() const { return scattered != nullptr ? scale_offset != 0 : scale != nullptr; }
  // The first scale of a row; of has_scale().
  const std::byte* ScaleRow(size_t i) const {
    SY_DCHECK(i < rows && has_scale());
    if (scattered != nullptr) return scattered[i] + scale_offset;
    return scale + i * scale_stride * DTypeBytes(scale_dtype);
  }
  // Bytes of the scales of one row; 0 if there are none, or one for all.
  size_t ScaleRowBytes() const {
    if (scattered == nullptr) return scale == nullptr ? 0 : scale_stride * DTypeBytes(scale_dtype);
    return has_scale() ? (cols + scale_cols - 1) / scale_cols * DTypeBytes(scale_dtype) : 0;
  }
  QuantRows Slice(size_t first, size_t count) const {
    SY_DCHECK(first + count <= rows);
    QuantRows slice = *this;
    slice.rows = count;
    if (scattered != nullptr) {
      slice.scattered = scattered + first;
      return slice;
    }
    slice.data = data + first * stride;
    if (scale != nullptr) slice.scale = scale + first * scale_stride * DTypeBytes(scale_dtype);
    return slice;
  }
};

}  // namespace switchyard
