#include "switchyard/moe/eplb/algorithms.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "moe/eplb/layer_plan.h"
#include "moe/eplb/packing.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "expert load balancing: " + message);
}

void RequireMultiple(std::string_view what, size_t value, std::string_view of, size_t divisor) {
  if (divisor == 0 || value % divisor != 0) {
    Invalid(fmt::format("{} must be a multiple of {}, found {} and {}", what, of, value, divisor));
  }
}

void CheckLoads(const EplbRequest& request) {
  const size_t expected = request.num_steps * request.num_layers * request.num_logical;
  if (request.num_steps == 0 || request.tokens_per_expert.size() != expected) {
    Invalid(
        fmt::format("tokens_per_expert must have {} steps x {} layers x {} experts, found {} "
                    "entries",
                    request.num_steps, request.num_layers, request.num_logical,
                    request.tokens_per_expert.size()));
  }
  for (size_t i = 0; i < expected; ++i) {
    const float load = request.tokens_per_expert[i];
    if (std::isfinite(load) && load >= 0) continue;
    Invalid(fmt::format("the load of layer {} expert {} must be finite and not negative, found {}",
                        i / request.num_logical % request.num_layers, i % request.num_logical,
                        load));
  }
}

void CheckSizes(const EplbRequest& request) {
  constexpr size_t kMaxSize = size_t{1} << 16;
  const std::pair<std::string_view, size_t> sizes[] = {
      {"num_logical", request.num_logical},
      {"num_physical", request.num_physical},
      {"num_devices", request.num_devices},
      {"num_nodes", request.num_nodes},
  };
  for (const auto& [name, size] : sizes) {
    if (size == 0 || size > kMaxSize)
      Invalid(fmt::format("{} must be 1 to {}, found {}", name, kMaxSize, size));
  }
  // So that steps * layers * experts cannot overflow.
  constexpr size_t kMaxLayers = size_t{1} << 14, kMaxSteps = size_t{1} << 24;
  if (request.num_layers > kMaxLayers || request.num_steps > kMaxSteps) {
    Invalid(fmt::format("at most {} layers and {} steps are balanced, found {} and {}", kMaxLayers,
                        kMaxSteps, request.num_layers, request.num_steps));
  }
  if (request.num_physical < request.num_logical) {
    Invalid(fmt::format("num_physical must be at least {} (the logical experts), found {}",
                        request.num_logical, request.num_physical));
  }
  RequireMultiple("num_physical", request.num_physical, "num_devices", request.num_devices);
}

bool CanBeHierarchical(const EplbRequest& request) {
  return request.num_groups != 0 && request.num_groups % request.num_nodes == 0 &&
         request.num_logical % request.num_groups == 0 &&
         request.num_devices % request.num_nodes == 0;
}

bool IsHierarchical(const EplbRequest& request) {
  switch (request.policy.hierarchy) {
    case EplbHierarchy::kAuto: return CanBeHierarchical(request);
    case EplbHierarchy::kGlobal: return false;
    case EplbHierarchy::kHierarchical: break;
  }
  RequireMultiple("num_logical", request.num_logical, "num_groups", request.num_groups);
  RequireMultiple("num_groups", request.num_groups, "num_nodes", request.num_nodes);
  RequireMultiple("num_devices", request.num_devices, "num_nodes", request.num_nodes);
  return true;
}

// Devices that are alive, by number.
std::vector<size_t> ActiveDevices(const EplbRequest& request) {
  std::vector<size_t> active;
  const std::span<const uint8_t> flags = request.active_devices;
  if (!flags.empty()) {
    if (request.policy.algorithm != EplbAlgorithm::kElasticityAware)
      Invalid("active_devices are for the algorithm elasticity_aware only");
    if (flags.size() != request.num_devices) {
      Invalid(fmt::format("active_devices must have {} entries (num_devices), found {}",
                          request.num_devices, flags.size()));
    }
  }
  for (size_t d = 0; d < request.num_devices; ++d)
    if (flags.empty() || flags[d] != 0) active.push_back(d);
  const size_t slots = request.num_physical / request.num_devices * active.size();
  if (slots < request.num_logical) {
    Invalid(fmt::format("{} of {} devices are alive and hold {} experts, {} are needed",
                        active.size(), request.num_devices, slots, request.num_logical));
  }
  return active;
}

