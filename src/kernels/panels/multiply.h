// Products of activations with weights in panels.
#pragma once

#include <cstddef>

#include "kernels/panels/panel.h"
#include "kernels/panels/rows.h"

namespace switchyard::kernels {

// out[m, j] = sum over k of a[m, k] * w[first + j, k] for some rows of one panel, all scales
// applied.
//
// Shapes: rows: num_rows records of rows_layout; row_scale [num_rows] or null = 1; panel:
//   layout.panel_bytes bytes; first + count <= 32; out row m at m * out_stride; scratch:
//   PanelScratchBytes bytes at a multiple of 64, one for each thread.
// Deterministic: out[m, j] depends on its row and its weights alone: products of a segment are
//   added in the order of their words in one accumulator; segments and groups follow in their
//   order.
struct PanelProduct {
  const PanelFormat* format = nullptr;
  const PanelLayout* layout = nullptr;
  const PanelRowLayout* rows_layout = nullptr;
  const std::byte* const* rows = nullptr;
  const float* row_scale = nullptr;
  size_t num_rows = 0;
  const std::byte* panel = nullptr;
  size_t first = 0;
  size_t count = kPanelRows;
  std::byte* scratch = nullptr;
  float* out = nullptr;
  size_t out_stride = 0;
};
void MultiplyPanel(const PanelProduct& product) noexcept;

// For products of up to `num_rows` rows.
size_t PanelScratchBytes(const PanelFormat& format, const PanelLayout& layout, PanelPath path,
                         size_t num_rows);

}  // namespace switchyard::kernels
