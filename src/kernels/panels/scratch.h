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

struct PanelScratch {
  size_t chunk_blocks = 0;  // blocks that are unpacked at a time
  size_t scales_at = 0, offsets_at = 0, sums_at = 0;
  size_t bytes = 0;
};

inline PanelScratch ScratchOf(const PanelFormat& format, const PanelLayout& layout, PanelPath path,
                              size_t num_rows) {
  const size_t col_bytes = path == PanelPath::kInt8 ? 1 : path == PanelPath::kBF16 ? 2 : 4;
  const size_t block_lines = format.block * col_bytes * kPanelRows;
  const size_t lines = num_rows <= kFewRows ? kFewRowsLines : kManyRowsLines;
  PanelScratch scratch;
  scratch.chunk_blocks =
      std::clamp<size_t>(lines / block_lines, 1, std::max<size_t>(1, layout.blocks));
  const size_t cols = scratch.chunk_blocks * format.block;
  const size_t groups = cols / (format.group == 0 ? kUnitCols : format.group);
  const size_t values = groups * kPanelRows * sizeof(float);
  scratch.scales_at = scratch.chunk_blocks * block_lines;
  scratch.offsets_at = scratch.scales_at + values;
  scratch.sums_at = scratch.offsets_at + (format.offsets == PanelOffsets::kNone ? 0 : values);
  scratch.bytes = scratch.sums_at + num_rows * kPanelRows * sizeof(float);
  return scratch;
}

}  // namespace switchyard::kernels
