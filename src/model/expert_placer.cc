#include "model/expert_placer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/moe/eplb/placement_files.h"

namespace switchyard {
namespace {

moe::ExpertLocation StartLocation(const ModelConfig& config, const ModelOptions& options) {
  moe::ExpertLocationSizes sizes;
  sizes.num_layers = config.num_moe_layers();
  sizes.num_logical = config.num_experts;
  sizes.num_physical = config.num_experts + options.num_redundant_experts;
  if (options.moe.ep != nullptr) {
    const ProcessGroup& ranks = options.moe.ep->groups().moe_ep();
    sizes.ep_size = ranks.size();
    sizes.num_nodes = moe::NumRegularNodes(ranks);
  }
  const size_t rest = sizes.num_physical % sizes.ep_size;
  if (rest != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} experts of a layer{} cannot be divided evenly among {} ranks; take "
                            "another number of ranks or --moe-ep-size, or copies "
                            "(--ep-num-redundant-experts {})",
                            config.num_experts,
                            options.num_redundant_experts == 0
                                ? ""
                                : fmt::format(" and {} copies", options.num_redundant_experts),
                            sizes.ep_size, options.num_redundant_experts + sizes.ep_size - rest));
  }
  const moe::EplbPolicy policy = options.rebalance ? options.rebalance->policy : moe::EplbPolicy();
  return moe::InitialLocation(options.init_expert_location, sizes, policy);
}

}  // namespace

ExpertPlacer::ExpertPlacer(const ModelConfig& config, const ModelOptions& options)
    : ep_(options.moe.ep),
      options_(options),
      algorithm_(options.dispatch
                     ? moe::ResolveDispatchAlgorithm(*options.dispatch, options.moe.a2a)
                     : moe::DefaultDispatchAlgorithm(options.moe.a2a)),
      has_copies_(options.num_redundant_experts != 0 || options.rebalance ||
                  options.init_expert_location != "trivial") {
  if (config.num_moe_layers() != 0) location_ = StartLocation(config, options);
}

ExpertShare ExpertPlacer::Share() const {
  ExpertShare share;
  if (!location_ || (ep_ == nullptr && !has_copies_)) return share;
  const size_t ranks = location_->sizes().ep_size;
  const size_t rank = ep_ == nullptr ? 0 : ep_->ep_rank();
  const size_t local = location_->sizes().num_physical / ranks;
  for (size_t layer = 0; layer < location_->sizes().num_layers; ++layer) {
    const auto experts = location_->PhysicalToLogical(layer).subspan(rank * local, local);
    share.experts.emplace_back(experts.begin(), experts.end());
  }
  if (ep_ == nullptr) return share;
  share.tp_part = ep_->moe_tp_rank();
  share.tp_parts = ep_->moe_tp_size();
  return share;
}

void ExpertPlacer::Attach(std::vector<moe::ExpertWeights*> layers) {
  if (!options_.rebalance || ep_ == nullptr || !location_) return;
  moe::RebalancerOptions rebalance = *options_.rebalance;
  rebalance.tokens_are_replicated = ep_->options().tokens_are_replicated;
  rebalance.dispatch = algorithm_;
  rebalancer_ = std::make_unique<moe::ExpertRebalancer>(rebalance, *location_,
                                                        ep_->groups().moe_ep(), layers);
}

// From the next pass on copies on other ranks serve; an expert without one adds nothing.
void ExpertPlacer::LeaveLostRanks() {
  if (ep_ == nullptr || !location_) return;
  const std::span<const int32_t> active = ep_->active_ranks();
  const auto lost = static_cast<size_t>(std::count(active.begin(), active.end(), 0));
  if (lost == num_lost_) return;
  num_lost_ = lost;
  if (rebalancer_ != nullptr) {
    // Its exchanges need all ranks; experts stay where they are now.
    location_ = moe::ExpertLocation::FromMap(location_->sizes(), rebalancer_->MapOfAllLayers());
    rebalancer_.reset();
  }
  location_ = location_->WithoutRanks(active);
}

void ExpertPlacer::BeginPass() {
  LeaveLostRanks();
  if (rebalancer_ != nullptr) rebalancer_->BeginStep();
}

void ExpertPlacer::EndPass() {
  if (rebalancer_ == nullptr) return;
  const size_t before = rebalancer_->stats().layers_moved;
  rebalancer_->EndStep();
  const moe::RebalanceStats& stats = rebalancer_->stats();
  if (stats.layers_moved == before) return;
  Log(LogLevel::kInfo, "experts moved",
      {{"layers", std::to_string(stats.layers_moved - before)},
       {"received_bytes", std::to_string(stats.bytes_received)},
       {"utilization_before", fmt::format("{:.3f}", stats.last_utilization)}});
}

void ExpertPlacer::AbortPass() noexcept {
  if (rebalancer_ == nullptr) return;
  try {
    rebalancer_->AbortStep();
  } catch (const Error&) {  // the pass had not begun, or was over
  }
}

void ExpertPlacer::Fill(size_t layer, moe::ExpertPlacement& placement, moe::TopKInputs& inputs) {
  if (!has_copies_) return;
  const size_t rank = ep_ == nullptr ? 0 : ep_->ep_rank();
  placement = rebalancer_ != nullptr ? rebalancer_->Placement(layer)
                                     : location_->Placement(layer, rank, algorithm_);
  inputs.placement = &placement;
  if (rebalancer_ == nullptr) return;
  observer_.to = &rebalancer_->observer();
  observer_.layer = layer;
  inputs.observer = &observer_;
}

std::span<const int32_t> ExpertPlacer::PhysicalToLogical(size_t layer) const {
  return rebalancer_ != nullptr ? rebalancer_->PhysicalToLogical(layer)
                                : location_->PhysicalToLogical(layer);
}

}  // namespace switchyard
