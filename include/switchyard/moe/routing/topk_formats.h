// The other formats of a routing result: packed, ragged by expert, and not yet computed. Contract
// 1.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Format PACKED: one i32 per slot, (id << 16) | bits of the weight as bf16 (rounded to nearest
// even). -1 stays -1: its upper half is 0xffff.
//
// Shapes: words i32 [T, K'], row-major.
struct PackedTopK {
  size_t num_tokens = 0;
  size_t top_k = 0;
  std::span<const int32_t> words;
};

// Errors: kInvalidArgument naming the token and the id if an id does not fit 15 bits or is below
//   -1.
PackedTopK PackTopK(ExecContext& context, const TopKOutput& topk);

// The format STANDARD again; weights are the rounded ones, router_logits is empty.
TopKOutput UnpackTopK(ExecContext& context, const PackedTopK& packed);

// Format TRITON_KERNEL: the live slots sorted by expert, those of one expert in the order of tokens
// and columns. A slot is token * K' + column.
//
// Shapes: counts i32 [P]; offsets i32 [P + 1], rows of expert e are [offsets[e], offsets[e + 1]);
//   gather i32 [M]: the slot of each row; scatter i32 [T * K']: the row of each slot, -1 if it is
//   dropped; gate_scale f32 [M]: the weight of each row.
struct RaggedTopK {
  size_t top_k = 0;
  std::span<const int32_t> counts;
  std::span<const int32_t> offsets;
  std::span<const int32_t> gather;
  std::span<const int32_t> scatter;
  std::span<const float> gate_scale;
};

// `num_experts`: physical and shared ids together. Cost: linear in slots and experts.
// Errors: kInvalidArgument naming the token and the id if an id is outside [-1, num_experts).
RaggedTopK BuildRaggedTopK(ExecContext& context, const TopKOutput& topk, size_t num_experts);

// Format BYPASSED: what is needed to route, left to a kernel that routes itself.
//
// Shapes: router_logits [T, E]; hidden_states [T, H]. Refers to config and to all of inputs.
struct BypassedTopK {
  ConstRows hidden_states;
  ConstRows router_logits;
  const TopKConfig* config = nullptr;
  TopKInputs inputs;
};

// Routes now. Errors: as SelectExperts.
TopKOutput ToStandard(ExecContext& context, const BypassedTopK& bypassed);

// The logits, for a kernel that routes itself.
// Shapes: returns [T, E].
// Errors: kFailedPrecondition if there is a placement map, which no such kernel applies: call
//   ToStandard.
ConstRows LogitsForKernel(const BypassedTopK& bypassed);

}  // namespace switchyard::moe