// What the algorithm sees: the devices that are alive, in groups and nodes or not.
LayerSizes SizesFor(const EplbRequest& request, size_t num_active) {
  const bool all_alive = num_active == request.num_devices;
  LayerSizes sizes{request.num_logical, request.num_physical / request.num_devices * num_active,
                   num_active, 1, 1};
  if (IsHierarchical(request) && all_alive) {
    sizes.num_nodes = request.num_nodes;
    sizes.num_groups = request.num_groups;
  }
  if (request.policy.algorithm == EplbAlgorithm::kDeepseekVec) {
    RequireMultiple("the number of redundant experts", request.num_physical - request.num_logical,
                    "num_nodes", sizes.num_nodes);
  }
  return sizes;
}

// The load of a layer over all steps, in f32.
std::vector<float> SumOverSteps(const EplbRequest& request, size_t layer) {
  std::vector<float> sum(request.num_logical, 0.0f);
  for (size_t s = 0; s < request.num_steps; ++s) {
    const float* row =
        request.tokens_per_expert.data() + (s * request.num_layers + layer) * request.num_logical;
    for (size_t e = 0; e < request.num_logical; ++e) sum[e] += row[e];
  }
  return sum;
}

LayerPlan PlanOf(const EplbRequest& request, size_t layer, const LayerSizes& sizes) {
  if (request.policy.algorithm != EplbAlgorithm::kDeepseekVec)
    return PlanLayer(SumOverSteps(request, layer), sizes);
  std::vector<std::span<const float>> steps;
  for (size_t s = 0; s < request.num_steps; ++s)
    steps.push_back(request.tokens_per_expert.subspan(
        (s * request.num_layers + layer) * request.num_logical, request.num_logical));
  return PlanLayerVec(steps, sizes);
}

size_t LargestCount(const std::vector<LayerPlan>& layers) {
  size_t largest = 0;
  for (const LayerPlan& layer : layers)
    for (size_t place : layer.place) largest = std::max(largest, place + 1);
  return largest;
}

// Writes a layer's maps; `active` says on which device its slots really are.
void Store(const LayerPlan& layer, size_t index, const std::vector<size_t>& active,
           size_t per_device, ExpertPlan& plan) {
  int32_t* physical = plan.physical_to_logical.data() + index * plan.num_physical;
  int32_t* count = plan.logical_count.data() + index * plan.num_logical;
  int32_t* lists = plan.logical_to_physical.data() + index * plan.num_logical * plan.max_replicas;
  for (size_t slot = 0; slot < layer.logical.size(); ++slot) {
    const size_t p = active[slot / per_device] * per_device + slot % per_device;
    const size_t e = layer.logical[slot];
    physical[p] = static_cast<int32_t>(e);
    lists[e * plan.max_replicas + layer.place[slot]] = static_cast<int32_t>(p);
    ++count[e];
  }
}

}  // namespace

EplbPolicy ParseEplbAlgorithm(std::string_view name) {
  using enum EplbAlgorithm;
  using enum EplbHierarchy;
  const std::pair<std::string_view, EplbPolicy> names[] = {
      {"auto", {kDeepseek, kAuto}},
      {"deepseek", {kDeepseek, kGlobal}},
      {"deepseek_hierarchical", {kDeepseek, kHierarchical}},
      {"deepseek_vec", {kDeepseekVec, kGlobal}},
      {"deepseek_vec_hierarchical", {kDeepseekVec, kHierarchical}},
      {"elasticity_aware", {kElasticityAware, kGlobal}},
      {"elasticity_aware_hierarchical", {kElasticityAware, kHierarchical}},
  };
  std::string known;
  for (const auto& [known_name, policy] : names) {
    if (known_name == name) return policy;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", known_name);
  }
  Invalid(fmt::format("unknown eplb-algorithm \"{}\"; there are: {}", name, known));
}

std::vector<size_t> ExpertsByNode(std::span<const float> load, const LayerSizes& sizes,
                                  bool greedy) {
  const size_t size = sizes.num_logical / sizes.num_groups;
  const size_t groups_per_node = sizes.num_groups / sizes.num_nodes;
  std::vector<float> group_loads(sizes.num_groups, 0.0f);
  for (size_t e = 0; e < load.size(); ++e) group_loads[e / size] += load[e];
  const Packing packing = greedy ? GreedyPacking(group_loads, sizes.num_nodes)
                                 : BalancedPacking(group_loads, sizes.num_nodes);
  std::vector<size_t> experts(sizes.num_logical);
  for (size_t e = 0; e < experts.size(); ++e) {
    const size_t group = e / size;
    const size_t position = packing.pack[group] * groups_per_node + packing.place[group];
    experts[position * size + e % size] = e;
  }
  return experts;
}

