// The expert weights of a layer, as a loader hands them over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "switchyard/core/quant_format.h"

namespace switchyard::moe {

// The matrices of one product (w1, w3 or w2), as the loader found them. Owns the lists of pointers;
// the bytes belong to the checkpoint.
struct ExpertBank {
  MatrixFormat format;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;        // elements; 0 = cols
  size_t scale_stride = 0;  // elements; 0 = the width of the scale grid
  size_t bias_stride = 1;
  std::vector<const std::byte*> data, scale, zero;  // one pointer per local expert, or none
  std::vector<const float*> bias;
  std::vector<const float*> tensor_scale;    // one f32 each, of formats that have it
  std::vector<const int32_t*> column_group;  // [cols] each, of formats that have it
  ActQuant act;  // parameters of the scheme's activation quantiser; the kind is the scheme's

  // Shapes: as ExpertMatrices; refers to this bank.
  ExpertMatrices View() const;
};

// The storage of a layer's expert weights. Owned by the layer.
struct ExpertWeights {
  ExpertBank w1, w3, w2;  // [I, H], [I, H] (empty when not gated), [H, I]
  size_t hidden_size = 0;
  size_t intermediate_size = 0;
};

// Bits that one weight takes, scales and zero points included.
double BitsPerWeight(const ExpertBank& bank);
// The same of a matrix [rows, cols].
double BitsPerWeight(const MatrixFormat& format, size_t rows, size_t cols);

// The gate and up banks of a stacked w13, whose rows are all gate rows, then all up rows, or gate
// and up in turn. Both refer to the bytes of `w13`; nothing moves.
//
// Shapes: w13 [2 I, H]; returns w1 and w3, [I, H] each.
// Errors: kInvalidArgument if the number of rows is odd; kUnsupported if up starts inside a block
//   of scales, or rows that alternate share one.
std::pair<ExpertBank, ExpertBank> SplitGateUp(const ExpertBank& w13, bool interleaved);

// The experts slots[0], slots[1], … of `weights`, in this order: those of one rank. Refers to the
// same bytes.
// Errors: kInvalidArgument if there is no such expert.
ExpertWeights PickExperts(const ExpertWeights& weights, std::span<const int32_t> slots);

// Part `part` of `parts` equal ones of every expert, split on the intermediate size (MoE-TP): rows
// of w1 and w3, columns of w2. The bias of w2 stays with part 0, so that it is added once. Refers
// to the same bytes.
//
// Errors: kInvalidArgument if I is not a multiple of parts; kUnsupported if a part would start
//   inside a block of scales, or, of 4-bit values, inside a byte.
ExpertWeights SplitExperts(const ExpertWeights& weights, size_t part, size_t parts);

}  // namespace switchyard::moe
