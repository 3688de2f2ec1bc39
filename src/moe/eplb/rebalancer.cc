#include "switchyard/moe/eplb/rebalancer.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/core/log.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Fail(ErrorCode code, const std::string& message) {
  throw Error(code, "expert rebalancing: " + message);
}

int64_t BufferSize(const RebalancerOptions& options) {
  return options.recorder_buffer_size != 0 ? options.recorder_buffer_size
                                           : static_cast<int64_t>(options.num_iterations);
}

RecorderOptions RecorderOf(const RebalancerOptions& options, const ExpertLocationSizes& sizes,
                           size_t ep_rank) {
  return {options.recorder_mode, sizes.num_layers, sizes.num_logical,  sizes.num_physical,
          sizes.ep_size,         ep_rank,          BufferSize(options)};
}

std::vector<int32_t> MapOf(const ExpertLocation& location) {
  std::vector<int32_t> map;
  for (size_t layer = 0; layer < location.sizes().num_layers; ++layer) {
    const auto row = location.PhysicalToLogical(layer);
    map.insert(map.end(), row.begin(), row.end());
  }
  return map;
}

EplbRequest RequestOf(const RebalancerOptions& options, const ExpertLocationSizes& sizes) {
  EplbRequest request;
  request.policy = options.policy;
  request.num_layers = sizes.num_layers;
  request.num_logical = sizes.num_logical;
  request.num_physical = sizes.num_physical;
  request.num_devices = sizes.ep_size;
  request.num_nodes = sizes.num_nodes;
  request.num_groups = options.num_groups;
  return request;
}

// Options that could only fail at the first look are tried now, on one layer without load.
void CheckOptions(const RebalancerOptions& options, const ExpertLocationSizes& sizes,
                  size_t num_ranks, size_t num_layers) {
  const auto invalid = [](const std::string& text) { Fail(ErrorCode::kInvalidArgument, text); };
  if (options.num_iterations == 0 ||
      BufferSize(options) > static_cast<int64_t>(options.num_iterations)) {
    invalid(
        fmt::format("eplb-rebalance-num-iterations must be at least 1 and the recorder's "
                    "buffer, found {} and {}",
                    options.num_iterations, BufferSize(options)));
  }
  if (!(options.min_utilization >= 0 && options.min_utilization <= 1)) {
    invalid(fmt::format("eplb-min-rebalancing-utilization-threshold must be 0 to 1, found {}",
                        options.min_utilization));
  }
  if (options.dispatch == DispatchAlgorithm::kNone)
    invalid("experts that move need a dispatch algorithm, found none");
  if (sizes.ep_size != num_ranks || sizes.num_layers != num_layers) {
    invalid(fmt::format("a location of {} layers on {} ranks was given, there are {} and {}",
                        sizes.num_layers, sizes.ep_size, num_layers, num_ranks));
  }
  EplbRequest request = RequestOf(options, sizes);
  request.num_layers = 1;
  const std::vector<float> no_load(sizes.num_logical, 0.0f);
  request.tokens_per_expert = no_load;
  PlanExperts(request);
}

uint64_t HashOf(std::span<const int32_t> values) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a value at a time
  for (int32_t value : values) hash = (hash ^ static_cast<uint32_t>(value)) * 0x100000001b3;
  return hash;
}

}  // namespace

RebalancerOptions RebalancerOptionsOf(const Settings& settings) {
  RebalancerOptions options;
  options.num_iterations = settings.GetCount("eplb-rebalance-num-iterations");
  options.layers_per_chunk = settings.GetCount("eplb-rebalance-layers-per-chunk", 0);
  options.min_utilization = settings.GetFraction("eplb-min-rebalancing-utilization-threshold");
  options.policy = ParseEplbAlgorithm(settings.Get("eplb-algorithm"));
  options.recorder_mode = ParseRecorderMode(settings.Get("expert-distribution-recorder-mode"));
  constexpr std::string_view kBuffer = "expert-distribution-recorder-buffer-size";
  options.recorder_buffer_size =
      settings.Get(kBuffer) == "-1" ? -1 : static_cast<int64_t>(settings.GetCount(kBuffer, 0));
  return options;
}

size_t NumRegularNodes(const ProcessGroup& group) {
  std::vector<size_t> sizes;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    if (rank == 0 || group.NodeOf(rank) != group.NodeOf(rank - 1)) sizes.push_back(0);
    ++sizes.back();
  }
  std::vector<size_t> nodes;
  for (size_t rank = 0; rank < group.size(); ++rank) nodes.push_back(group.NodeOf(rank));
  std::ranges::sort(nodes);
  const auto repeated = std::ranges::unique(nodes);
  nodes.erase(repeated.begin(), repeated.end());
  const bool is_even = std::ranges::all_of(sizes, [&](size_t n) { return n == sizes[0]; });
  return is_even && nodes.size() == sizes.size() ? nodes.size() : 1;
}

