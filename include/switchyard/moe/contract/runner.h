// The structs between the permutes and a runner core. Contract 1.5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/dtype.h"
#include "switchyard/core/rows.h"

namespace switchyard::moe {

// One matrix per local expert, all of one shape and type, wherever each lies: a stacked bank and
// one tensor per expert are read alike, without a copy.
//
// Shapes: data: L pointers to row-major [rows, cols]; row i of a matrix is at data + i * stride
//   elements. Non-owning.
struct ExpertMatrices {
  std::span<const std::byte* const> data;
  DType dtype = DType::kF32;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;
};

// Views of a layer's weights for one call (contract 1.5). gate = w1, up = w3, down = w2; together
// w1 and w3 are the contract's w13.
struct MoeQuantInfo {
  ExpertMatrices w1;  // [I, H]
  ExpertMatrices w3;  // [I, H]
  ExpertMatrices w2;  // [H, I]
};

// Base of every runner's input and output; `runner` says which struct it is. Objects live in the
// arena of the step.
struct RunnerInput {
  std::string_view runner;
};
// See RunnerInput.
struct RunnerOutput {
  std::string_view runner;
};

}  // namespace switchyard::moe
