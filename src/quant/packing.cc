#include "quant/packing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/decode/decode.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::quant {
namespace {

constexpr std::array<uint32_t, 8> kSplitNibbles = {0, 4, 1, 5, 2, 6, 3, 7};

uint32_t ShiftOf(NibbleOrder order, size_t element) {
  return 4 *
         (order == NibbleOrder::kLinear ? static_cast<uint32_t>(element) : kSplitNibbles[element]);
}

void CheckCount(std::string_view name, std::string_view part, size_t found, size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kCorruptData,
              fmt::format("{} {}: {} elements, its shape needs {}", name, part, found, expected));
}

void CheckMultiple(std::string_view name, std::string_view dimension, size_t value, size_t step) {
  if (value % step == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {} = {} is no multiple of {}, which this packing needs", name,
                          dimension, value, step));
}

[[noreturn]] void NotExportable(std::string_view packing, const QuantMatrix& matrix) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("a matrix of {} {} zero points has no form in the packing {}",
                          DTypeName(matrix.format.dtype),
                          matrix.format.has_zero ? "with" : "without", packing));
}

// Code (n, k) as its bits.
uint8_t BitsAt(const QuantMatrix& matrix, size_t n, size_t k) {
  const size_t at = n * matrix.stride + k;
  const DType dtype = matrix.format.dtype;
  if (DTypeBits(dtype) == 8) return std::to_integer<uint8_t>(matrix.data[at]);
  const auto byte = std::to_integer<uint8_t>(matrix.data[at / 2]);
  return at % 2 == 0 ? byte & 15 : byte >> 4;
}

// An empty matrix of this shape with the scales of a file.
QuantMatrix WithScales(DType dtype, const PackedShape& shape, const RawScales& scales) {
  QuantMatrix matrix =
      QuantMatrix::Make({dtype, scales.dtype, 1, shape.group, false}, shape.n, shape.k);
  CheckCount(shape.name, "scale", scales.bytes.size() / DTypeBytes(scales.dtype),
             shape.n * shape.groups());
  CheckCount(shape.name, "scale", scales.bytes.size(), matrix.scale.size());
  std::ranges::copy(scales.bytes, matrix.scale.begin());
  return matrix;
}

// An empty matrix with zero points and the scales of a file, where they lie transposed: [K/g, N].
QuantMatrix WithTransposedScales(DType dtype, const PackedShape& shape, const RawScales& scales) {
  QuantMatrix matrix =
      QuantMatrix::Make({dtype, scales.dtype, 1, shape.group, true}, shape.n, shape.k);
  const size_t bytes = DTypeBytes(scales.dtype);
  CheckCount(shape.name, "scales", scales.bytes.size() / bytes, shape.groups() * shape.n);
  for (size_t n = 0; n < shape.n; ++n) {
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      std::memcpy(matrix.scale.data() + (n * matrix.scale_stride + j) * bytes,
                  scales.bytes.data() + (j * shape.n + n) * bytes, bytes);
    }
  }
  return matrix;
}

std::vector<F16> TransposedScales(const QuantMatrix& matrix) {
  std::vector<F16> scales(matrix.rows * matrix.scale_stride);
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      std::memcpy(&scales[j * matrix.rows + n],
                  matrix.scale.data() + (n * matrix.scale_stride + j) * sizeof(F16), sizeof(F16));
    }
  }
  return scales;
}

uint32_t ReadWord(const int32_t* words, size_t i) { return static_cast<uint32_t>(words[i]); }

// Writes the rows of a matrix in words.
class WordRows {
 public:
  explicit WordRows(QuantMatrix& matrix)
      : data_(matrix.data.data()),
        row_bytes_(BytesOf(matrix.format.dtype, matrix.cols)),
        stride_(BytesOf(matrix.format.dtype, matrix.stride)) {}