ExpertRebalancer::ExpertRebalancer(const RebalancerOptions& options, const ExpertLocation& initial,
                                   ProcessGroup& group, std::span<ExpertWeights* const> layers,
                                   OnLayer on_layer, LoadExpert load_expert)
    : options_(options),
      sizes_(initial.sizes()),
      ep_rank_(group.rank()),
      on_layer_(std::move(on_layer)),
      load_expert_(std::move(load_expert)),
      recorder_(RecorderOf(options, sizes_, sizes_.ep_size == group.size() ? ep_rank_ : 0),
                MapOf(initial)) {
  const Deadline limit = Limit("expert rebalancer");
  group_ = group.Duplicate("eplb", limit);
  RunTogether(*group_, limit, [&] {
    CheckOptions(options, sizes_, group.size(), layers.size());
    const auto where = std::make_shared<const ExpertLocation>(initial);
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      movers_.emplace_back(*layers[layer], sizes_.num_physical / sizes_.ep_size, layer,
                           options.mover);
      where_.push_back(where);
      const auto map = where->PhysicalToLogical(layer);
      held_.emplace_back(map.begin(), map.end());
    }
  });
  CheckLayouts();
  for (size_t rank = 0; rank < group.size(); ++rank) {
    ep_ranks_.push_back(rank);
    node_of_rank_.push_back(group.NodeOf(rank));
  }
  recorder_.Start();
}

// Experts are sent as blocks, which all ranks have to read alike.
void ExpertRebalancer::CheckLayouts() {
  std::vector<uint64_t> mine;
  for (const ExpertMover& mover : movers_) mine.push_back(mover.fingerprint());
  std::vector<uint64_t> all(mine.size() * group_->size());
  group_->AllGather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                    Limit("expert layouts"));
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] == all[i % mine.size()]) continue;
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("layer {}: the experts of rank {} are laid out otherwise than those of rank "
                     "0",
                     i % mine.size(), i / mine.size()));
  }
}

void ExpertRebalancer::RequireNoStep() const {
  if (in_step_) Fail(ErrorCode::kFailedPrecondition, "experts cannot move within a step");
}

void ExpertRebalancer::BeginStep() {
  recorder_.BeginPass(next_pass_++);
  in_step_ = true;
}

void ExpertRebalancer::AbortStep() {
  recorder_.AbortPass();
  in_step_ = false;
}

void ExpertRebalancer::EndStep() {
  recorder_.EndPass();
  in_step_ = false;
  if (is_migrating()) {
    TryMigrate(options_.layers_per_chunk);
  } else if (++passes_since_ >= options_.num_iterations) {
    passes_since_ = 0;
    LookAtLoads();
  }
}

void ExpertRebalancer::LookAtLoads() {
  const Loads loads = CollectLoads();
  ++stats_.num_looks;
  stats_.last_utilization = loads.utilization;
  recorder_.Clear();
  if (loads.num_passes == 0 ||
      (options_.min_utilization < 1 && loads.utilization > options_.min_utilization)) {
    ++stats_.num_skipped;
    return;
  }
  PlanTarget(loads);
  // In chunks, the first of them waits for the next step: this one has paid for the plan.
  if (options_.layers_per_chunk == 0) TryMigrate(sizes_.num_layers);
}

void ExpertRebalancer::RebalanceNow() {
  RequireNoStep();
  const Loads loads = CollectLoads();
  ++stats_.num_looks;
  stats_.last_utilization = loads.utilization;
  recorder_.Clear();
  PlanTarget(loads);
  TryMigrate(sizes_.num_layers);
}

std::vector<LostExpert> ExpertRebalancer::Rebalance(std::span<const uint8_t> active_ranks,
                                                    std::unique_ptr<ProcessGroup> alive) {
  RequireNoStep();
  std::vector<size_t> members;
  for (size_t rank = 0; rank < active_ranks.size(); ++rank)
    if (active_ranks[rank] != 0 || !alive) members.push_back(rank);
  if (active_ranks.size() != sizes_.ep_size ||
      (alive && (alive->size() != members.size() || !active_ranks[ep_rank_] ||
                 members[alive->rank()] != ep_rank_))) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("a mask of {} ranks and a group of {} were given for {} ranks, {} of them "
                     "active; rank {} is one of the group",
                     active_ranks.size(), alive ? alive->size() : group_->size(), sizes_.ep_size,
                     members.size(), ep_rank_));
  }
  active_.assign(active_ranks.begin(), active_ranks.end());
  alive_ = std::move(alive);
  ep_ranks_ = std::move(members);
  options_.policy.algorithm = EplbAlgorithm::kElasticityAware;
  PlanTarget(CollectLoads());
  recorder_.Clear();
  MigrateLayers(sizes_.num_layers);
  return lost_;
}

