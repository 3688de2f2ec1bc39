// Weights in panels: the layout in which every product reads them fast, on every instruction set.
//
// A matrix [N, K] is cut into panels of 32 rows, a panel into slices of 256 columns, and a slice
// into units of 32 columns. What belongs together lies together in the order in which it is used,
// so that a product reads memory as one stream:
//
//   matrix   [ panel 0 | panel 1 | .. ]             rows 0..31, 32..63, ..; missing rows are 0
//   panel    [ header | slice 0 | slice 1 | .. ]    columns from left to right, missing ones are 0
//   slice    [ fields | unit 0 | unit 1 | .. ]      one of all columns where there are no fields
//   field    [ group 0 | group 1 | .. ]             scales (or others) of 32 rows for each group
//   unit     [ word 0 | word 1 | .. ]               as many words as a code has bits
//   word     [ row 0 | row 1 | .. | row 31 ]        4 bytes of each row: 128 bytes
//
// A vector register holds the same word of 16 rows (8, 4), so that one activation, broadcast, meets
// 16 outputs at once and no sum is ever taken across a register. Header, fields and units start at
// multiples of 64 bytes.
//
// The stream decides how fast one row is: CPUs bring by themselves what follows in memory, and do
// so faster than when they are told. On one Zen 4 core that reads 27 GB/s, fields of a whole panel
// in front of its units gave 19 GB/s with every way of fetching ahead, fields beside each unit 14,
// and slices give 25 to 27.
//
// What the words of a unit hold, for the codes c[0..31] of one row (byte b of a word is bits 8b..):
//
//   8 bits   byte b of word j            = c[4j + b]
//   4 bits   byte b of word j, j < 4     = c[4j + b] | c[16 + 4j + b] << 4
//   5 bits   the low 4 as above; then one word: bit i of byte b = bit 4 of c[4i + b]
//   6 bits   the low 4 as above; then two: bits 2i.. of byte b of word h = bits 4, 5 of
//            c[16h + 4i + b]
//   2 bits   two words: bits 2i.. of byte b of word h = c[16h + 4i + b]
//   3 bits   the low 2 as above; then one word: bit i of byte b = bit 2 of c[4i + b]
//   16 bits  halves: word 2j = {c[4j], c[4j + 2]}, word 2j + 1 = {c[4j + 1], c[4j + 3]}: the order
//            in which pairs come out of 8-bit words without a shuffle
//   32 bits  word k = c[k]
//
// Codes that are indices into a codebook whose entries are several columns (IQ1 to IQ3 of ggml), or
// digits of base 3 (TQ1_0), lie by super-blocks of 8 units: grid.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::kernels {

inline constexpr size_t kPanelRows = 32;
inline constexpr size_t kUnitCols = 32;
inline constexpr size_t kSuperCols = 256;
inline constexpr size_t kWordBytes = 4 * kPanelRows;  // of all rows

enum class PanelCodes : uint8_t {
  kBits2,
  kBits3,
  kBits4,
  kBits5,
  kBits6,
  kBytes,  // unsigned, 8 bits
  kE4M3,   // 8 bits
  kBF16,
  kF16,
  kF32,
  kTernary,  // TQ1_0
  kIq1,      // IQ1_S, IQ1_M
  kIq2Xxs,
  kIq2Xs,
  kIq2S,
  kIq3Xxs,
  kIq3S
};

// What a code of at most 8 bits stands for.
enum class PanelValues : uint8_t {
  kLinear,  // code - bias
  kIq4Nl,   // the table of ggml's IQ4_NL
  kE2M1     // twice the value of e2m1
};

// How the scales of groups of columns lie. A field is [groups][32], or [supers][32] where a number
// belongs to a super-block of 256 columns.
enum class PanelScales : uint8_t {
  kNone,     // 1
  kRow,      // header: f32 [32], of whole rows
  kGrid,     // header: f32 [groups], the same for all rows of the panel
  kF16,      // field f16
  kBF16,     // field bf16
  kF32,      // field f32
  kE8M0,     // field u8
  kE4M3,     // field u8, times an f32 of the whole matrix, which is the header (f32 [1])
  kSuperU8,  // field u8 scales, and a field f16 d of super-blocks: scale * d
  kSuperI8,  // field i8 scales, and d
  kSuperU4,  // field u8: scale in the low nibble, min in the high one; and d (Q2_K)
  kSuperOdd  // field u8 [groups / 2][32]: the low nibble belongs to the even group, the high one to
             // the odd; (2 * nibble + 1) * d, times TableFactor (IQ1 to IQ3)
};

// What is added to every product of a group, times the sum of the activations.
enum class PanelOffsets : uint8_t {
  kNone,
  kF16,      // field f16: added (Q4_1, Q5_1)
  kZero,     // field u8: -zero * scale
  kSuperMin  // field u8 mins (in the bytes of the scales with kSuperU4), and a field f16 dmin of
             // super-blocks: -min * dmin
};

