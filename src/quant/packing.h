// Weights as other programs and devices pack them, to the canonical form and back. Plain loops that
// run once, on loading. Contract 5.3-5.8, 5.11, 5.12, 5.14, 5.15.
//
// Each import takes the tensors of one expert. `name` stands in errors for the tensor.
// Errors of all imports: kCorruptData naming the tensor, with the number of elements found and
//   expected, or an entry out of range; kInvalidArgument for dimensions that the packing cannot
//   hold. A scale array may have any of the types that MatrixFormat allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "quant/matrix.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::quant {

// A matrix of outputs N by inputs K, with a scale for each `group` inputs (0 = all).
struct PackedShape {
  std::string_view name;
  size_t n = 0;
  size_t k = 0;
  size_t group = 0;

  size_t groups() const { return group == 0 ? 1 : CeilDiv(k, group); }
};

// Scales as they lie in a file: elements of dtype.
struct RawScales {
  DType dtype = DType::kF32;
  std::span<const std::byte> bytes;

  static RawScales Of(std::span<const F16> scales) { return {DType::kF16, std::as_bytes(scales)}; }
};

// --- Eight 4-bit codes in an i32 -------------------------------------------------------------

// Which nibble of a word holds its i-th element.
enum class NibbleOrder : uint8_t {
  kLinear,  // nibble i
  kSplit    // nibble [0, 4, 1, 5, 2, 6, 3, 7][i]: AWQ, and Quark, which says it the other way
            // around (nibble i holds element [0, 2, 4, 6, 1, 3, 5, 7][i])
};

// Shapes: words [m]; the result [8 m], each in 0..15.
std::vector<uint8_t> UnpackWords(std::span<const int32_t> words, NibbleOrder order);

// The reverse; the low four bits of each code count.
// Errors: kInvalidArgument if the number of codes is no multiple of 8.
std::vector<int32_t> PackWords(std::span<const uint8_t> codes, NibbleOrder order);

// --- AWQ (5.6): w = (q - z) * s ---------------------------------------------------------------

// Shapes: qweight [K, N/8], qzeros [K/g, N/8] in kSplit order along N, scales [K/g, N].
struct AwqTensors {
  std::span<const int32_t> qweight;
  std::span<const int32_t> qzeros;
  RawScales scales;
};
// kU4 with zero points.
QuantMatrix ImportAwq(const PackedShape& shape, const AwqTensors& tensors);

struct OwnedAwq {
  std::vector<int32_t> qweight, qzeros;
  std::vector<F16> scales;
};
// Errors: kInvalidArgument if the matrix is not what ImportAwq makes.
OwnedAwq ExportAwq(const QuantMatrix& matrix);

// --- GPTQ (5.8): w = (q - (z + 1)) * s for v1, (q - z) * s for v2 ------------------------------

enum class GptqFormat : uint8_t { kV1, kV2 };

// Shapes: qweight [K*bits/32, N]: element i of a word is row (32/bits) r + i; qzeros [K/g,
//   N*bits/32], linear along N; scales [K/g, N]; g_idx [K] or empty.
struct GptqTensors {
  GptqFormat format = GptqFormat::kV1;
  size_t bits = 4;  // 4 or 8
  std::span<const int32_t> qweight;
  std::span<const int32_t> qzeros;
  RawScales scales;
  std::span<const int32_t> g_idx;
  bool keeps_order = false;  // column groups even where g_idx names the groups in order
};
// kU4 or kU8 with zero points; symmetric files are those whose zero points are all in the middle.
// With column groups if g_idx does not name the groups in order (desc_act), or keeps_order: experts
// that are computed together must be alike, and so must those of all ranks.
// Errors: also kUnsupported for other bits; kCorruptData for an 8-bit v1 zero point of 255, whose
//   256 no u8 holds, and for a group that does not exist.
QuantMatrix ImportGptq(const PackedShape& shape, const GptqTensors& tensors);

struct OwnedGptq {
  std::vector<int32_t> qweight, qzeros;
  std::vector<F16> scales;
};
// Errors: kInvalidArgument if the matrix is not what ImportGptq makes, or has a zero point that the
//   format cannot say (0 in v1).
OwnedGptq ExportGptq(const QuantMatrix& matrix, GptqFormat format);

// --- Signed 4-bit codes ------------------------------------------------------------------------

// compressed-tensors wNa16 (5.12): i32 [N, K/8], linear, offset binary: w = (nibble - 8) * s.
// Shapes: scales [N, K/g].
QuantMatrix ImportWna16(const PackedShape& shape, std::span<const int32_t> packed,
                        const RawScales& scales);
std::vector<int32_t> ExportWna16(const QuantMatrix& matrix);