  // Bytes 4 i … of row n, as many as the row has.
  void Store(size_t n, size_t i, uint32_t word) {
    std::byte* at = data_ + n * stride_ + 4 * i;
    if (4 * i + 4 <= row_bytes_) {
      std::memcpy(at, &word, 4);
    } else {
      std::memcpy(at, &word, row_bytes_ - 4 * i);
    }
  }
  void Store(size_t n, size_t i, const uint32_t* words, size_t count) {
    std::memcpy(data_ + n * stride_ + 4 * i, words, std::min(4 * count, row_bytes_ - 4 * i));
  }
  // The whole row n, each word of it changed by `flip`.
  void StoreRow(size_t n, const int32_t* words, uint32_t flip) {
    std::byte* at = data_ + n * stride_;
    const size_t whole = row_bytes_ / 4;
    for (size_t i = 0; i < whole; ++i) {
      const uint32_t word = ReadWord(words, i) ^ flip;
      std::memcpy(at + 4 * i, &word, 4);
    }
    if (row_bytes_ % 4 != 0) Store(n, whole, ReadWord(words, whole) ^ flip);
  }

 private:
  std::byte* data_;
  size_t row_bytes_, stride_;
};

// Nibble i of result p is nibble p of word i: swaps of ever larger squares.
void TransposeNibbles(uint32_t (&w)[8]) {
  constexpr uint32_t kMasks[] = {0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
  for (uint32_t level = 0; level < 3; ++level) {
    const uint32_t step = 1u << level;
    const uint32_t shift = 4 * step;
    for (uint32_t i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t low = w[i], high = w[i + step];
      w[i] = (low & kMasks[level]) | ((high & kMasks[level]) << shift);
      w[i + step] = ((low >> shift) & kMasks[level]) | (high & ~kMasks[level]);
    }
  }
}

// i32 [N, K/8]; `flip` is 8 for offset binary.
QuantMatrix ImportRowWords(const PackedShape& shape, std::span<const int32_t> packed,
                           const RawScales& scales, NibbleOrder order, uint8_t flip) {
  CheckMultiple(shape.name, "K", shape.k, 8);
  CheckCount(shape.name, "weight", packed.size(), shape.n * shape.k / 8);
  QuantMatrix matrix = WithScales(DType::kI4, shape, scales);
  const size_t words = shape.k / 8;
  WordRows rows(matrix);
  for (size_t n = 0; n < shape.n; ++n) {
    if (order == NibbleOrder::kLinear) {
      rows.StoreRow(n, packed.data() + n * words, flip * 0x11111111u);
      continue;
    }
    for (size_t i = 0; i < words; ++i) {
      const uint32_t word = ReadWord(packed.data(), n * words + i) ^ (flip * 0x11111111u);
      uint32_t linear = 0;
      for (size_t e = 0; e < 8; ++e)
        linear |= ((word >> ShiftOf(order, e)) & 15u) << ShiftOf(NibbleOrder::kLinear, e);
      rows.Store(n, i, linear);
    }
  }
  return matrix;
}

std::vector<int32_t> ExportRowWords(std::string_view packing, const QuantMatrix& matrix,
                                    NibbleOrder order, uint8_t flip) {
  if (matrix.format.dtype != DType::kI4) NotExportable(packing, matrix);
  CheckMultiple(packing, "K", matrix.cols, 8);
  std::vector<uint8_t> codes;
  codes.reserve(matrix.rows * matrix.cols);
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k)
      codes.push_back(static_cast<uint8_t>(BitsAt(matrix, n, k) ^ flip));
  }
  return PackWords(codes, order);
}

// --- GPTQ words: 32 / bits codes in each

uint32_t WordElement(int32_t word, size_t i, size_t bits) {
  return (static_cast<uint32_t>(word) >> (i * bits)) & ((1u << bits) - 1);
}

void SetWordElement(int32_t& word, size_t i, size_t bits, uint32_t code) {
  word = static_cast<int32_t>(static_cast<uint32_t>(word) | (code << (i * bits)));
}

// Column groups, where they are not in order or `keeps_order`.
void SetColumnGroups(const PackedShape& shape, std::string_view part,
                     std::span<const int32_t> g_idx, bool keeps_order, QuantMatrix& matrix) {
  if (g_idx.empty()) return;
  CheckCount(shape.name, part, g_idx.size(), shape.k);
  bool in_order = true;
  for (size_t k = 0; k < shape.k; ++k) {
    if (g_idx[k] < 0 || static_cast<size_t>(g_idx[k]) >= shape.groups()) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{} {}: input {} is in group {}, there are {}", shape.name, part, k,
                              g_idx[k], shape.groups()));
    }
    in_order =
        in_order && static_cast<size_t>(g_idx[k]) == (shape.group == 0 ? 0 : k / shape.group);
  }
  if (in_order && !keeps_order) return;
  matrix.format.has_column_groups = true;
  matrix.column_group.assign(g_idx.begin(), g_idx.end());
}

