#include "moe/routing/columns.h"

#include <algorithm>

#include "moe/routing/random.h"

namespace switchyard::moe {
namespace {

size_t ReplicaIndex(const ExpertPlacement& placement, const TopKInputs& inputs, size_t token,
                    size_t column, size_t num_valid) {
  if (placement.algorithm == DispatchAlgorithm::kDynamicByRow) return token % num_valid;
  // The columns of fake logits are numbered from 0, these downwards: no number is used twice.
  return RandomBits(inputs.seed, token, ~column) % num_valid;
}

}  // namespace

void PlaceIds(const TopKConfig& config, const TopKInputs& inputs, size_t token, int32_t* ids) {
  if (inputs.placement == nullptr) return;
  const ExpertPlacement& placement = *inputs.placement;
  if (placement.algorithm == DispatchAlgorithm::kNone) return;
  for (size_t i = 0; i < config.NumRouted(); ++i) {
    const auto logical = static_cast<size_t>(ids[i]);
    if (placement.algorithm == DispatchAlgorithm::kStatic) {
      ids[i] = placement.rank_map[logical];
    } else {
      const auto num_valid = static_cast<size_t>(placement.num_valid[logical]);
      const size_t replica = ReplicaIndex(placement, inputs, token, i, num_valid);
      ids[i] = placement.all_physical[logical * placement.max_replicas + replica];
    }
  }
}

int32_t SharedId(const TopKConfig& config, size_t num_physical, size_t j) {
  if (config.shared_layout == SharedLayout::kGlobal) return static_cast<int32_t>(num_physical + j);
  const size_t per_rank = num_physical / config.moe_ep_size;
  const size_t first = config.moe_ep_rank * (per_rank + config.num_fused_shared_experts);
  return static_cast<int32_t>(first + per_rank + j);
}

double SharedWeight(const TopKConfig& config) {
  const double weight =
      config.apply_routed_scaling_factor_on_output ? 1.0 : 1.0 / config.routed_scaling_factor;
  return weight * config.fused_shared_experts_scaling_factor;
}

void AppendShared(const TopKConfig& config, size_t num_physical, int32_t* ids, float* weights) {
  const size_t num_routed = config.NumRouted(), num_shared = config.num_fused_shared_experts;
  if (num_shared == 0) return;
  if (config.shared_layout == SharedLayout::kPerRank) {
    const size_t per_rank = num_physical / config.moe_ep_size;
    for (size_t i = 0; i < num_routed; ++i)
      ids[i] += static_cast<int32_t>(static_cast<size_t>(ids[i]) / per_rank * num_shared);
  }
  for (size_t j = 0; j < num_shared; ++j) ids[num_routed + j] = SharedId(config, num_physical, j);
  std::fill_n(weights + num_routed, num_shared, static_cast<float>(SharedWeight(config)));
}

void MaskPadding(const TopKConfig& config, int32_t* ids, float* weights) {
  std::fill_n(weights, config.top_k, 0.0f);
  switch (config.padding) {
    case PaddingFamily::kDefault: std::fill_n(ids, config.top_k, -1); return;
    case PaddingFamily::kHipAiter: std::fill_n(ids, config.top_k, 0); return;
    case PaddingFamily::kAscend: return;
  }
}

}  // namespace switchyard::moe