LayerPlan PlanLayer(std::span<const float> load, const LayerSizes& sizes) {
  const std::vector<size_t> experts = ExpertsByNode(load, sizes, false);
  const size_t experts_per_node = sizes.num_logical / sizes.num_nodes;
  const size_t slots_per_node = sizes.num_physical / sizes.num_nodes;
  const size_t slots_per_device = sizes.num_physical / sizes.num_devices;
  LayerPlan plan(sizes.num_physical);
  for (size_t node = 0; node < sizes.num_nodes; ++node) {
    const size_t* own = experts.data() + node * experts_per_node;
    std::vector<float> loads(experts_per_node);
    for (size_t i = 0; i < experts_per_node; ++i) loads[i] = load[own[i]];
    const Replication replicas = Replicate(loads, slots_per_node);
    std::vector<float> shares(slots_per_node);
    for (size_t i = 0; i < slots_per_node; ++i) {
      const size_t expert = replicas.expert[i];
      shares[i] = loads[expert] / static_cast<float>(replicas.count[expert]);
    }
    const Packing packing = BalancedPacking(shares, sizes.num_devices / sizes.num_nodes);
    for (size_t i = 0; i < slots_per_node; ++i) {
      const size_t slot =
          node * slots_per_node + packing.pack[i] * slots_per_device + packing.place[i];
      plan.logical[slot] = own[replicas.expert[i]];
      plan.place[slot] = replicas.place[i];
    }
  }
  return plan;
}

ExpertPlan PlanExperts(const EplbRequest& request) {
  CheckSizes(request);
  CheckLoads(request);
  const std::vector<size_t> active = ActiveDevices(request);
  const LayerSizes sizes = SizesFor(request, active.size());
  std::vector<LayerPlan> layers;
  for (size_t l = 0; l < request.num_layers; ++l) layers.push_back(PlanOf(request, l, sizes));
  ExpertPlan plan{request.num_layers, request.num_logical, request.num_physical, 0, {}, {}, {}};
  plan.max_replicas = request.policy.algorithm == EplbAlgorithm::kDeepseekVec
                          ? request.num_physical - request.num_logical + 1
                          : LargestCount(layers);
  plan.physical_to_logical.assign(plan.num_layers * plan.num_physical, 0);
  plan.logical_count.assign(plan.num_layers * plan.num_logical, 0);
  plan.logical_to_physical.assign(plan.num_layers * plan.num_logical * plan.max_replicas, -1);
  for (size_t l = 0; l < layers.size(); ++l)
    Store(layers[l], l, active, request.num_physical / request.num_devices, plan);
  return plan;
}

std::vector<double> DeviceLoads(const ExpertPlan& plan, std::span<const float> load,
                                size_t num_devices) {
  RequireMultiple("num_physical", plan.num_physical, "num_devices", num_devices);
  const size_t rows = plan.num_layers * plan.num_logical;
  if (load.size() != rows) {
    Invalid(fmt::format("the load must have {} layers x {} experts, found {} entries",
                        plan.num_layers, plan.num_logical, load.size()));
  }
  std::vector<double> loads(plan.num_layers * num_devices, 0.0);
  const size_t per_device = plan.num_physical / num_devices;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t j = 0; j < static_cast<size_t>(plan.logical_count[row]); ++j) {
      const auto p = static_cast<size_t>(plan.logical_to_physical[row * plan.max_replicas + j]);
      loads[row / plan.num_logical * num_devices + p / per_device] +=
          double{load[row]} / plan.logical_count[row];
    }
  }
  return loads;
}

double Utilization(std::span<const double> device_loads) {
  if (device_loads.empty()) return 1;
  constexpr double kFloor = 1e-5;
  const double sum = std::accumulate(device_loads.begin(), device_loads.end(), 0.0);
  const double largest = *std::max_element(device_loads.begin(), device_loads.end());
  return (sum / static_cast<double>(device_loads.size()) + kFloor) / (largest + kFloor);
}

}  // namespace switchyard::moe