struct PanelFormat {
  PanelCodes codes = PanelCodes::kBF16;
  PanelValues values = PanelValues::kLinear;
  uint8_t bias = 0;  // kLinear; of codebooks, what makes their values unsigned bytes
  PanelScales scales = PanelScales::kNone;
  PanelOffsets offsets = PanelOffsets::kNone;
  size_t group = 0;          // columns of a scale: 16, or a multiple of 32; 0 = whole rows
  size_t block = kUnitCols;  // columns are padded to a multiple of it

  friend bool operator==(const PanelFormat&, const PanelFormat&) = default;
};

// Words of a unit: bits of a code. 0 for what grid.h describes.
constexpr size_t UnitWords(PanelCodes codes) {
  switch (codes) {
    case PanelCodes::kBits2: return 2;
    case PanelCodes::kBits3: return 3;
    case PanelCodes::kBits4: return 4;
    case PanelCodes::kBits5: return 5;
    case PanelCodes::kBits6: return 6;
    case PanelCodes::kBytes:
    case PanelCodes::kE4M3: return 8;
    case PanelCodes::kBF16:
    case PanelCodes::kF16: return 16;
    case PanelCodes::kF32: return 32;
    case PanelCodes::kTernary:
    case PanelCodes::kIq1:
    case PanelCodes::kIq2Xxs:
    case PanelCodes::kIq2Xs:
    case PanelCodes::kIq2S:
    case PanelCodes::kIq3Xxs:
    case PanelCodes::kIq3S: break;
  }
  return 0;
}

// The panels that hold matrices of this format with rows of `cols` columns, or nothing if there are
// none: they are multiplied as they lie. Codes and scales stay what they are, bit by bit.
std::optional<PanelFormat> FindPanelFormat(const MatrixFormat& format, size_t cols);

// Numbers of 32 rows each.
struct PanelField {
  size_t at = 0;     // in bytes from the start of a slice
  size_t count = 0;  // numbers of a row in a whole slice
};

// Where things are in a panel.
struct PanelLayout {
  size_t cols = 0;    // padded to whole blocks
  size_t groups = 0;  // 0 if scales are of whole rows, or there are none
  size_t header_bytes = 0;
  size_t slice_cols = 0;   // whole groups and blocks; the last slice may have fewer
  size_t slice_bytes = 0;  // of a whole one; the last one has fields of the same size
  PanelField scales;
  PanelField offsets;     // PanelOffsets but for dmin
  PanelField d, dmin;     // of super-blocks
  size_t units_at = 0;    // from the start of a slice
  size_t unit_bytes = 0;  // an eighth of a super-block for what grid.h describes
  size_t panel_bytes = 0;

  size_t num_units() const { return cols / kUnitCols; }
  size_t slice_units() const { return slice_cols / kUnitCols; }
  size_t num_slices() const { return (cols + slice_cols - 1) / slice_cols; }
  size_t slice_groups() const { return groups == 0 ? 0 : slice_cols * groups / cols; }
  // Bytes from the start of the panel.
  size_t SliceAt(size_t slice) const { return header_bytes + slice * slice_bytes; }
  size_t UnitAt(size_t unit) const {
    return SliceAt(unit / slice_units()) + units_at + unit % slice_units() * unit_bytes;
  }
  // Of number i of a field, counted through all slices; `bytes` each.
  size_t NumberAt(const PanelField& field, size_t i, size_t bytes) const {
    return SliceAt(i / field.count) + field.at + i % field.count * kPanelRows * bytes;
  }
};
PanelLayout LayoutOf(const PanelFormat& format, size_t cols);

inline size_t NumPanels(size_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }
// Bytes of one number of a field; 0 if there is no such field.
constexpr size_t ScaleBytes(PanelScales scales) {
  switch (scales) {
    case PanelScales::kNone:
    case PanelScales::kRow:
    case PanelScales::kGrid: return 0;
    case PanelScales::kF16:
    case PanelScales::kBF16: return 2;
    case PanelScales::kF32: return 4;
    case PanelScales::kE8M0:
    case PanelScales::kE4M3:
    case PanelScales::kSuperU8:
    case PanelScales::kSuperI8:
    case PanelScales::kSuperU4:
    case PanelScales::kSuperOdd: return 1;
  }
  return 0;
}
constexpr bool IsSuper(PanelScales scales) {
  return scales == PanelScales::kSuperU8 || scales == PanelScales::kSuperI8 ||
         scales == PanelScales::kSuperU4 || scales == PanelScales::kSuperOdd;
}
constexpr size_t OffsetBytes(const PanelFormat& format) {
  switch (format.offsets) {
    case PanelOffsets::kNone: return 0;
    case PanelOffsets::kF16: return 2;
    case PanelOffsets::kZero: return 1;
    case PanelOffsets::kSuperMin: return format.scales == PanelScales::kSuperU4 ? 0 : 1;
  }
  return 0;
}

// Bytes of a matrix in panels.
size_t PanelMatrixBytes(const PanelFormat& format, size_t rows, size_t cols);

}  // namespace switchyard::kernels
