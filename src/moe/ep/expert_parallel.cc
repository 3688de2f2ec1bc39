#include "switchyard/moe/ep/expert_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "moe/ep/node_map.h"
#include "moe/ep/row_channel.h"
#include "moe/ep/token_gather.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

// The completion tag of the low-latency protocols is 1024 (contract 3.5).
constexpr size_t kMostLowLatencyTokens = 1024;

void RequireRange(std::string_view setting, size_t value, size_t low, size_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} must be {} to {}, found {}", setting, low, high, value));
}

}  // namespace

DeepepMode ParseDeepepMode(std::string_view name) {
  if (name == "auto") return DeepepMode::kAuto;
  if (name == "normal") return DeepepMode::kNormal;
  if (name == "low_latency") return DeepepMode::kLowLatency;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("deepep-mode is auto, normal or low_latency, found \"{}\"", name));
}

Hierarchy ParseHierarchy(std::string_view name) {
  if (name == "auto") return Hierarchy::kAuto;
  if (name == "on") return Hierarchy::kOn;
  if (name == "off") return Hierarchy::kOff;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("ep-hierarchical is auto, on or off, found \"{}\"", name));
}

ExchangeStats& ExchangeStats::operator+=(const ExchangeStats& other) {
  rows_in_node += other.rows_in_node;
  rows_between_nodes += other.rows_between_nodes;
  results_in_node += other.results_in_node;
  results_between_nodes += other.results_between_nodes;
  return *this;
}

ExpertParallel::ExpertParallel(ParallelGroups& groups, const ExpertParallelOptions& options)
    : groups_(groups), options_(options), active_ranks_(groups.moe_ep().size(), 1) {
  RequireRange("num-max-dispatch-tokens-per-rank", options.num_max_dispatch_tokens_per_rank, 1,
               kMostLowLatencyTokens);
  RequireRange("max_tokens_per_rank", options.max_tokens_per_rank, 1, size_t{1} << 24);
  RequireRange("ep-timeout-ms", static_cast<size_t>(options.timeout.count()), 1, 86'400'000);
  if (moe_tp_size() == 1) return;
  const MoePosition& place = groups.position();
  block_ = groups.tp().Split(place.moe_dp, groups.tp().rank(), "moe_block",
                             Deadline::After(options.timeout, "make groups"));
}

ExpertParallel::~ExpertParallel() = default;

ProcessGroup& ExpertParallel::block() const {
  return block_ != nullptr ? *block_ : groups_.moe_ep();
}

void ExpertParallel::BeginPass(ForwardPhase phase) {
  phase_ = phase;
  ++pass_;
}

RowChannel& ExpertParallel::Channel(ProcessGroup& group, const RowChannelOptions& options) {
  for (const auto& channel : channels_) {
    if (&channel->group() == &group && channel->options() == options) return *channel;
  }
  ProcessGroup* net = NetOf(group, options.batch);
  channels_.push_back(std::make_unique<RowChannel>(*this, group, net, options));
  return *channels_.back();
}

ProcessGroup& ExpertParallel::fuse_ep() {
  if (fuse_ep_ == nullptr) {
    fuse_ep_ =
        groups_.moe_ep().Duplicate("fuse_ep", Deadline::After(options_.timeout, "make groups"));
  }
  return *fuse_ep_;
}

// Collectives of one communicator have to be in one order on all ranks; those of two batches need
// not be.
ProcessGroup* ExpertParallel::NetOf(ProcessGroup& group, size_t batch) {
  for (const Net& net : nets_) {
    if (net.of == &group && net.batch == batch) return net.made ? net.made.get() : net.of;
  }
  const NodeMap nodes(group);
  if (nodes.size() == 1) return nullptr;
  Net net{&group, batch, nullptr};
  const Deadline deadline = Deadline::After(options_.timeout, "make groups");
  const std::string name = fmt::format("{} batch {}", group.name(), batch);
  if (nodes.UsesRails(options_.hierarchy)) {
    net.made = group.Split(nodes.index[group.rank()], nodes.here, name + " rail", deadline);
  } else if (batch != 0) {
    net.made = group.Duplicate(name, deadline);
  }
  nets_.push_back(std::move(net));
  return nets_.back().made ? nets_.back().made.get() : &group;
}

ExchangeStats ExpertParallel::stats() const {
  ExchangeStats sum;
  for (const auto& channel : channels_) sum += channel->stats();
  return sum;
}

ExpertParallel::Slice ExpertParallel::SliceOf(size_t num_tokens, size_t tp_rank) const {
  const size_t ranks = groups_.tp().size();
  const size_t first = num_tokens * tp_rank / ranks;
  return {first, num_tokens * (tp_rank + 1) / ranks - first};
}

Rows ExpertParallel::GatherSlices(ExecContext& context, ConstRows mine, size_t num_tokens,
                                  size_t layer_id) {
  const size_t ranks = groups_.tp().size();
  const size_t most = (num_tokens + ranks - 1) / ranks;
  if (gather_ == nullptr || gather_->max_rows() < most) {
    const size_t usual = (options_.max_tokens_per_rank + ranks - 1) / ranks;
    gather_.reset();
    gather_ = std::make_unique<TokenGather>(*this, std::max(most, usual), mine.cols);
  }
  return gather_->Run(context, mine, num_tokens, layer_id);
}

void ExpertParallel::SetActive(size_t ep_rank, bool active) {
  active_ranks_.at(ep_rank) = active ? 1 : 0;
}

void ExpertParallel::SetOnRankLost(std::function<void(size_t, std::string_view)> callback) {
  on_rank_lost_ = std::move(callback);
}

void ExpertParallel::MarkLost(size_t ep_rank, std::string_view why) {
  if (active_ranks_.at(ep_rank) == 0) return;
  active_ranks_[ep_rank] = 0;
  if (on_rank_lost_) on_rank_lost_(ep_rank, why);
}

}  // namespace switchyard::moe