bool ExpertRebalancer::AddsCounts() const {
  const bool is_counted_once =
      !options_.tokens_are_replicated || options_.recorder_mode == RecorderMode::kStatApprox;
  if (!IsActive(ep_rank_)) return false;
  return is_counted_once || ep_rank_ == FirstActive();
}

size_t ExpertRebalancer::FirstActive() const {
  size_t rank = 0;
  while (!IsActive(rank)) ++rank;
  return rank;
}

// Every rank's counts, the same on all of them. Per pass only the tokens of each rank are
// exchanged, unless the algorithm looks at every pass.
ExpertRebalancer::Loads ExpertRebalancer::CollectLoads() {
  Loads loads;
  loads.num_passes = recorder_.num_passes();
  const auto passes =
      AllGatherValue(group(), uint64_t{loads.num_passes}, Limit("number of recorded passes"));
  for (size_t g = 0; g < passes.size(); ++g) {
    if (passes[g] == passes[0]) continue;
    Fail(ErrorCode::kFailedPrecondition,
         fmt::format("rank {} has recorded {} passes, rank {} {}; BeginStep and EndStep are for "
                     "every rank",
                     ep_ranks_[0], passes[0], ep_ranks_[g], passes[g]));
  }
  const size_t num_rows = sizes_.num_layers * sizes_.num_logical;
  std::vector<float> rank_tokens(loads.num_passes * sizes_.num_layers * sizes_.ep_size, 0.0f);
  const bool by_step = options_.policy.algorithm == EplbAlgorithm::kDeepseekVec;
  loads.num_steps = by_step ? std::max<size_t>(loads.num_passes, 1) : 1;
  loads.tokens_per_expert.assign(loads.num_steps * num_rows, 0.0f);
  if (AddsCounts()) {
    CountRankTokens(rank_tokens);
    const std::vector<float> mine = recorder_.Dump().tokens_per_expert;
    for (size_t i = 0; i < mine.size(); ++i)
      loads.tokens_per_expert[by_step ? i : i % num_rows] += mine[i];
  }
  group().AllReduceSum(rank_tokens, Limit("tokens of each rank"));
  group().AllReduceSum(loads.tokens_per_expert, Limit("tokens of each expert"));
  loads.utilization = MeanUtilization(rank_tokens, loads.num_passes);
  return loads;
}

// Shapes: rank_tokens [S, L, R].
void ExpertRebalancer::CountRankTokens(std::span<float> rank_tokens) const {
  const size_t per_rank = sizes_.num_physical / sizes_.ep_size;
  const size_t num_slots = sizes_.num_layers * sizes_.num_physical;
  for (size_t step = 0; step < recorder_.num_passes(); ++step) {
    const std::vector<int32_t>& counts = recorder_.Pass(step).physical_counts;
    for (size_t i = 0; i < num_slots; ++i)
      rank_tokens[(step * num_slots + i) / per_rank] += static_cast<float>(counts[i]);
  }
}

// Over passes and layers; lost ranks do not count as idle.
double ExpertRebalancer::MeanUtilization(std::span<const float> rank_tokens,
                                         size_t num_passes) const {
  const size_t figures = num_passes * sizes_.num_layers;
  if (figures == 0) return 1;
  double sum = 0;
  std::vector<double> tokens;
  for (size_t i = 0; i < figures; ++i) {
    tokens.clear();
    for (size_t rank = 0; rank < sizes_.ep_size; ++rank)
      if (IsActive(rank)) tokens.push_back(double{rank_tokens[i * sizes_.ep_size + rank]});
    sum += Utilization(tokens);
  }
  return sum / static_cast<double>(figures);
}

