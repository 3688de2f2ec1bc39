// The product of activation rows with an expert's matrix, whatever the formats of both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/decode/decode.h"
#include "quant/linear.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::quant {

// Rows of x as MultiplyExpert takes them for weights of this format. For weights in panels, records
// (quant/panel_matmul.h); else
//   plain rows with a quantising `how`: its codes, then as below;
//   codes (never quantised again, whatever `how` says): i8 with a scale per row where the weights
//     are kI8 or kI4 with one scale per row and no zero point; else f32, dequantised, the scale of
//     a per-token kind kept apart;
//   plain rows with kNone: in act_dtype where a kernel multiplies that with the dtype of dense
//     weights, else f32. (With panels: kBF16 rounds, kI8 makes codes of 32 columns under one scale,
//     where there is such a product.)
// Everything new lies in the arena; rows that need no change are pointed to.
//
// Shapes: x [T, K]; counted [T] or empty, as in QuantizeRows.
// Errors: those of QuantizeRows.
ActRows PrepareExpertRows(ExecContext& context, const QuantRows& x, const ActQuant& how,
                          const MatrixFormat& weights, DType act_dtype,
                          std::span<const uint8_t> counted = {});

// The type of what PrepareExpertRows makes of plain f32 rows of `cols` columns; of records, kF32.
DType ExpertRowDType(const ActQuant& how, const MatrixFormat& weights, size_t cols,
                     DType act_dtype);

// Floats of scratch that MultiplyExpert needs for n rows of these matrices; 0 for dense ones. One
// scratch per worker. No more than about 256 KiB or four rows, however large n is.
size_t ExpertScratchFloats(const ExpertMatrices& w, size_t n);

// out[m, j] = sum over k of x[m, k] * W[n0 + j, k], all scales applied, bias not.
//
// Shapes: x [T, w.cols] from PrepareExpertRows (or rows of f32); out [T, n], row m at out + m *
//   out_stride; scratch of ExpertScratchFloats(w, n), aligned to 64 bytes for speed.
// Quantised rows of W are decoded once per call, so give it all rows of an expert at once.
// Deterministic: the bits of out[m, j] depend on row m, on row n0 + j and on the instruction set
//   alone, not on n0, n, the other rows or the number of threads.
void MultiplyExpert(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0, size_t n,
                    std::span<float> scratch, float* out, size_t out_stride);

// Row n as the decoder takes it; of matrices that are not in panels.
kernels::CodeRow CodeRowOf(const ExpertMatrices& w, size_t expert, size_t n);

// Element (n, k) of an expert's matrix, (q - zero) * scale in f64, exact: the definition that
// oracles use.
double MatrixElement(const ExpertMatrices& w, size_t expert, size_t n, size_t k);

// The first out.size() elements of row n, as MatrixElement has them.
void MatrixRow(const ExpertMatrices& w, size_t expert, size_t n, std::span<double> out);

// Row n of an expert's matrix in f32, as MultiplyExpert decodes it.
// Shapes: out [w.cols].
void DecodeMatrixRow(const ExpertMatrices& w, size_t expert, size_t n, float* out);

}  // namespace switchyard::quant
