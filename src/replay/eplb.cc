// Kind "eplb": measured loads to placement maps.
#include <fmt/format.h>

#include "model/config_reader.h"
#include "replay/case.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/eplb/algorithms.h"
#include "switchyard/moe/eplb/location.h"

namespace switchyard::replay {
namespace {

moe::EplbPolicy PolicyOf(const CaseFile& file) {
  moe::EplbPolicy policy = moe::ParseEplbAlgorithm(file.Text("algorithm"));
  policy.hierarchy =
      file.Flag("hierarchical") ? moe::EplbHierarchy::kHierarchical : moe::EplbHierarchy::kGlobal;
  return policy;
}

std::vector<uint8_t> ActiveDevices(const CaseFile& file) {
  std::vector<uint8_t> active;
  if (!file.HasConfig("active_ranks")) return active;
  for (const auto& flag : *file.config().find("active_ranks")) {
    if (!flag.is_number_integer())
      file.Corrupt("\"active_ranks\" of the config is no list of 0, 1");
    active.push_back(flag.get<int>() != 0 ? 1 : 0);
  }
  return active;
}

// Sum of the load over all steps, [L, E].
std::vector<float> SumOfSteps(std::span<const float> tokens, size_t num_steps) {
  std::vector<float> sum(tokens.size() / num_steps, 0.0f);
  for (size_t i = 0; i < tokens.size(); ++i) sum[i % sum.size()] += tokens[i];
  return sum;
}

template <typename T>
std::vector<double> Widen(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

KindOutput ReplayEplb(const KindInput& input) {
  const CaseFile& file = input.file;
  moe::EplbRequest request;
  request.policy = PolicyOf(file);
  request.num_steps = file.Size("num_steps");
  request.num_layers = file.Size("num_layers");
  request.num_logical = file.Size("num_logical_experts");
  request.num_physical = file.Size("num_physical_experts");
  request.num_devices = file.Size("num_gpus");
  request.num_nodes = file.Size("num_nodes");
  request.num_groups = file.SizeOr("num_groups", 0);
  file.View("in.tokens_per_expert", {request.num_steps, request.num_layers, request.num_logical});
  const std::vector<float> tokens = file.F32("in.tokens_per_expert");
  request.tokens_per_expert = tokens;
  const std::vector<uint8_t> active = ActiveDevices(file);
  request.active_devices = active;

  const moe::ExpertPlan plan = PlanExperts(request);
  const size_t layers = plan.num_layers, experts = plan.num_logical, ranks = request.num_devices;
  KindOutput output;
  Outputs& out = output.outputs;
  out["out.physical_to_logical"] = {{layers, plan.num_physical}, Widen(plan.physical_to_logical)};
  out["out.logical_to_physical"] = {{layers, experts, plan.max_replicas},
                                    Widen(plan.logical_to_physical)};
  out["out.logical_count"] = {{layers, experts}, Widen(plan.logical_count)};
  out["out.gpu_load"] = {{layers, ranks},
                         DeviceLoads(plan, SumOfSteps(tokens, request.num_steps), ranks)};
  if (!file.Has("out.rank_dispatch")) return output;
  const moe::ExpertLocation location = moe::ExpertLocation::FromPlan(plan, ranks);
  std::vector<double> dispatch;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t layer = 0; layer < layers; ++layer) {
      const std::span<const int32_t> row = location.RankDispatch(layer, rank);
      dispatch.insert(dispatch.end(), row.begin(), row.end());
    }
  }
  out["out.rank_dispatch"] = {{ranks, layers, experts}, std::move(dispatch)};
  return output;
}

}  // namespace switchyard::replay
