// Expert-parallel load balancing: from measured loads to how many replicas each expert gets and
// where they live. Contract 7.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace switchyard::moe {

// How replicas are counted and placed.
enum class EplbAlgorithm {
  kDeepseek,         // of the load summed over all steps
  kDeepseekVec,      // of the load of every step: lowers the sum over steps of the largest load
  kElasticityAware,  // kDeepseek over the devices that are alive
};

// Whether groups of experts are kept together on a node first.
enum class EplbHierarchy {
  kAuto,          // kHierarchical where groups and nodes divide all they must, else kGlobal
  kGlobal,        // one group, one node
  kHierarchical,  // groups to nodes, replicas inside a node, replicas to its devices
};

// The two choices that one name of the option eplb-algorithm stands for.
struct EplbPolicy {
  EplbAlgorithm algorithm = EplbAlgorithm::kDeepseek;
  EplbHierarchy hierarchy = EplbHierarchy::kAuto;
};

// auto, deepseek, deepseek_vec and elasticity_aware, the last three also with _hierarchical.
// Errors: kInvalidArgument listing the names.
EplbPolicy ParseEplbAlgorithm(std::string_view name);

// What to balance.
//
// Shapes: tokens_per_expert f32 [S, L, E], finite and not negative; active_devices [num_devices], 0
//   = lost, or empty = all alive (kElasticityAware only).
struct EplbRequest {
  EplbPolicy policy;
  size_t num_steps = 1;     // S
  size_t num_layers = 0;    // L
  size_t num_logical = 0;   // E
  size_t num_physical = 0;  // P, a multiple of num_devices
  size_t num_devices = 0;
  size_t num_nodes = 1;
  size_t num_groups = 0;  // of experts, 0 = unknown
  std::span<const float> tokens_per_expert;
  std::span<const uint8_t> active_devices = {};
};

// Where every replica lives.
//
// Shapes: physical_to_logical i32 [L, P]; logical_to_physical i32 [L, E, X], padded with -1, in the
//   order in which the replicas were made; logical_count i32 [L, E]. Slots of lost devices hold
//   expert 0 and are in no list. Device d owns the physical experts [d * P/D, (d + 1) * P/D).
struct ExpertPlan {
  size_t num_layers = 0;
  size_t num_logical = 0;
  size_t num_physical = 0;
  size_t max_replicas = 0;  // X: the largest count, with kDeepseekVec P - E + 1
  std::vector<int32_t> physical_to_logical;
  std::vector<int32_t> logical_to_physical;
  std::vector<int32_t> logical_count;
};

// Deterministic: loads are f32, a load is divided by its replicas in f32, devices add up in f64;
//   equal loads go to the lower expert, equal devices to the lower device.
// Cost: per layer P log P; kDeepseekVec makes one pass over all steps per redundant expert.
// Errors: kInvalidArgument naming the size that does not divide, the load that is no count, or that
//   the devices alive cannot hold all experts.
ExpertPlan PlanExperts(const EplbRequest& request);

// What each device would carry, if the replicas of an expert share its load evenly.
//
// Shapes: load f32 [L, E]; returns [L, num_devices].
// Errors: kInvalidArgument if the sizes do not fit the plan.
std::vector<double> DeviceLoads(const ExpertPlan& plan, std::span<const float> load,
                                size_t num_devices);

// How evenly devices are used: (mean + 1e-5) / (largest + 1e-5), 1 = all alike. Contract 7.4.
// 1 without devices.
double Utilization(std::span<const double> device_loads);

}  // namespace switchyard::moe
