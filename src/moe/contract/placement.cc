#include "switchyard/moe/contract/placement.h"

#include <fmt/format.h>

#include <string>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "expert placement: " + message);
}

void RequireSize(std::string_view table, size_t found, size_t expected) {
  if (found != expected)
    Invalid(fmt::format("{} must have {} entries, found {}", table, expected, found));
}

void RequirePhysical(std::string_view table, size_t expert, int32_t id, size_t num_physical) {
  if (id < 0 || static_cast<size_t>(id) >= num_physical) {
    Invalid(fmt::format("{} of expert {} must be 0 to {}, found {}", table, expert,
                        num_physical - 1, id));
  }
}

void ValidateRankMap(const ExpertPlacement& placement, size_t num_experts) {
  RequireSize("rank_map", placement.rank_map.size(), num_experts);
  for (size_t e = 0; e < num_experts; ++e)
    RequirePhysical("rank_map", e, placement.rank_map[e], placement.num_physical);
}

void ValidateReplicas(const ExpertPlacement& placement, size_t num_experts) {
  const size_t width = placement.max_replicas;
  RequireSize("num_valid", placement.num_valid.size(), num_experts);
  if (width == 0) Invalid("max_replicas must be at least 1, found 0");
  // Divided, because width * num_experts may overflow.
  if (placement.all_physical.size() % width != 0 ||
      placement.all_physical.size() / width != num_experts) {
    Invalid(fmt::format("all_physical must have {} x {} entries, found {}", num_experts, width,
                        placement.all_physical.size()));
  }
  for (size_t e = 0; e < num_experts; ++e) {
    const int32_t count = placement.num_valid[e];
    if (count < 1 || static_cast<size_t>(count) > width)
      Invalid(fmt::format("num_valid of expert {} must be 1 to {}, found {}", e, width, count));
    for (size_t j = 0; j < static_cast<size_t>(count); ++j)
      RequirePhysical("all_physical", e, placement.all_physical[e * width + j],
                      placement.num_physical);
  }
}

}  // namespace

std::string_view DispatchAlgorithmName(DispatchAlgorithm algorithm) {
  switch (algorithm) {
    case DispatchAlgorithm::kNone: return "none";
    case DispatchAlgorithm::kStatic: return "static";
    case DispatchAlgorithm::kDynamic: return "dynamic";
    case DispatchAlgorithm::kDynamicByRow: return "dynamic_by_row";
    case DispatchAlgorithm::kFake: return "fake";
    case DispatchAlgorithm::kLp: return "lp";
  }
  return "?";
}

void ValidatePlacement(const ExpertPlacement& placement, size_t num_experts) {
  switch (placement.algorithm) {
    case DispatchAlgorithm::kNone: return;
    case DispatchAlgorithm::kLp:
      throw Error(ErrorCode::kUnsupported,
                  "expert placement: the dispatch algorithm lp is not in this build; use static or "
                  "dynamic");
    case DispatchAlgorithm::kStatic:
    case DispatchAlgorithm::kDynamic:
    case DispatchAlgorithm::kDynamicByRow:
    case DispatchAlgorithm::kFake: break;
  }
  if (placement.num_physical < num_experts) {
    Invalid(fmt::format("num_physical must be at least {} (the number of experts), found {}",
                        num_experts, placement.num_physical));
  }
  if (placement.algorithm == DispatchAlgorithm::kStatic) {
    ValidateRankMap(placement, num_experts);
  } else {
    ValidateReplicas(placement, num_experts);
  }
}

DispatchAlgorithm DefaultDispatchAlgorithm(std::string_view a2a_backend) {
  return a2a_backend == "none" ? DispatchAlgorithm::kDynamicByRow : DispatchAlgorithm::kStatic;
}

DispatchAlgorithm ResolveDispatchAlgorithm(DispatchAlgorithm asked, std::string_view a2a_backend) {
  if (a2a_backend != "none") return asked;
  if (asked == DispatchAlgorithm::kStatic || asked == DispatchAlgorithm::kLp) {
    Invalid(
        fmt::format("the a2a backend none cannot use the dispatch algorithm {}: every rank "
                    "computes all tokens, so a replica that depends on the rank would be "
                    "counted several times or not at all; use dynamic",
                    DispatchAlgorithmName(asked)));
  }
  return asked == DispatchAlgorithm::kDynamic ? DispatchAlgorithm::kDynamicByRow : asked;
}

}  // namespace switchyard::moe