// Zero point of row n, group j out of words [N*bits/32, groups], linear along N: element n % per of
// word (n / per, j) or, `by_group`, of words [groups, N*bits/32].
uint32_t ZeroPointAt(std::span<const int32_t> words, size_t bits, size_t n, size_t j, size_t rows,
                     size_t groups, bool by_group) {
  const size_t per_word = 32 / bits;
  const size_t at = by_group ? (j * rows + n) / per_word : n / per_word * groups + j;
  return WordElement(words[at], n % per_word, bits);
}

void CheckBits(std::string_view name, size_t bits) {
  if (bits == 4 || bits == 8) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: weights of {} bits; 4 and 8 are supported", name, bits));
}

}  // namespace

std::vector<uint8_t> UnpackWords(std::span<const int32_t> words, NibbleOrder order) {
  std::vector<uint8_t> codes(words.size() * 8);
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] =
        static_cast<uint8_t>((static_cast<uint32_t>(words[i / 8]) >> ShiftOf(order, i % 8)) & 15u);
  }
  return codes;
}

std::vector<int32_t> PackWords(std::span<const uint8_t> codes, NibbleOrder order) {
  CheckMultiple("packed words", "number of codes", codes.size(), 8);
  std::vector<int32_t> words(codes.size() / 8);
  for (size_t i = 0; i < codes.size(); ++i) {
    const uint32_t nibble = (codes[i] & 15u) << ShiftOf(order, i % 8);
    words[i / 8] = static_cast<int32_t>(static_cast<uint32_t>(words[i / 8]) | nibble);
  }
  return words;
}

QuantMatrix ImportAwq(const PackedShape& shape, const AwqTensors& tensors) {
  CheckMultiple(shape.name, "N", shape.n, 8);
  CheckCount(shape.name, "qweight", tensors.qweight.size(), shape.k * shape.n / 8);
  CheckCount(shape.name, "qzeros", tensors.qzeros.size(), shape.groups() * shape.n / 8);
  QuantMatrix matrix = WithTransposedScales(DType::kU4, shape, tensors.scales);
  // Squares of 8 inputs by 8 outputs. Those of 64 bytes of several rows meet in a tile: lines of
  // the matrix, which lie a power of two apart, would drive each other out of the cache.
  constexpr size_t kSide = 16;
  const size_t words = shape.n / 8, depth = CeilDiv(shape.k, 8);
  WordRows rows(matrix);
  uint32_t tile[8 * kSide][kSide] = {};
  const auto transpose = [&](size_t c, size_t d, uint32_t(*out)[kSide]) {
    uint32_t square[8] = {};
    for (size_t i = 0; i < 8 && 8 * d + i < shape.k; ++i)
      square[i] = ReadWord(tensors.qweight.data(), (8 * d + i) * words + c);
    TransposeNibbles(square);
    for (size_t e = 0; e < 8; ++e) out[e][d % kSide] = square[kSplitNibbles[e]];
  };
  for (size_t d0 = 0; d0 < depth; d0 += kSide) {
    const size_t count = std::min(kSide, depth - d0);
    for (size_t c0 = 0; c0 < words; c0 += kSide) {
      const size_t width = std::min(kSide, words - c0);
      for (size_t d = d0; d < d0 + count; ++d) {
        for (size_t c = 0; c < width; ++c) transpose(c0 + c, d, tile + 8 * c);
      }
      for (size_t n = 0; n < 8 * width; ++n) rows.Store(8 * c0 + n, d0, tile[n], count);
    }
  }
  const std::vector<uint8_t> zeros = UnpackWords(tensors.qzeros, NibbleOrder::kSplit);
  for (size_t n = 0; n < shape.n; ++n) {
    for (size_t j = 0; j < matrix.scale_stride; ++j)
      matrix.zero[n * matrix.scale_stride + j] = std::byte{zeros[j * shape.n + n]};
  }
  return matrix;
}

