#include "replay/layer_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "replay/gather.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/eplb/location.h"
#include "switchyard/parallel/run_ranks.h"

namespace switchyard::replay {
namespace {

// The ascend runner's own dispatcher has all experts on every rank, and splits them.
bool SplitsExperts(const KindInput& input, const moe::MoeLayerConfig& config) {
  std::string_view runner = input.options.runner;
  if (runner == "auto") runner = input.registry.FindScheme(config.scheme_w13).runners.front();
  return runner == "ascend" && input.options.a2a == "none";
}

// One rank's part of a pass.
class RankPass {
 public:
  RankPass(const KindInput& input, const LayerPass& pass, ProcessGroup& world)
      : input_(input),
        pass_(pass),
        world_(world),
        splits_(SplitsExperts(input, pass.config)),
        location_(Location()),
        groups_(MakeGroups(world, Parallel(), "replay", Soon("make groups"))),
        ep_(groups_, EpOptions()) {}

  // Why this number of ranks does not give the result of one; empty if it does.
  std::string Obstacle() const {
    const size_t ranks = world_.size();
    if (ranks == 1) return "";
    const moe::SchemeEntry& scheme = input_.registry.FindScheme(pass_.config.scheme_w13);
    const ActQuantKind act =
        input_.options.activation_quant ? scheme.act_quant : ActQuantKind::kNone;
    if (act == ActQuantKind::kFp8Tensor) {
      return fmt::format(
          "scheme {} has one activation scale for all rows of a pass, and none of the {} ranks "
          "sees all rows",
          scheme.name, ranks);
    }
    return splits_ ? SplitObstacle(scheme, act) : "";
  }

  // Shapes: returns the rows of all tokens, on every rank.
  std::vector<float> Run() {
    moe::MoeLayerConfig config = pass_.config;
    config.num_physical_experts = location_.sizes().num_physical;
    moe::MoeLayerOptions options = LayerOptionsOf(input_.options);
    if (config.runner.no_combine && options.a2a == "none") return SumOfRanks(config, options);
    options.ep = &ep_;
    moe::MoeLayer layer(input_.registry, config, options, MyExperts());
    // Ranks that are lost are no part of a case: no wait is endless.
    ep_.SetWarm();
    std::string lost;
    ep_.SetOnRankLost([&](size_t, std::string_view why) { lost = why; });
    ep_.BeginPass(ep_.options().deepep_mode == moe::DeepepMode::kLowLatency
                      ? moe::ForwardPhase::kDecode
                      : moe::ForwardPhase::kPrefill);
    const Rows rows = Forward(layer, MyTokens());
    if (!lost.empty()) throw Error(ErrorCode::kUnavailable, lost);
    return Merge(GatherVectors(world_, Copy(rows), Soon("gather results")));
  }

 private:
  Deadline Soon(std::string_view stage) const {
    return Deadline::After(input_.options.ep.timeout, stage);
  }

  std::string SplitObstacle(const moe::SchemeEntry& scheme, ActQuantKind act) const {
    const size_t columns = pass_.weights.intermediate_size;
    if (std::find(scheme.runners.begin(), scheme.runners.end(), "ascend") == scheme.runners.end())
      return fmt::format("runner ascend does not compute scheme {}", scheme.name);
    std::string why;
    if (columns % world_.size() != 0) {
      why = fmt::format("intermediate_size {} is no multiple of {} ranks", columns, world_.size());
    } else if (act == ActQuantKind::kInt8Token || act == ActQuantKind::kInt4Token ||
               act == ActQuantKind::kFp8Token) {
      why = fmt::format(
          "scheme {} has one scale for an activated row, of which each rank has a "
          "part",
          scheme.name);
    }
    return why.empty()
               ? ""
               : "runner ascend with backend none splits every expert over the ranks: " + why;
  }

  ParallelConfig Parallel() const {
    ParallelConfig config;
    config.tp_size = world_.size();
    config.moe_ep_size = splits_ ? 1 : world_.size();
    config.dp_attention = !input_.options.ep.tokens_are_replicated;
    return config;
  }

  moe::ExpertParallelOptions EpOptions() const {
    moe::ExpertParallelOptions options = input_.options.ep;
    const size_t share = (pass_.hidden.rows + world_.size() - 1) / world_.size();
    options.max_tokens_per_rank = std::max<size_t>(share, 1);
    constexpr size_t kMostLowLatencyTokens = 1024;
    options.num_max_dispatch_tokens_per_rank =
        std::min(options.max_tokens_per_rank, kMostLowLatencyTokens);
    return options;
  }

  // Expert p mod E in place p; as few copies as make the ranks even.
  moe::ExpertLocation Location() const {
    moe::ExpertLocationSizes sizes;
    sizes.num_layers = 1;
    sizes.num_logical = pass_.config.topk.num_experts;
    sizes.ep_size = splits_ ? 1 : world_.size();
    sizes.num_physical = (sizes.num_logical + sizes.ep_size - 1) / sizes.ep_size * sizes.ep_size;
    return moe::ExpertLocation::Trivial(sizes);
  }

  // Where experts are split, a part may be impossible on one rank and possible on the next.
  moe::ExpertWeights MyExperts() const {
    moe::ExpertWeights experts;
    RunTogether(world_, Soon("take experts"), [&] {
      const size_t local = location_.sizes().num_physical / ep_.ep_size();
      const auto mine = location_.PhysicalToLogical(0).subspan(ep_.ep_rank() * local, local);
      experts = moe::SplitExperts(moe::PickExperts(pass_.weights, mine), ep_.moe_tp_rank(),
                                  ep_.moe_tp_size());
    });
    return experts;
  }