// All ranks plan from the same numbers; a difference would send experts astray, so they compare.
void ExpertRebalancer::PlanTarget(const Loads& loads) {
  EplbRequest request = RequestOf(options_, sizes_);
  request.num_steps = loads.num_steps;
  request.tokens_per_expert = loads.tokens_per_expert;
  if (options_.policy.algorithm == EplbAlgorithm::kElasticityAware)
    request.active_devices = active_;
  const ExpertPlan plan = PlanExperts(request);
  const auto hashes =
      AllGatherValue(group(), HashOf(plan.physical_to_logical), Limit("expert plan"));
  for (size_t g = 0; g < hashes.size(); ++g) {
    if (hashes[g] != hashes[0])
      Fail(ErrorCode::kInternal, fmt::format("ranks {} and {} have derived different placements",
                                             ep_ranks_[0], ep_ranks_[g]));
  }
  target_ = std::make_shared<const ExpertLocation>(
      ExpertLocation::FromPlan(plan, sizes_.ep_size, sizes_.num_nodes));
  next_layer_ = 0;
  lost_.clear();
}

void ExpertRebalancer::TryMigrate(size_t num_layers) {
  try {
    MigrateLayers(num_layers);
  } catch (const Error& error) {
    // Everything else was agreed on by all ranks, and the layer is as it was.
    if (error.code() == ErrorCode::kUnavailable) throw;
    ++stats_.num_failed;
    Log(LogLevel::kWarning, "experts were not rebalanced; the old placement stays in force",
        {{"layer", std::to_string(next_layer_)}, {"reason", error.message()}});
    EndMigration();
  }
}

void ExpertRebalancer::MigrateLayers(size_t count) {
  const size_t end = std::min(next_layer_ + count, sizes_.num_layers);
  try {
    for (; next_layer_ < end; ++next_layer_) MigrateLayer(next_layer_);
  } catch (...) {
    recorder_.SetPlacement(MapOfAllLayers());
    throw;
  }
  recorder_.SetPlacement(MapOfAllLayers());  // counts of the old one would be misread
  if (next_layer_ == sizes_.num_layers) EndMigration();
}

void ExpertRebalancer::MigrateLayer(size_t layer) {
  const auto new_map = target_->PhysicalToLogical(layer);
  const MigrationPlan plan = PlanMigration(held_[layer], new_map, node_of_rank_, active_);
  ExpertMover& mover = movers_[layer];
  mover.Prepare(plan, group(), ep_ranks_, load_expert_, Limit("moving experts"));
  mover.Switch();
  // Views of the old location stay valid until the callback has replaced them.
  const auto old = std::exchange(where_[layer], target_);
  UpdateHeld(layer, plan);
  ++stats_.layers_moved;
  stats_.experts_received += mover.num_received();
  stats_.bytes_received += mover.num_received() * mover.expert_bytes();
  NoteLost(layer, plan.lost_experts);
  if (on_layer_) on_layer_(layer);
}

// Zeros in place of a lost expert are nothing to send on.
void ExpertRebalancer::UpdateHeld(size_t layer, const MigrationPlan& plan) {
  for (size_t slot = 0; slot < plan.moves.size(); ++slot) {
    if (plan.moves[slot].source == SlotSource::kIdle) continue;
    const int32_t expert = plan.physical_to_logical[slot];
    const bool is_lost = std::ranges::binary_search(plan.lost_experts, expert);
    held_[layer][slot] = is_lost && !load_expert_ ? -1 : expert;
  }
}

void ExpertRebalancer::NoteLost(size_t layer, std::span<const int32_t> experts) {
  if (experts.empty()) return;
  for (int32_t expert : experts) lost_.push_back({layer, static_cast<size_t>(expert)});
  Log(LogLevel::kWarning,
      load_expert_ ? "experts were on lost ranks only and have been loaded again"
                   : "experts were on lost ranks only; they add nothing from now on",
      {{"layer", std::to_string(layer)}, {"experts", fmt::format("{}", fmt::join(experts, " "))}});
}

void ExpertRebalancer::EndMigration() {
  target_.reset();
  next_layer_ = sizes_.num_layers;
  passes_since_ = 0;
}

std::vector<int32_t> ExpertRebalancer::MapOfAllLayers() const {
  std::vector<int32_t> map;
  for (size_t layer = 0; layer < where_.size(); ++layer) {
    const auto row = PhysicalToLogical(layer);
    map.insert(map.end(), row.begin(), row.end());
  }
  return map;
}

ExpertPlacement ExpertRebalancer::Placement(size_t layer) const {
  return where_[layer]->Placement(layer, ep_rank_, options_.dispatch);
}

std::span<const int32_t> ExpertRebalancer::PhysicalToLogical(size_t layer) const {
  return where_[layer]->PhysicalToLogical(layer);
}

size_t ExpertRebalancer::owned_bytes() const {
  size_t bytes = 0;
  for (const ExpertMover& mover : movers_) bytes += mover.owned_bytes();
  return bytes;
}

}  // namespace switchyard::moe
