// Products with weights in panels (kernels/panels/panel.h), whatever the formats of both sides.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/panels/panel.h"
#include "quant/linear.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::quant {

// A matrix as it lies in panels, and how it lies. Of format.in_panels alone.
struct PanelMatrix {
  PanelMatrix(const MatrixFormat& format, size_t cols);

  const std::byte* Panel(const std::byte* data, size_t index) const {
    return data + index * layout.panel_bytes;
  }

  kernels::PanelFormat format;
  kernels::PanelLayout layout;
};

// `format` with its matrices in panels, or as it is if there are none for it.
MatrixFormat InPanels(const MatrixFormat& format, size_t cols);
// Bytes of a matrix in panels.
size_t PanelBytes(const MatrixFormat& format, size_t rows, size_t cols);
// Writes panel `index` of an expert's matrix, which is not in panels, for the format that InPanels
// gives.
// Shapes: out: the bytes of one panel, at a multiple of 64.
void PackPanel(const ExpertMatrices& w, size_t expert, size_t index, std::byte* out);

// The records that plain f32 rows become under a scheme's quantiser `how`, or, if it is kNone,
// under act_dtype (kF32, kBF16, kI8).
kernels::PanelRowLayout RecordsFor(const ActQuant& how, const MatrixFormat& weights, size_t cols,
                                   DType act_dtype);

// Records of rows: plain ones (in act_dtype) or codes.
ActRows MakeRecords(ExecContext& context, const QuantRows& x, const MatrixFormat& weights,
                    DType act_dtype);
// Of rows of elements (kF32, kBF16, kI8) and their scales.
ActRows MakeRecords(ExecContext& context, const ActRows& x, const MatrixFormat& weights,
                    DType act_dtype);

// Floats of scratch that MultiplyPanels needs.
size_t PanelScratchFloats(const MatrixFormat& weights, size_t cols);

// As MultiplyExpert. Shapes: x: records of RecordsFor.
void MultiplyPanels(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0, size_t n,
                    std::span<float> scratch, float* out, size_t out_stride);

}  // namespace switchyard::quant