OwnedAwq ExportAwq(const QuantMatrix& matrix) {
  if (matrix.format.dtype != DType::kU4 || !matrix.format.has_zero ||
      matrix.format.scale_dtype != DType::kF16 || matrix.format.scale_rows != 1)
    NotExportable("awq", matrix);
  CheckMultiple("awq", "N", matrix.rows, 8);
  std::vector<uint8_t> codes(matrix.rows * matrix.cols);
  std::vector<uint8_t> zeros(matrix.rows * matrix.scale_stride);
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k) codes[k * matrix.rows + n] = BitsAt(matrix, n, k);
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      zeros[j * matrix.rows + n] =
          std::to_integer<uint8_t>(matrix.zero[n * matrix.scale_stride + j]);
    }
  }
  return {PackWords(codes, NibbleOrder::kSplit), PackWords(zeros, NibbleOrder::kSplit),
          TransposedScales(matrix)};
}

QuantMatrix ImportGptq(const PackedShape& shape, const GptqTensors& tensors) {
  const size_t bits = tensors.bits;
  CheckBits(shape.name, bits);
  const size_t per_word = 32 / bits;
  CheckMultiple(shape.name, "K", shape.k, per_word);
  CheckMultiple(shape.name, "N", shape.n, per_word);
  CheckCount(shape.name, "qweight", tensors.qweight.size(), shape.k / per_word * shape.n);
  CheckCount(shape.name, "qzeros", tensors.qzeros.size(), shape.groups() * shape.n / per_word);
  QuantMatrix matrix =
      WithTransposedScales(bits == 4 ? DType::kU4 : DType::kU8, shape, tensors.scales);
  SetColumnGroups(shape, "g_idx", tensors.g_idx, tensors.keeps_order, matrix);
  // A word holds inputs side by side, as a row does: words change places, and nothing in them.
  // Tiles read and write whole lines.
  constexpr size_t kSide = 16;
  const size_t depth = shape.k / per_word;
  WordRows rows(matrix);
  uint32_t tile[kSide][kSide] = {};
  for (size_t d0 = 0; d0 < depth; d0 += kSide) {
    const size_t count = std::min(kSide, depth - d0);
    for (size_t n0 = 0; n0 < shape.n; n0 += kSide) {
      const size_t width = std::min(kSide, shape.n - n0);
      for (size_t d = 0; d < count; ++d) {
        const int32_t* words = tensors.qweight.data() + (d0 + d) * shape.n + n0;
        for (size_t n = 0; n < width; ++n) tile[n][d] = ReadWord(words, n);
      }
      for (size_t n = 0; n < width; ++n) rows.Store(n0 + n, d0, tile[n], count);
    }
  }
  const uint32_t add = tensors.format == GptqFormat::kV1 ? 1 : 0;
  for (size_t n = 0; n < shape.n; ++n) {
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      const uint32_t zero =
          ZeroPointAt(tensors.qzeros, bits, n, j, shape.n, shape.groups(), true) + add;
      if (zero > 255) {
        throw Error(ErrorCode::kCorruptData,
                    fmt::format("{} qzeros: the zero point of output {}, group {} is {}, above 255",
                                shape.name, n, j, zero));
      }
      matrix.zero[n * matrix.scale_stride + j] = static_cast<std::byte>(zero);
    }
  }
  return matrix;
}

OwnedGptq ExportGptq(const QuantMatrix& matrix, GptqFormat format) {
  const size_t bits = DTypeBits(matrix.format.dtype);
  const bool is_unsigned = matrix.format.dtype == DType::kU4 || matrix.format.dtype == DType::kU8;
  if (!is_unsigned || !matrix.format.has_zero || matrix.format.scale_dtype != DType::kF16 ||
      matrix.format.scale_rows != 1)
    NotExportable("gptq", matrix);
  const size_t per_word = 32 / bits;
  CheckMultiple("gptq", "K", matrix.cols, per_word);
  CheckMultiple("gptq", "N", matrix.rows, per_word);
  OwnedGptq out;
  out.qweight.resize(matrix.cols / per_word * matrix.rows);
  out.qzeros.resize(matrix.scale_stride * matrix.rows / per_word);
  out.scales = TransposedScales(matrix);
  const int subtract = format == GptqFormat::kV1 ? 1 : 0;
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k) {
      SetWordElement(out.qweight[k / per_word * matrix.rows + n], k % per_word, bits,
                     BitsAt(matrix, n, k));
    }
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      const int zero = std::to_integer<int>(matrix.zero[n * matrix.scale_stride + j]) - subtract;
      if (zero < 0 || zero >= 1 << bits) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("gptq: the zero point of output {}, group {} would be stored as {}",
                                n, j, zero));
      }
      SetWordElement(out.qzeros[(j * matrix.rows + n) / per_word], n % per_word, bits,
                     static_cast<uint32_t>(zero));
    }
  }
  return out;
}