  // The replica that takes a token's slot: as a router chooses it if nobody says how.
  int32_t PlaceOf(int32_t expert, size_t token) const {
    if (expert == -1) return -1;
    const auto e = static_cast<size_t>(expert);
    if (expert < 0 || e >= location_.sizes().num_logical) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("token {} names expert {}; ids are -1 to {}", token, expert,
                              location_.sizes().num_logical - 1));
    }
    if (moe::DefaultDispatchAlgorithm(input_.options.a2a) == moe::DispatchAlgorithm::kStatic)
      return location_.RankDispatch(0, ep_.ep_rank())[e];
    const auto replicas = static_cast<size_t>(location_.NumValid(0)[e]);
    return location_.LogicalToAllPhysical(0)[e * location_.max_replicas() + token % replicas];
  }

  // Rows that nobody weights and sums are not sent either: each rank has those of its experts, and
  // zeros for the others'.
  std::vector<float> SumOfRanks(moe::MoeLayerConfig& config, const moe::MoeLayerOptions& options) {
    const size_t experts = config.num_physical_experts, local = experts / ep_.ep_size();
    config.expert_mask.assign(experts, 0);
    std::fill_n(config.expert_mask.begin() + static_cast<std::ptrdiff_t>(ep_.ep_rank() * local),
                local, 1);
    moe::MoeLayer layer(input_.registry, config, options, MyExperts());
    std::vector<float> rows = Copy(Forward(layer, {0, pass_.hidden.rows}));
    world_.AllReduceSum(rows, Soon("add rows"));
    return rows;
  }

  static std::vector<float> Copy(ConstRows rows) {
    std::vector<float> values;
    for (size_t t = 0; t < rows.rows; ++t)
      values.insert(values.end(), rows.Row(t), rows.Row(t) + rows.cols);
    return values;
  }

  moe::ExpertParallel::Slice MyTokens() const {
    if (ep_.options().tokens_are_replicated) return {0, pass_.hidden.rows};
    return ep_.MySlice(pass_.hidden.rows);
  }

  // All ranks look at the ids of all tokens, so that they all refuse a bad one.
  Rows Forward(moe::MoeLayer& layer, const moe::ExpertParallel::Slice& slice) const {
    const size_t top_k = pass_.topk.top_k;
    std::vector<int32_t> ids;
    for (size_t slot = 0; slot < pass_.topk.ids.size(); ++slot)
      ids.push_back(PlaceOf(pass_.topk.ids[slot], slot / top_k));
    const size_t first = slice.first * top_k, count = slice.count * top_k;
    moe::TopKOutput topk;
    topk.num_tokens = slice.count;
    topk.top_k = top_k;
    topk.ids = std::span<const int32_t>(ids).subspan(first, count);
    topk.weights = pass_.topk.weights.subspan(first, count);
    return layer.ForwardRouted(input_.context, pass_.hidden.Slice(slice.first, slice.count), topk);
  }

  std::vector<float> Merge(const std::vector<std::vector<float>>& ranks) const {
    if (ep_.options().tokens_are_replicated) {
      for (size_t rank = 1; rank < ranks.size(); ++rank) RequireEqual(ranks[0], ranks[rank], rank);
      return ranks[0];
    }
    std::vector<float> all;
    for (const std::vector<float>& rows : ranks) all.insert(all.end(), rows.begin(), rows.end());
    return all;
  }

  // All ranks have the same tokens, so they must have the same bits.
  static void RequireEqual(const std::vector<float>& first, const std::vector<float>& other,
                           size_t rank) {
    if (first.size() == other.size() &&
        (first.empty() ||
         std::memcmp(first.data(), other.data(), first.size() * sizeof(float)) == 0))
      return;
    throw Error(ErrorCode::kInternal,
                fmt::format("rank {} has another result than rank 0 of the same tokens", rank));
  }

  const KindInput& input_;
  const LayerPass& pass_;
  ProcessGroup& world_;
  bool splits_;
  moe::ExpertLocation location_;
  ParallelGroups groups_;
  moe::ExpertParallel ep_;
};

std::vector<float> RunOnRank(const KindInput& input, const LayerPass& pass, ProcessGroup& world,
                             std::string& skipped) {
  try {
    RankPass rank(input, pass, world);
    skipped = rank.Obstacle();
    return skipped.empty() ? rank.Run() : std::vector<float>();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    skipped = error.message();
    return {};
  }
}

}  // namespace

moe::MoeLayerOptions LayerOptionsOf(const ReplayOptions& options) {
  moe::MoeLayerOptions layer;
  layer.runner = options.runner;
  layer.a2a = options.a2a;
  layer.act_dtype = options.act_dtype;
  layer.activation_quant = options.activation_quant;
  layer.dispatch_dtype = options.dispatch_dtype;
  layer.combine_dtype = options.combine_dtype;
  return layer;
}

bool GoesOverRanks(const ReplayOptions& options) {
  return options.a2a != "none" || (options.world != nullptr && options.world->size() > 1);
}

std::vector<float> RunOverRanks(const KindInput& input, const LayerPass& pass,
                                std::string& skipped) {
  if (input.options.world != nullptr) return RunOnRank(input, pass, *input.options.world, skipped);
  std::vector<float> result;
  RunRanks(1, [&](ProcessGroup& alone) { result = RunOnRank(input, pass, alone, skipped); });
  return result;
}

}  // namespace switchyard::replay