// compressed-tensors "pack-quantized" in full (5.12): 4 or 8 bits, groups or whole rows, symmetric
// (offset binary, no zero points) or not.
// Shapes: packed i32 [N, ceil(K*bits/32)], scales [N, K/g], zero_points i32 [ceil(N*bits/32), K/g],
//   linear along N, or empty; g_idx [K] or empty.
struct PackQuantizedTensors {
  size_t bits = 4;
  std::span<const int32_t> packed;
  RawScales scales;
  std::span<const int32_t> zero_points;
  std::span<const int32_t> g_idx;
  bool keeps_order = false;  // as in GptqTensors
};
// kI4 or kI8, or kU4 or kU8 with zero points.
// Errors: also kUnsupported for other bits; kCorruptData for a group that does not exist.
QuantMatrix ImportPackQuantized(const PackedShape& shape, const PackQuantizedTensors& tensors);

// Quark int4 (5.11): i32 [N, K/8] in kSplit order, two's complement.
// Shapes: scales [N, K/g].
QuantMatrix ImportQuarkInt4(const PackedShape& shape, std::span<const int32_t> packed,
                            const RawScales& scales);
std::vector<int32_t> ExportQuarkInt4(const QuantMatrix& matrix);

// ModelSlim W4A8, and W4A4 with the new packing (5.4, 5.5): i8 [N/2, K], rows 2j in the low
// nibbles and 2j + 1 in the high ones. `stored_rows` is the first dimension in the file.
// Shapes: scales [N, K/g].
// Errors: also kCorruptData saying that this is the old packing if stored_rows is N.
QuantMatrix ImportPairedRows(const PackedShape& shape, size_t stored_rows,
                             std::span<const int8_t> packed, const RawScales& scales);
std::vector<int8_t> ExportPairedRows(const QuantMatrix& matrix);

// ModelSlim W4A4, old packing (5.4): i8 [N, K], one code in a byte.
// Shapes: scales [N, K/g].
// Errors: also kCorruptData saying that this is the new packing if stored_rows is N / 2; for a code
//   outside [-8, 7].
QuantMatrix ImportInt4Bytes(const PackedShape& shape, size_t stored_rows,
                            std::span<const int8_t> codes, const RawScales& scales);
std::vector<int8_t> ExportInt4Bytes(const QuantMatrix& matrix);

// The layout of the Ascend kernels (5.4): i32 [K, N/8], nibble i of word c is output channel
// 8c + i, two's complement.
// Shapes: scales [N, K/g].
QuantMatrix ImportNpuInt4(const PackedShape& shape, std::span<const int32_t> packed,
                          const RawScales& scales);
std::vector<int32_t> ExportNpuInt4(const QuantMatrix& matrix);

// NVFP4 (5.14): e2m1 pairs [N, K/2], e4m3 scales [N, K/16] and one f32 for all. The product of both
// scales becomes one f32 (rounded once).
QuantMatrix ImportNvFp4(const PackedShape& shape, std::span<const uint8_t> packed,
                        std::span<const uint8_t> scales, float global_scale);

// --- Scales --------------------------------------------------------------------------------

// The bits of f32 scales in the low halves of i64 (5.4, 5.5).
std::vector<int64_t> WidenScaleBits(std::span<const float> scales);
// Errors: kCorruptData if a high half is neither zeros nor the sign of the low one.
std::vector<float> NarrowScaleBits(std::string_view name, std::span<const int64_t> bits);

// W4A8 per group (5.5): f16_round(channel[n] * second[n, j]).
// Shapes: channel [N], second [N, groups]; the result [N, groups].
std::vector<F16> CombineGroupScales(std::span<const float> channel, std::span<const float> second);

// e8m0 scales [N, B] (B = K/32) as the Ascend kernels take them: [B/2, N, 2] (5.3).
// Errors: kInvalidArgument naming the tensor if B is odd.
std::vector<uint8_t> SplitScalePairs(std::string_view name, std::span<const uint8_t> scales,
                                     size_t n);
// The reverse.
std::vector<uint8_t> JoinScalePairs(std::string_view name, std::span<const uint8_t> pairs,
                                    size_t n);

// How far a W4A8 scale_bias lies from 8 * sum over k of w[n, k] (5.5), relative to 8 * sum of
// |w[n, k]|; the largest over the rows, NaN if there is one. Near 0 for an intact
// file. The product must not add it.
// Shapes: scale_bias [rows, parts], summed over parts.
// Errors: kCorruptData naming the tensor if its size is no multiple of the rows.
double ScaleBiasDeviation(std::string_view name, const ExpertMatrices& w, size_t expert,
                          std::span<const float> scale_bias);

}  // namespace switchyard::quant