QuantMatrix ImportWna16(const PackedShape& shape, std::span<const int32_t> packed,
                        const RawScales& scales) {
  return ImportRowWords(shape, packed, scales, NibbleOrder::kLinear, 8);
}
std::vector<int32_t> ExportWna16(const QuantMatrix& matrix) {
  return ExportRowWords("wna16", matrix, NibbleOrder::kLinear, 8);
}

QuantMatrix ImportPackQuantized(const PackedShape& shape, const PackQuantizedTensors& tensors) {
  const size_t bits = tensors.bits;
  CheckBits(shape.name, bits);
  const size_t per_word = 32 / bits, words = CeilDiv(shape.k, per_word);
  CheckCount(shape.name, "weight_packed", tensors.packed.size(), shape.n * words);
  const bool symmetric = tensors.zero_points.empty();
  const DType dtype =
      bits == 4 ? (symmetric ? DType::kI4 : DType::kU4) : (symmetric ? DType::kI8 : DType::kU8);
  QuantMatrix matrix = WithScales(dtype, shape, tensors.scales);
  SetColumnGroups(shape, "weight_g_idx", tensors.g_idx, tensors.keeps_order, matrix);
  const uint32_t flip = symmetric ? (bits == 4 ? 0x88888888u : 0x80808080u) : 0;
  WordRows rows(matrix);
  for (size_t n = 0; n < shape.n; ++n) rows.StoreRow(n, tensors.packed.data() + n * words, flip);
  if (symmetric) return matrix;
  CheckCount(shape.name, "weight_zero_point", tensors.zero_points.size(),
             CeilDiv(shape.n, per_word) * shape.groups());
  matrix.format.has_zero = true;
  matrix.zero.resize(shape.n * matrix.scale_stride);
  for (size_t n = 0; n < shape.n; ++n) {
    for (size_t j = 0; j < matrix.scale_stride; ++j) {
      matrix.zero[n * matrix.scale_stride + j] = static_cast<std::byte>(
          ZeroPointAt(tensors.zero_points, bits, n, j, shape.n, shape.groups(), false));
    }
  }
  return matrix;
}

QuantMatrix ImportQuarkInt4(const PackedShape& shape, std::span<const int32_t> packed,
                            const RawScales& scales) {
  return ImportRowWords(shape, packed, scales, NibbleOrder::kSplit, 0);
}
std::vector<int32_t> ExportQuarkInt4(const QuantMatrix& matrix) {
  return ExportRowWords("quark int4", matrix, NibbleOrder::kSplit, 0);
}

QuantMatrix ImportPairedRows(const PackedShape& shape, size_t stored_rows,
                             std::span<const int8_t> packed, const RawScales& scales) {
  CheckMultiple(shape.name, "N", shape.n, 2);
  if (stored_rows != shape.n / 2) {
    throw Error(
        ErrorCode::kCorruptData,
        fmt::format(
            "{} weight: {} rows, {} outputs packed in pairs have {}{}", shape.name, stored_rows,
            shape.n, shape.n / 2,
            stored_rows == shape.n ? "; this is the old packing with one code in a byte" : ""));
  }
  CheckCount(shape.name, "weight", packed.size(), stored_rows * shape.k);
  QuantMatrix matrix = WithScales(DType::kI4, shape, scales);
  const size_t row_bytes = matrix.stride / 2;
  for (size_t j = 0; j < stored_rows; ++j) {
    const auto* from = reinterpret_cast<const uint8_t*>(packed.data()) + j * shape.k;
    auto* low = reinterpret_cast<uint8_t*>(matrix.data.data()) + 2 * j * row_bytes;
    uint8_t* high = low + row_bytes;
    for (size_t k = 0; k < shape.k; k += 2) {
      const uint8_t even = from[k];
      const uint8_t odd = k + 1 < shape.k ? from[k + 1] : 0;
      low[k / 2] = static_cast<uint8_t>((even & 15) | (odd << 4));
      high[k / 2] = static_cast<uint8_t>((even >> 4) | (odd & 0xf0));
    }
  }
  return matrix;
}

