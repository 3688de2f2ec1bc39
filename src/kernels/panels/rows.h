// Activations as they meet weights in panels: one record of bytes for each row.
//
//   record  [ words: 4 bytes of columns each | f32 scales | i32 starts | f32 sums ]
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/panels/panel.h"

namespace switchyard::kernels {

// The arithmetic of a product.
enum class PanelPath : uint8_t {
  kInt8,  // codes of weights times int8 codes of activations, exact sums of each segment in i32;
          // a word is 4 columns
  kBF16,  // pairs, where the CPU multiplies them (on x86, subnormal factors and sums are 0); a word
          // is 2 columns, in the order of 16-bit codes
  kF32    // a word is 1 column
};

// Words of 4 bytes that hold the activations of a unit of columns.
constexpr size_t WordsOfUnit(PanelPath path) {
  return path == PanelPath::kInt8 ? 8 : path == PanelPath::kBF16 ? 16 : 32;
}

// Of the CPU and --isa in force.
bool HasPanelBF16();
// Whether a path multiplies these codes. kInt8: not floats; kBF16: neither f16 nor f32, and
// HasPanelBF16.
bool TakesPath(const PanelFormat& format, PanelPath path);

// A record. Segments are columns whose products are summed before any scale meets them: a group of
// the weights, or of the activations if that is smaller; one whole row if neither has groups.
struct PanelRowLayout {
  PanelPath path = PanelPath::kF32;
  size_t cols = 0;         // of the row
  size_t padded_cols = 0;  // zeros behind them
  size_t segment = 0;      // columns
  size_t segments = 0;
  size_t groups = 0;          // of the weights, 1 for whole rows
  bool has_scales = false;    // of segments
  size_t scale_segments = 1;  // that share a scale and are summed before it meets them
  bool has_starts = false;    // kInt8: -bias * sum of the codes of a segment
  bool has_sums = false;  // the weights have offsets: sums of the values of a group, without the
                          // scale that all of it shares if there is one
  uint8_t bias = 0;       // of the starts
  size_t scales_at = 0, starts_at = 0, sums_at = 0;
  size_t bytes = 0;  // a multiple of 64

  size_t group() const { return padded_cols / groups; }
  friend bool operator==(const PanelRowLayout&, const PanelRowLayout&) = default;
};

// Columns of a scale of int8 activations that the engine quantises of itself (--fast-activations):
// few enough that a large value spoils only its neighbours, enough that scales cost little beside
// the products.
inline constexpr size_t kFastGroup = 128;
// kFastGroup, or 32 where the weights' groups do not go with it.
size_t FastGroupOf(const PanelFormat& format);

// Records of rows of `cols` columns for weights of this format. act_group: columns of a scale of
// the activations inside the row, a multiple of 32 that divides the weights' group or that this
// divides (any multiple of 32 if the weights have no groups); 0 = there are none (they are all 1,
// or one for the row, which the caller keeps). kInt8 takes kFastGroup or 0.
PanelRowLayout RowLayoutOf(const PanelFormat& format, size_t cols, PanelPath path,
                           size_t act_group);

// kF32 or kBF16 (rounded to nearest even) without scales.
// Shapes: x [layout.cols]; out: layout.bytes bytes, at a multiple of 64.
void PackFloatRow(const PanelRowLayout& layout, const float* x, std::byte* out) noexcept;

// kBF16 or kF32 with scales: x are codes, exact in bf16.
// Shapes: scales [ceil(cols / act_group)].
void PackScaledRow(const PanelRowLayout& layout, const float* codes, const float* scales,
                   size_t act_group, std::byte* out) noexcept;

// kInt8 from codes whose scale the caller keeps. Shapes: codes [layout.cols].
void PackInt8Row(const PanelRowLayout& layout, const int8_t* codes, std::byte* out) noexcept;

// kInt8 from values: of each FastGroupOf columns the scale amax / 127 and codes rounded to nearest
// even; all 0 where amax is so small that 127 / amax overflows. A group with a NaN or infinity gets
// a NaN scale and codes 0.
// Shapes: x [layout.cols].
void PackFastRow(const PanelRowLayout& layout, const float* x, std::byte* out) noexcept;

}  // namespace switchyard::kernels
