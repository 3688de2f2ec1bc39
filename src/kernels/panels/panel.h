// Weights in panels: the layout in which every product reads them fast, on every instruction set.
//
// A matrix [N, K] is cut into panels of 32 rows, and a panel into blocks of columns. What belongs
// together lies together, so that a product reads memory as one stream:
//
//   matrix   [ panel 0 | panel 1 | .. ]                 rows 0..31, 32..63, ..; missing rows are 0
//   panel    [ header | block 0 | block 1 | .. ]        scales of whole rows; columns from left to
//                                                       right, missing columns are 0
//   block    [ unit 0 | unit 1 | .. | scale fields ]    a unit is 32 columns
//   unit     [ word 0 | word 1 | .. ]                   as many words as a code has bits
//   word     [ row 0 | row 1 | .. | row 31 ]            4 bytes of each row: 128 bytes
//
// A vector register holds the same word of 16 rows (8, 4), so that one activation, broadcast, meets
// 16 outputs at once and no sum is ever taken across a register. Fields start at multiples of 64
// bytes.
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
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::kernels {

inline constexpr size_t kPanelRows = 32;
inline constexpr size_t kUnitCols = 32;
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
  kF16
};

// What a code of at most 8 bits stands for.
enum class PanelValues : uint8_t {
  kLinear,  // code - bias
  kIq4Nl,   // the table of ggml's IQ4_NL
  kE2M1     // twice the value of e2m1
};

// How the scales of groups of columns lie. Fields of a block hold one value for each row of each
// group of the block: [groups][32], or [32] where it says "a block".
enum class PanelScales : uint8_t {
  kNone,     // 1
  kRow,      // header: f32 [32], of whole rows
  kGrid,     // header: f32 [groups], the same for all rows of the panel
  kF16,      // field f16
  kBF16,     // field bf16
  kF32,      // field f32
  kE8M0,     // field u8
  kE4M3,     // field u8, times an f32 of the whole matrix, which is the header (f32 [1])
  kSuperU8,  // field u8 scales, then field f16 d, a block: scale * d
  kSuperI8,  // field i8 scales, then f16 d
  kSuperU4   // field u8: scale in the low nibble, min in the high one; then f16 d (Q2_K)
};

// What is added to every product of a group, times the sum of the activations.
enum class PanelOffsets : uint8_t {
  kNone,
  kF16,      // field f16, after the scales: added (Q4_1, Q5_1)
  kZero,     // field u8, after the scales: -zero * scale
  kSuperMin  // field u8 mins after the scales (in the same bytes with kSuperU4), and a field f16
             // dmin, a block, after d: -min * dmin
};

struct PanelFormat {
  PanelCodes codes = PanelCodes::kBF16;
  PanelValues values = PanelValues::kLinear;
  uint8_t bias = 0;  // kLinear
  PanelScales scales = PanelScales::kNone;
  PanelOffsets offsets = PanelOffsets::kNone;
  size_t group = 0;  // columns of a scale: 16, or a multiple of 32; 0 = whole rows
  size_t block = kUnitCols;

  friend bool operator==(const PanelFormat&, const PanelFormat&) = default;
};

// Words of a unit: bits of a code.
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
  }
  return 0;
}

// The panels that hold matrices of this format with these sizes, or nothing if there are none: they
// are multiplied as they lie. Codes and scales stay what they are, bit by bit.
std::optional<PanelFormat> FindPanelFormat(const MatrixFormat& format, size_t rows, size_t cols);

// Where things are.
struct PanelLayout {
  size_t cols = 0;          // padded to whole blocks
  size_t blocks = 0;        // of a panel
  size_t block_groups = 0;  // groups of a block; 0 if scales are of whole rows, or there are none
  size_t header_bytes = 0;
  size_t code_bytes = 0;  // of the units of a block
  size_t scale_at = 0;    // fields of a block, from its start
  size_t offset_at = 0;   // of PanelOffsets but for dmin
  size_t d_at = 0;
  size_t dmin_at = 0;
  size_t block_bytes = 0;
  size_t panel_bytes = 0;
  size_t unit_bytes = 0;
};
PanelLayout LayoutOf(const PanelFormat& format, size_t cols);

inline size_t NumPanels(size_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }
// Bytes of a matrix in panels.
size_t PanelMatrixBytes(const PanelFormat& format, size_t rows, size_t cols);

}  // namespace switchyard::kernels