std::vector<int8_t> ExportPairedRows(const QuantMatrix& matrix) {
  if (matrix.format.dtype != DType::kI4) NotExportable("row pairs", matrix);
  CheckMultiple("row pairs", "N", matrix.rows, 2);
  std::vector<int8_t> packed;
  packed.reserve(matrix.rows / 2 * matrix.cols);
  for (size_t n = 0; n < matrix.rows; n += 2) {
    for (size_t k = 0; k < matrix.cols; ++k) {
      packed.push_back(static_cast<int8_t>(BitsAt(matrix, n, k) | (BitsAt(matrix, n + 1, k) << 4)));
    }
  }
  return packed;
}

QuantMatrix ImportInt4Bytes(const PackedShape& shape, size_t stored_rows,
                            std::span<const int8_t> codes, const RawScales& scales) {
  if (stored_rows != shape.n) {
    throw Error(
        ErrorCode::kCorruptData,
        fmt::format(
            "{} weight: {} rows for {} outputs{}", shape.name, stored_rows, shape.n,
            stored_rows * 2 == shape.n ? "; this is the new packing with two rows in a byte" : ""));
  }
  CheckCount(shape.name, "weight", codes.size(), shape.n * shape.k);
  QuantMatrix matrix = WithScales(DType::kI4, shape, scales);
  const auto outside = std::ranges::find_if(codes, [](int8_t q) { return q < -8 || q > 7; });
  if (outside != codes.end()) {
    const auto at = static_cast<size_t>(outside - codes.begin());
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{} weight: element ({}, {}) is {}, outside [-8, 7]", shape.name,
                            at / shape.k, at % shape.k, int{*outside}));
  }
  for (size_t n = 0; n < shape.n; ++n) {
    const auto* from = reinterpret_cast<const uint8_t*>(codes.data()) + n * shape.k;
    auto* to = reinterpret_cast<uint8_t*>(matrix.data.data()) + n * matrix.stride / 2;
    for (size_t k = 0; k < shape.k; k += 2) {
      const uint8_t odd = k + 1 < shape.k ? from[k + 1] : 0;
      to[k / 2] = static_cast<uint8_t>((from[k] & 15) | (odd << 4));
    }
  }
  return matrix;
}

std::vector<int8_t> ExportInt4Bytes(const QuantMatrix& matrix) {
  if (matrix.format.dtype != DType::kI4) NotExportable("int4 bytes", matrix);
  std::vector<int8_t> codes;
  codes.reserve(matrix.rows * matrix.cols);
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k)
      codes.push_back(static_cast<int8_t>((BitsAt(matrix, n, k) ^ 8) - 8));
  }
  return codes;
}

QuantMatrix ImportNpuInt4(const PackedShape& shape, std::span<const int32_t> packed,
                          const RawScales& scales) {
  CheckMultiple(shape.name, "N", shape.n, 8);
  CheckCount(shape.name, "weight", packed.size(), shape.k * shape.n / 8);
  QuantMatrix matrix = WithScales(DType::kI4, shape, scales);
  const std::vector<uint8_t> codes = UnpackWords(packed, NibbleOrder::kLinear);
  for (size_t n = 0; n < shape.n; ++n) {
    for (size_t k = 0; k < shape.k; ++k) matrix.SetCode(n, k, codes[k * shape.n + n]);
  }
  return matrix;
}

std::vector<int32_t> ExportNpuInt4(const QuantMatrix& matrix) {
  if (matrix.format.dtype != DType::kI4) NotExportable("npu int4", matrix);
  CheckMultiple("npu int4", "N", matrix.rows, 8);
  std::vector<uint8_t> codes;
  codes.reserve(matrix.rows * matrix.cols);
  for (size_t k = 0; k < matrix.cols; ++k) {
    for (size_t n = 0; n < matrix.rows; ++n) codes.push_back(BitsAt(matrix, n, k));
  }
  return PackWords(codes, NibbleOrder::kLinear);
}

