#include "switchyard/parallel/parallel_groups.h"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// FNV-1a, 64 bits.
uint64_t Hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// What all ranks have to have in common.
std::string Statement(const ParallelConfig& config, std::string_view fingerprint) {
  return fmt::format("version {}, tp_size {}, moe_ep_size {}, moe_dp_size {}, dp_attention {}, {}",
                     SWITCHYARD_VERSION, config.tp_size, config.moe_ep_size, config.moe_dp_size,
                     config.dp_attention, fingerprint);
}

void CheckAgreement(ProcessGroup& world, const std::string& statement, const Deadline& deadline) {
  const std::vector<uint64_t> hashes = AllGatherValue(world, Hash(statement), deadline);
  for (size_t rank = 1; rank < world.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    // Only now the texts, which may be long.
    const std::vector<std::string> texts = AllGatherText(world, statement, deadline);
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("the ranks do not run the same thing: rank 0 has \"{}\", rank {} has "
                            "\"{}\"; start all ranks with the same build, model and options",
                            texts[0], rank, texts[rank]));
  }
}

}  // namespace

void ParallelConfig::Check(size_t num_ranks) const {
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  };
  if (tp_size == 0 || moe_ep_size == 0 || moe_dp_size == 0) {
    refuse(
        fmt::format("tp_size, moe_ep_size and moe_dp_size must be at least 1, found {}, {} and "
                    "{}",
                    tp_size, moe_ep_size, moe_dp_size));
  }
  if (tp_size != num_ranks) {
    refuse(fmt::format("tp_size {} needs as many ranks, found {} (mpirun -n {})", tp_size,
                       num_ranks, tp_size));
  }
  // Both bounds first, so that the product cannot overflow.
  if (moe_ep_size > tp_size || moe_dp_size > tp_size || moe_ep_size * moe_dp_size > tp_size) {
    refuse(fmt::format("moe_ep_size {} * moe_dp_size {} exceeds tp_size {}", moe_ep_size,
                       moe_dp_size, tp_size));
  }
  if (tp_size % (moe_ep_size * moe_dp_size) != 0) {
    refuse(fmt::format("tp_size {} is not a multiple of moe_ep_size {} * moe_dp_size {}", tp_size,
                       moe_ep_size, moe_dp_size));
  }
}

MoePosition PositionOf(const ParallelConfig& config, size_t tp_rank) {
  const size_t copy = config.moe_ep_size * config.moe_tp_size();
  return {.moe_dp = tp_rank / copy,
          .moe_ep = tp_rank % copy / config.moe_tp_size(),
          .moe_tp = tp_rank % config.moe_tp_size()};
}

ParallelGroups MakeGroups(ProcessGroup& world, const ParallelConfig& config,
                          std::string_view fingerprint, const Deadline& deadline) {
  CheckAgreement(world, Statement(config, fingerprint), deadline);
  config.Check(world.size());  // equal on all ranks, so all of them throw or none

  ParallelGroups groups;
  groups.config_ = config;
  // The world carries no data: it stays usable for messages when a group has failed.
  groups.owned_.push_back(world.Duplicate("tp", deadline));
  groups.tp_ = groups.owned_.back().get();
  const MoePosition position = PositionOf(config, groups.tp_->rank());
  groups.position_ = position;

  const auto split = [&](std::string_view name, size_t size, size_t color) {
    if (size == config.tp_size && name != "moe_ep") return groups.tp_;
    groups.owned_.push_back(groups.tp_->Split(color, groups.tp_->rank(), name, deadline));
    return groups.owned_.back().get();
  };
  // The color is what all ranks of a group share: the other two coordinates.
  groups.moe_ep_ =
      split("moe_ep", config.moe_ep_size, position.moe_dp * config.moe_tp_size() + position.moe_tp);
  groups.moe_tp_ =
      split("moe_tp", config.moe_tp_size(), position.moe_dp * config.moe_ep_size + position.moe_ep);
  groups.moe_dp_ =
      split("moe_dp", config.moe_dp_size, position.moe_ep * config.moe_tp_size() + position.moe_tp);
  return groups;
}

}  // namespace switchyard
