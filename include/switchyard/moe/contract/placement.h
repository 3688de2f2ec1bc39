// Where the replicas of the logical experts of one layer live, as the router reads it. Contract
// 2.11, 7.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace switchyard::moe {

// How a replica is chosen among those of a logical expert. Contract 2.11.
enum class DispatchAlgorithm {
  kNone,          // logical ids are physical ids
  kStatic,        // the rank's own map: the nearest replica
  kDynamic,       // a random replica, of a seed
  kDynamicByRow,  // the row's number picks it, so that every rank agrees
  kFake,          // logits are replaced by random ones, then kDynamic; for benchmarks
  kLp             // a linear program per pass; known by name, not in this build
};
std::string_view DispatchAlgorithmName(DispatchAlgorithm algorithm);

// One layer's placement. Non-owning; entries are proved once (ValidatePlacement), not per call.
//
// Shapes: all_physical i32 [E, X], padded with -1; num_valid i32 [E], 1 .. X; rank_map i32 [E].
// rank_map is read by kStatic only, the other two by the dynamic algorithms only; a table that is
// not read may be empty.
struct ExpertPlacement {
  DispatchAlgorithm algorithm = DispatchAlgorithm::kNone;
  size_t num_physical = 0;  // P
  size_t max_replicas = 0;  // X
  std::span<const int32_t> all_physical = {};
  std::span<const int32_t> num_valid = {};
  std::span<const int32_t> rank_map = {};
};

// Proves every entry that the algorithm reads.
// Errors: kInvalidArgument naming the table, the expert, the value and its range; kUnsupported for
//   kLp.
void ValidatePlacement(const ExpertPlacement& placement, size_t num_experts);

// The algorithm for an a2a backend when the user names none: by row for "none", whose ranks compute
// the same tokens and must agree; static otherwise.
DispatchAlgorithm DefaultDispatchAlgorithm(std::string_view a2a_backend);

// The algorithm that carries out `asked` with this backend: with "none" a dynamic choice goes by
// row.
// Errors: kInvalidArgument for static and lp with backend "none": a replica that depends on the
//   rank would be counted several times or not at all.
DispatchAlgorithm ResolveDispatchAlgorithm(DispatchAlgorithm asked, std::string_view a2a_backend);

}  // namespace switchyard::moe
