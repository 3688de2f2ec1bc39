// How a product uses its scratch.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/panels/panel.h"
#include "kernels/panels/rows.h"

namespace switchyard::kernels {

// Few rows: unpacked lines go through the first-level cache. Many: an unpacked strip of the panel
// stays in the second level while all rows pass.
inline constexpr size_t kFewRows = 8;
inline constexpr size_t kFewRowsLines = size_t{16} << 10;
inline constexpr size_t kManyRowsLines = size_t{256} << 10;

// Columns of a segment of weights without groups: those that are unpacked at a time are whole ones.
inline constexpr size_t kMaxOwnSegment = 128;
static_assert(kFewRowsLines / (WordsOfUnit(PanelPath::kF32) * kWordBytes) * kUnitCols %
                  kMaxOwnSegment ==
              0);

struct PanelScratch {
  size_t chunk_units = 0;  // units that are unpacked at a time
  size_t scales_at = 0, offsets_at = 0, sums_at = 0;
  size_t bytes = 0;
};

inline PanelScratch ScratchOf(const PanelFormat& format, const PanelLayout& layout, PanelPath path,
                              size_t num_rows) {
  const size_t unit_lines = WordsOfUnit(path) * kWordBytes;
  const size_t lines = num_rows <= kFewRows ? kFewRowsLines : kManyRowsLines;
  const size_t block_units = format.block / kUnitCols;
  PanelScratch scratch;
  scratch.chunk_units = std::max<size_t>(lines / unit_lines / block_units, 1) * block_units;
  // A group may be as small as a unit where the activations have groups and the weights
  // have none.
  const size_t groups = std::max(layout.groups, layout.cols / kUnitCols);
  const size_t values = groups * kPanelRows * sizeof(float);
  scratch.scales_at = std::min(scratch.chunk_units, layout.num_units()) * unit_lines;
  scratch.offsets_at = scratch.scales_at + values;
  scratch.sums_at = scratch.offsets_at + (format.offsets == PanelOffsets::kNone ? 0 : values);
  scratch.bytes = scratch.sums_at + num_rows * kPanelRows * sizeof(float);
  return scratch;
}

}  // namespace switchyard::kernels
