// Rows as they lie in a checkpoint, into panels and back.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/decode/decode.h"
#include "kernels/panels/panel.h"

namespace switchyard::kernels {

// Writes one panel.
// Shapes: rows: 1 to 32 rows of n codes, of the type and with the scales that `format` was found
//   for (whole blocks of ggml, if they are that), all of one n <= layout.cols; missing rows and
//   columns become codes of value 0 where the format has one, and scale 0. out: layout.panel_bytes
//   bytes at a multiple of 64, all of which are written.
void PackPanel(const PanelFormat& format, const PanelLayout& layout, std::span<const CodeRow> rows,
               std::byte* out) noexcept;

// The first n columns of row `row` of a panel, the bits that DecodeRow makes of the packed row.
// (The e8m0 scale 255 is NaN as it is everywhere but in ggml's MXFP4, where DecodeRow takes it for
// 2^128.) A plain loop, for tests and for what is not hot.
void DecodePanelRow(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                    size_t row, size_t n, float* out) noexcept;

// Element (row, col) in f64, (q - zero) * scale, exact (for blocks of ggml: their value in f32).
double PanelElement(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                    size_t row, size_t col);

}  // namespace switchyard::kernels
