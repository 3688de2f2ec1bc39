#include "switchyard/moe/routing/topk_formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "switchyard/core/dtype.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

// Errors: kInvalidArgument if an id is outside [-1, limit).
void CheckIds(const TopKOutput& topk, size_t limit, std::string_view format) {
  for (size_t slot = 0; slot < topk.ids.size(); ++slot) {
    const int32_t id = topk.ids[slot];
    if (id < -1 || (id >= 0 && static_cast<size_t>(id) >= limit)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("routing format {}: token {} column {} must have an id of -1 to {}, "
                              "found {}",
                              format, slot / topk.top_k, slot % topk.top_k, limit - 1, id));
    }
  }
}

}  // namespace

PackedTopK PackTopK(ExecContext& context, const TopKOutput& topk) {
  CheckIds(topk, size_t{1} << 15, "packed");
  const std::span<int32_t> words = context.arena.AllocateSpan<int32_t>(topk.ids.size());
  for (size_t slot = 0; slot < words.size(); ++slot) {
    const uint32_t id = static_cast<uint32_t>(topk.ids[slot]) << 16;
    words[slot] = static_cast<int32_t>(id | ToBF16(topk.weights[slot]).bits);
  }
  return {topk.num_tokens, topk.top_k, words};
}

TopKOutput UnpackTopK(ExecContext& context, const PackedTopK& packed) {
  const std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(packed.words.size());
  const std::span<float> weights = context.arena.AllocateSpan<float>(packed.words.size());
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    ids[slot] = packed.words[slot] >> 16;  // arithmetic: -1 comes back as -1
    weights[slot] = ToFloat(BF16{static_cast<uint16_t>(packed.words[slot] & 0xffff)});
  }
  return {packed.num_tokens, packed.top_k, weights, ids, {}, packed.words};
}

RaggedTopK BuildRaggedTopK(ExecContext& context, const TopKOutput& topk, size_t num_experts) {
  constexpr auto kMaxSlots = static_cast<size_t>(std::numeric_limits<int32_t>::max());
  if (topk.ids.size() > kMaxSlots) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("routing format ragged: at most {} slots have numbers, found {}",
                            kMaxSlots, topk.ids.size()));
  }
  CheckIds(topk, num_experts, "ragged");
  Arena& arena = context.arena;
  const std::span<int32_t> counts = arena.AllocateSpan<int32_t>(num_experts);
  const std::span<int32_t> offsets = arena.AllocateSpan<int32_t>(num_experts + 1);
  const std::span<int32_t> scatter = arena.AllocateSpan<int32_t>(topk.ids.size());
  std::fill(counts.begin(), counts.end(), 0);
  for (int32_t id : topk.ids)
    if (id >= 0) ++counts[static_cast<size_t>(id)];
  offsets[0] = 0;
  for (size_t e = 0; e < num_experts; ++e) offsets[e + 1] = offsets[e] + counts[e];
  const auto num_rows = static_cast<size_t>(offsets[num_experts]);
  const std::span<int32_t> gather = arena.AllocateSpan<int32_t>(num_rows);
  const std::span<float> gate_scale = arena.AllocateSpan<float>(num_rows);
  const std::span<int32_t> next = arena.AllocateSpan<int32_t>(num_experts);
  std::copy_n(offsets.begin(), num_experts, next.begin());
  for (size_t slot = 0; slot < topk.ids.size(); ++slot) {
    const int32_t id = topk.ids[slot];
    scatter[slot] = id < 0 ? -1 : next[static_cast<size_t>(id)]++;
    if (id < 0) continue;
    const auto row = static_cast<size_t>(scatter[slot]);
    gather[row] = static_cast<int32_t>(slot);
    gate_scale[row] = topk.weights[slot];
  }
  return {topk.top_k, counts, offsets, gather, scatter, gate_scale};
}

TopKOutput ToStandard(ExecContext& context, const BypassedTopK& bypassed) {
  TopKInputs inputs = bypassed.inputs;
  if (inputs.hidden.rows == 0) inputs.hidden = bypassed.hidden_states;
  return SelectExperts(context, *bypassed.config, bypassed.router_logits, inputs);
}

ConstRows LogitsForKernel(const BypassedTopK& bypassed) {
  const ExpertPlacement* placement = bypassed.inputs.placement;
  if (placement != nullptr && placement->algorithm != DispatchAlgorithm::kNone) {
    throw Error(
        ErrorCode::kFailedPrecondition,
        fmt::format("routing format bypassed: logits were asked for, but experts are placed "
                    "by the algorithm {}, which a kernel that routes itself does not apply; "
                    "call ToStandard",
                    DispatchAlgorithmName(placement->algorithm)));
  }
  return bypassed.router_logits;
}

}  // namespace switchyard::moe
