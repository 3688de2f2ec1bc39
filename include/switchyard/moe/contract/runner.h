// The structs between the permutes and a runner core. Contract 1.5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/core/quant_format.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe {

// Views of a layer's weights for one call (contract 1.5). gate = w1, up = w3, down = w2; together
// w1 and w3 are the contract's w13. Each runner derives its own struct (AiterMoeQuantInfo,
// AscendQuantInfo) from it.
struct MoeQuantInfo {
  ExpertMatrices w1;  // [I, H]
  ExpertMatrices w3;  // [I, H]; no experts when the layer is not gated
  ExpertMatrices w2;  // [H, I]
  ActQuant a13;       // of the rows that w1 and w3 multiply
  ActQuant a2;        // of the rows that w2 multiplies

  // Over the ids of a call, 1 = an expert of this rank; empty = all are. The n-th 1 is the expert n
  // of the matrices.
  std::span<const int32_t> expert_mask;
  size_t hidden_pad = 0;        // last columns of H that only fill up a tile
  size_t intermediate_pad = 0;  // last columns of I that do
};

// Refuses matrices that contradict each other, and a mask (empty = none) with another number of
// local experts than they have.
// Errors: kInvalidArgument naming the layer and the sizes.
void RequireExperts(const MoeQuantInfo& info, std::span<const int32_t> mask, bool is_gated,
                    size_t layer_id);

// Base of every runner's input and output; `runner` says which struct it is, `promises` what the
// dispatch expects (input) and what the rows are (output). Objects live in the arena of the step.
struct RunnerInput {
  std::string_view runner;
  DispatchPromises promises;
};
// See RunnerInput.
struct RunnerOutput {
  std::string_view runner;
  DispatchPromises promises;
};

}  // namespace switchyard::moe
