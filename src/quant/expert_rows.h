// The two products of experts over rows that are grouped by expert: gate and up with the
// activation, and down. What every fused path is made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "quant/expert_matmul.h"
#include "quant/linear.h"
#include "switchyard/core/activation.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/quant_format.h"

namespace switchyard::quant {

// Rows side by side, those of one expert behind those of another.
struct ExpertGroups {
  std::span<const uint32_t> experts;  // those that have rows
  std::span<const uint32_t> begin;    // [experts + 1] first row of each; begin[0] is 0

  size_t num_rows() const { return begin.empty() ? 0 : begin.back(); }
};

// Items in the order of their experts, ascending, and as they came within each.
struct GroupedItems {
  ExpertGroups groups;             // experts ascending
  std::span<const uint32_t> item;  // [rows] the item that each row stands for
};

// expert_of(i) is the expert of item i, below num_experts, or negative to leave it out. A counting
// sort in the arena: O(items + experts).
template <typename ExpertOf>
GroupedItems GroupByExpert(Arena& arena, size_t num_items, size_t num_experts,
                           const ExpertOf& expert_of) {
  const std::span<uint32_t> next = arena.AllocateSpan<uint32_t>(num_experts);
  std::fill(next.begin(), next.end(), 0u);
  for (size_t item = 0; item < num_items; ++item) {
    const int32_t expert = expert_of(item);
    if (expert >= 0) ++next[static_cast<size_t>(expert)];
  }
  const std::span<uint32_t> experts = arena.AllocateSpan<uint32_t>(num_experts);
  const std::span<uint32_t> begin = arena.AllocateSpan<uint32_t>(num_experts + 1);
  size_t used = 0;
  uint32_t row = 0;
  for (size_t expert = 0; expert < num_experts; ++expert) {
    const uint32_t count = next[expert];
    next[expert] = row;
    if (count == 0) continue;
    experts[used] = static_cast<uint32_t>(expert);
    begin[used++] = row;
    row += count;
  }
  begin[used] = row;
  const std::span<uint32_t> item_of = arena.AllocateSpan<uint32_t>(row);
  for (size_t item = 0; item < num_items; ++item) {
    const int32_t expert = expert_of(item);
    if (expert >= 0) item_of[next[static_cast<size_t>(expert)]++] = static_cast<uint32_t>(item);
  }
  return {{experts.first(used), begin.first(used + 1)}, item_of};
}

// The first product of a layer and what follows it.
struct GateUpLayer {
  const ExpertMatrices& w1;
  const ExpertMatrices& w3;  // not read if not gated
  bool is_gated;
  const Activation& formula;
};

// act(x W1^T + b1) * (x W3^T + b3) of every row with its expert's matrices, or act(x W1^T + b1),
// rounded to hidden_dtype (kF32 or kBF16).
//
// Shapes: x [groups.num_rows(), H] from PrepareExpertRows; returns as many rows of I, in the arena,
//   each at a multiple of 64 bytes.
// Deterministic: the bits of a row depend on nothing but the row and its expert.
QuantRows GateUp(ExecContext& context, const ExpertGroups& groups, const ActRows& x,
                 const GateUpLayer& layer, DType hidden_dtype);

// The type of hidden rows: that in which the second product takes them as they are, else kF32.
DType HiddenDType(const ActQuant& how, const MatrixFormat& w2, DType act_dtype);

// hidden W2^T + b2 of every row.
//
// Shapes: hidden [groups.num_rows(), I]; returns as many rows of H, in the arena.
// Deterministic: as GateUp.
Rows Down(ExecContext& context, const ExpertGroups& groups, const ActRows& hidden,
          const ExpertMatrices& w2);

// The same into rows that lie apart, in memory that is only written.
// Shapes: out [groups.num_rows()], f32 rows of H.
void DownInto(ExecContext& context, const ExpertGroups& groups, const ActRows& hidden,
              const ExpertMatrices& w2, std::span<float* const> out);

}  // namespace switchyard::quant
