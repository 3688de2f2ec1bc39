// From a token's routed logical experts to its output columns: physical ids, shared columns,
// padding. Contract 2.7, 2.10, 2.11.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// P: physical routed experts of a call.
inline size_t NumPhysical(const TopKConfig& config, const TopKInputs& inputs) {
  const bool placed =
      inputs.placement != nullptr && inputs.placement->algorithm != DispatchAlgorithm::kNone;
  return placed ? inputs.placement->num_physical : config.num_experts;
}

// Replaces the routed logical ids by physical ones.
void PlaceIds(const TopKConfig& config, const TopKInputs& inputs, size_t token, int32_t* ids);

// The id of shared column j, and the weight of every shared column: such that the scaling that
// follows the sum cancels.
int32_t SharedId(const TopKConfig& config, size_t num_physical, size_t j);
double SharedWeight(const TopKConfig& config);

// Moves the routed physical ids out of the way of per-rank shared slots and appends the shared
// columns.
void AppendShared(const TopKConfig& config, size_t num_physical, int32_t* ids, float* weights);

// Overwrites a row of padding. kAscend keeps the ids.
void MaskPadding(const TopKConfig& config, int32_t* ids, float* weights);

}  // namespace switchyard::moe