QuantMatrix ImportNvFp4(const PackedShape& shape, std::span<const uint8_t> packed,
                        std::span<const uint8_t> scales, float global_scale) {
  constexpr size_t kGroup = 16;
  CheckMultiple(shape.name, "K", shape.k, kGroup);
  CheckCount(shape.name, "weight", packed.size(), shape.n * shape.k / 2);
  CheckCount(shape.name, "weight_scale", scales.size(), shape.n * shape.k / kGroup);
  QuantMatrix matrix =
      QuantMatrix::Make({DType::kF4E2M1, DType::kF32, 1, kGroup, false}, shape.n, shape.k);
  std::ranges::copy(std::as_bytes(packed), matrix.data.begin());
  for (size_t i = 0; i < scales.size(); ++i) {
    matrix.SetScale(i / matrix.scale_stride, i % matrix.scale_stride,
                    DecodeE4M3(scales[i]) * global_scale);
  }
  return matrix;
}

std::vector<int64_t> WidenScaleBits(std::span<const float> scales) {
  std::vector<int64_t> bits;
  bits.reserve(scales.size());
  for (float scale : scales) bits.push_back(int64_t{std::bit_cast<uint32_t>(scale)});
  return bits;
}

std::vector<float> NarrowScaleBits(std::string_view name, std::span<const int64_t> bits) {
  std::vector<float> scales;
  scales.reserve(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    const auto low = static_cast<uint32_t>(bits[i]);
    if (bits[i] != int64_t{low} && bits[i] != int64_t{static_cast<int32_t>(low)}) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}: element {} is {}, no f32 in an i64", name, i, bits[i]));
    }
    scales.push_back(std::bit_cast<float>(low));
  }
  return scales;
}

std::vector<F16> CombineGroupScales(std::span<const float> channel, std::span<const float> second) {
  SY_CHECK(channel.empty() ? second.empty() : second.size() % channel.size() == 0);
  std::vector<F16> combined;
  combined.reserve(second.size());
  for (size_t i = 0; i < second.size(); ++i)
    combined.push_back(ToF16(channel[i * channel.size() / second.size()] * second[i]));
  return combined;
}

std::vector<uint8_t> SplitScalePairs(std::string_view name, std::span<const uint8_t> scales,
                                     size_t n) {
  const size_t blocks = n == 0 ? 0 : scales.size() / n;
  CheckCount(name, "scale", scales.size(), n * blocks);
  CheckMultiple(name, "number of blocks of 32", blocks, 2);
  std::vector<uint8_t> pairs(scales.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    const size_t block = i % blocks;
    pairs[(block / 2 * n + i / blocks) * 2 + block % 2] = scales[i];
  }
  return pairs;
}

std::vector<uint8_t> JoinScalePairs(std::string_view name, std::span<const uint8_t> pairs,
                                    size_t n) {
  const size_t blocks = n == 0 ? 0 : pairs.size() / n;
  CheckCount(name, "scale", pairs.size(), n * blocks);
  CheckMultiple(name, "number of blocks of 32", blocks, 2);
  std::vector<uint8_t> scales(pairs.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    const size_t block = i % blocks;
    scales[i] = pairs[(block / 2 * n + i / blocks) * 2 + block % 2];
  }
  return scales;
}

double ScaleBiasDeviation(std::string_view name, const ExpertMatrices& w, size_t expert,
                          std::span<const float> scale_bias) {
  const size_t parts = w.rows == 0 ? 0 : scale_bias.size() / w.rows;
  CheckCount(name, "scale_bias", scale_bias.size(), w.rows * std::max<size_t>(1, parts));
  double worst = 0;
  for (size_t n = 0; n < w.rows; ++n) {
    double found = 0;
    for (float part : scale_bias.subspan(n * parts, parts)) found += double{part};
    double sum = 0;
    double size = 0;
    for (size_t k = 0; k < w.cols; ++k) {
      const double value = MatrixElement(w, expert, n, k);
      sum += 8 * value;
      size += 8 * std::fabs(value);
    }
    const double error = std::fabs(found - sum);
    const double relative = size > 0 ? error / size : error;
    if (std::isnan(relative)) return relative;
    worst = std::max(worst, relative);
  }
  return worst;
}

}  // namespace switchyard::quant
