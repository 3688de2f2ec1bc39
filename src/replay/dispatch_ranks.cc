#include "replay/dispatch_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "quant/act_quant.h"
#include "replay/gather.h"
#include "switchyard/core/error.h"
#include "switchyard/core/small_floats.h"
#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/parallel/run_ranks.h"

namespace switchyard::replay {
namespace {

using Protocol = DispatchCase::Protocol;

// The dispatchers that have the layout of a protocol.
std::vector<const moe::DispatcherEntry*> DispatchersOf(const moe::Registry& registry,
                                                       Protocol protocol) {
  std::vector<std::string_view> names;
  switch (protocol) {
    case Protocol::kDeepepNormal: names = {"deepep_normal"}; break;
    case Protocol::kDeepepLl: names = {"deepep_ll", "mooncake", "nixl"}; break;
    case Protocol::kMori: names = {"mori"}; break;
    case Protocol::kAllGather: names = {"standard"}; break;
    case Protocol::kLocalSort: names = {"ascend_tp"}; break;
  }
  std::vector<const moe::DispatcherEntry*> found;
  for (const moe::DispatcherEntry& entry : registry.dispatchers()) {
    if (std::find(names.begin(), names.end(), entry.name) != names.end()) found.push_back(&entry);
  }
  return found;
}

// Says which token a row is that a rank has received.
class SourceFinder {
 public:
  SourceFinder(const DispatchCase& dispatch, size_t rank) : case_(dispatch), rank_(rank) {}

  // The rows that follow are for this expert of the rank, for any of its experts, or for all ranks.
  static constexpr int32_t kAnyExpert = -1, kEveryToken = -2;
  void Begin(int32_t local_expert) {
    expert_ = local_expert;
    used_.assign(case_.num_tokens(), 0);
  }

  // The token that has the values of a received row, and an expert that it may go to; of several
  // alike, the one that has come least often so far. num_tokens() if there is none.
  size_t Find(std::span<const float> row) {
    // Codes that round another way are near; other tokens are not.
    constexpr double kNear = 1e-3;
    size_t best = case_.num_tokens();
    for (size_t token = 0; token < case_.num_tokens(); ++token) {
      if (!MayCome(token) || Distance(row, token) > (case_.is_fp8() ? kNear : 0)) continue;
      if (best == case_.num_tokens() || used_[token] < used_[best]) best = token;
    }
    if (best != case_.num_tokens()) ++used_[best];
    return best;
  }

 private:
  bool MayCome(size_t token) const {
    if (expert_ == kEveryToken) return true;
    for (const int32_t id : case_.All().Ids(token)) {
      const int32_t local = case_.partition().LocalId(id, rank_);
      if (local >= 0 && (expert_ == kAnyExpert || local == expert_)) return true;
    }
    return false;
  }

  // The squared distance of the row to a token, relative to the token.
  double Distance(std::span<const float> row, size_t token) const {
    double distance = 0, norm = 0;
    for (size_t h = 0; h < row.size(); ++h) {
      const double value = case_.arriving()[token * row.size() + h];
      distance += (row[h] - value) * (row[h] - value);
      norm += value * value;
    }
    return norm > 0 ? distance / norm : distance;
  }

  const DispatchCase& case_;
  size_t rank_;
  int32_t expert_ = kAnyExpert;
  std::vector<size_t> used_;
};

// One rank of a dispatcher: sends its tokens, looks at what it receives, answers, and takes what
// comes back.
class DispatchRank {
 public:
  DispatchRank(const KindInput& input, const DispatchCase& dispatch, ProcessGroup& ranks,
               ExecContext& context)
      : case_(dispatch),
        ranks_(ranks),
        context_(context),
        deadline_(Deadline::After(input.options.ep.timeout, "replay dispatch")),
        groups_(MakeGroups(ranks, Parallel(), "replay", deadline_)),
        ep_(groups_, EpOptions(input.options.ep)),
        finder_(dispatch, ranks.rank()) {
    // Ranks that are lost are no part of a case: no wait is endless.
    ep_.SetWarm();
    ep_.BeginPass(case_.protocol() == Protocol::kDeepepLl ? moe::ForwardPhase::kDecode
                                                          : moe::ForwardPhase::kPrefill);
  }

  // The views of all ranks. Collective.
  std::vector<RankView> Run(const moe::DispatcherEntry& entry) {
    const std::unique_ptr<moe::Dispatcher> dispatcher = Make(entry);
    const moe::DispatchOutput& output = dispatcher->Dispatch(context_, MyRows(), MyRouting());
    const Rows back = dispatcher->Combine(context_, Receive(output));
    for (size_t t = 0; t < back.rows; ++t)
      view_.combined.insert(view_.combined.end(), back.Row(t), back.Row(t) + back.cols);
    return Gather();
  }

 private:
  ParallelConfig Parallel() const {
    ParallelConfig config;
    config.tp_size = config.moe_ep_size = ranks_.size();
    config.dp_attention = true;
    return config;
  }

  moe::ExpertParallelOptions EpOptions(moe::ExpertParallelOptions options) const {
    size_t most = 1;
    for (size_t rank = 0; rank < case_.num_ranks(); ++rank)
      most = std::max(most, case_.num_tokens(rank));
    options.max_tokens_per_rank = most;
    options.num_max_dispatch_tokens_per_rank =
        case_.protocol() == Protocol::kDeepepLl
            ? case_.file().Size("num_max_dispatch_tokens_per_rank")
            : 1;
    options.tokens_are_replicated = false;
    options.deterministic = false;  // the receiver sums, as recorded
    return options;
  }

  std::unique_ptr<moe::Dispatcher> Make(const moe::DispatcherEntry& entry) {
    moe::MoeRunnerConfig config;
    config.num_experts = case_.partition().num_experts();
    config.num_local_experts = case_.partition().num_local();
    config.hidden_size = case_.hidden_size();
    config.top_k = case_.top_k();
    std::unique_ptr<moe::Dispatcher> dispatcher = entry.make({config, "aiter", &ep_});
    moe::DispatcherQuantConfig wire;
    if (case_.is_fp8()) {
      wire.output.kind = ActQuantKind::kFp8Group;
      wire.output.amax_floor = case_.amax_floor();
    } else {
      wire.plain = DType::kBF16;
    }
    dispatcher->SetQuantConfig(wire);
    return dispatcher;
  }

  ConstRows MyRows() const {
    const size_t h = case_.hidden_size();
    return ConstRows(case_.x().data() + case_.first_token(ranks_.rank()) * h,
                     case_.num_tokens(ranks_.rank()), h);
  }
  moe::TopKOutput MyRouting() const {
    const moe::dispatchers::RoutedTokens mine = case_.Of(ranks_.rank());
    moe::TopKOutput topk;
    topk.num_tokens = case_.num_tokens(ranks_.rank());
    topk.top_k = case_.top_k();
    topk.ids = mine.ids;
    topk.weights = mine.weights;
    return topk;
  }

  // Looks at what came, and answers it.
  const moe::CombineInput& Receive(const moe::DispatchOutput& output) {
    switch (output.format) {
      case moe::DispatchFormat::kDeepepNormal:
        return Receive(moe::As<moe::DeepepNormalDispatchOutput>(output));
      case moe::DispatchFormat::kDeepepLl:
        return Receive(moe::As<moe::DeepepLlDispatchOutput>(output));
      default: return Receive(moe::As<moe::StandardDispatchOutput>(output));
    }
  }

  const moe::CombineInput& Receive(const moe::DeepepNormalDispatchOutput& output) {
    const size_t rows =
        output.mori != nullptr ? output.mori->num_recv_tokens : output.hidden_states.rows;
    auto* answer = context_.arena.New<moe::DeepepNormalCombineInput>(
        ReceiveTokens(output.hidden_states.Slice(0, rows), output.topk_ids, output.topk_weights,
                      SourceFinder::kAnyExpert),
        output.promises);
    const bool is_mori = output.mori != nullptr;
    answer->topk_ids = is_mori ? output.mori->origin_topk_ids : output.topk_ids;
    answer->topk_weights = is_mori ? output.mori->origin_topk_weights : output.topk_weights;
    if (!is_mori) {
      view_.per_expert.assign(output.num_recv_tokens_per_expert.begin(),
                              output.num_recv_tokens_per_expert.end());
      return *answer;
    }
    view_.per_expert.assign(case_.partition().num_local(), 0);
    for (const int32_t id : case_.LocalIds(ranks_.rank(), view_)) {
      if (id >= 0) ++view_.per_expert[static_cast<size_t>(id)];
    }
    return *answer;
  }

  const moe::CombineInput& Receive(const moe::StandardDispatchOutput& output) {
    return *context_.arena.New<moe::StandardCombineInput>(
        ReceiveTokens(output.hidden_states, output.topk_output.ids, output.topk_output.weights,
                      SourceFinder::kEveryToken),
        output.promises);
  }

  // Token rows: weighted and summed over this rank's experts.
  Rows ReceiveTokens(const QuantRows& rows, std::span<const int32_t> ids,
                     std::span<const float> weights, int32_t whose) {
    view_.topk_ids.assign(ids.begin(), ids.end());
    view_.topk_weights.assign(weights.begin(), weights.end());
    const std::vector<int32_t> local_ids = case_.LocalIds(ranks_.rank(), view_);
    const moe::dispatchers::RoutedTokens received{local_ids, view_.topk_weights, case_.top_k()};
    const Rows answer = context_.arena.AllocateRows(rows.rows, case_.hidden_size());
    finder_.Begin(whose);
    for (size_t i = 0; i < rows.rows; ++i) {
      const double factor = case_.SumOfExperts(received.Ids(i), received.Weights(i),
                                               ranks_.rank() * case_.partition().num_local());
      TakeRow(rows, i, factor, answer.Row(i));
    }
    return answer;
  }

  // Rows of routes: as they are, times the gain of their expert.
  const moe::CombineInput& Receive(const moe::DeepepLlDispatchOutput& output) {
    view_.per_expert.assign(output.masked_m.begin(), output.masked_m.end());
    view_.expected_m = {static_cast<int32_t>(output.expected_m)};
    const Rows answer = context_.arena.AllocateRows(output.hidden_states.rows, case_.hidden_size());
    for (size_t e = 0; e < view_.per_expert.size(); ++e) {
      finder_.Begin(static_cast<int32_t>(e));
      const double gain = case_.gain()[ranks_.rank() * case_.partition().num_local() + e];
      for (int32_t i = 0; i < view_.per_expert[e]; ++i) {
        const size_t row = e * output.capacity + static_cast<size_t>(i);
        TakeRow(output.hidden_states, row, gain, answer.Row(row));
      }
    }
    auto* input = context_.arena.New<moe::DeepepLlCombineInput>(answer, output.promises);
    input->topk_ids = output.topk_ids;
    input->topk_weights = output.topk_weights;
    return *input;
  }

  // Notes row i and answers it with `factor` times its values.
  void TakeRow(const QuantRows& rows, size_t i, double factor, float* answer) {
    std::vector<float> values(rows.cols);
    quant::DequantizeRow(rows, i, values.data());
    view_.x.insert(view_.x.end(), values.begin(), values.end());
    for (size_t h = 0; h < values.size(); ++h)
      answer[h] = static_cast<float>(factor * double{values[h]});
    const size_t token = finder_.Find(values);
    int32_t rank = -1, on_rank = -1;
    if (token != case_.num_tokens()) {
      rank = 0;
      while (token >= case_.first_token(static_cast<size_t>(rank) + 1)) ++rank;
      on_rank = static_cast<int32_t>(token - case_.first_token(static_cast<size_t>(rank)));
    }
    view_.src_rank.push_back(rank);
    view_.src_token.push_back(on_rank);
    if (!case_.is_fp8()) return;
    const auto* codes = reinterpret_cast<const uint8_t*>(rows.Row(i));
    view_.codes.insert(view_.codes.end(), codes, codes + rows.cols);
    const auto* scales = reinterpret_cast<const float*>(rows.ScaleRow(i));
    view_.scales.insert(view_.scales.end(), scales, scales + rows.cols / rows.scale_cols);
  }

  std::vector<RankView> Gather() {
    std::vector<RankView> all(ranks_.size());
    GatherMember(&RankView::src_rank, all);
    GatherMember(&RankView::src_token, all);
    GatherMember(&RankView::x, all);
    GatherMember(&RankView::codes, all);
    GatherMember(&RankView::scales, all);
    GatherMember(&RankView::topk_ids, all);
    GatherMember(&RankView::topk_weights, all);
    GatherMember(&RankView::per_expert, all);
    GatherMember(&RankView::expected_m, all);
    GatherMember(&RankView::combined, all);
    return all;
  }
  template <typename T>
  void GatherMember(std::vector<T> RankView::*member, std::vector<RankView>& all) {
    std::vector<std::vector<T>> parts = GatherVectors(ranks_, view_.*member, deadline_);
    for (size_t rank = 0; rank < all.size(); ++rank) all[rank].*member = std::move(parts[rank]);
  }

  const DispatchCase& case_;
  ProcessGroup& ranks_;
  ExecContext& context_;
  Deadline deadline_;
  ParallelGroups groups_;
  moe::ExpertParallel ep_;
  SourceFinder finder_;
  RankView view_;
};

// The routes of one rank, sorted by the ascend_tp dispatcher.
LocalSortView SortByDispatcher(const DispatchCase& dispatch, const moe::DispatcherEntry& entry,
                               ExecContext& context) {
  moe::MoeRunnerConfig config;
  config.num_experts = config.num_local_experts = dispatch.partition().num_experts();
  config.hidden_size = dispatch.hidden_size();
  config.top_k = dispatch.top_k();
  const std::unique_ptr<moe::Dispatcher> dispatcher = entry.make({config, "ascend", nullptr});
  moe::TopKOutput topk;
  topk.num_tokens = dispatch.num_tokens();
  topk.top_k = dispatch.top_k();
  topk.ids = dispatch.ids();
  topk.weights = dispatch.weights();
  const ConstRows hidden(dispatch.x().data(), dispatch.num_tokens(), dispatch.hidden_size());
  const auto& output =
      moe::As<moe::AscendTpDispatchOutput>(dispatcher->Dispatch(context, hidden, topk));
  LocalSortView view;
  for (const int64_t count : output.expert_tokens) {
    view.routes.counts.push_back(static_cast<int32_t>(count));
    const int32_t before = view.routes.cumulative.empty() ? 0 : view.routes.cumulative.back();
    view.routes.cumulative.push_back(before + static_cast<int32_t>(count));
  }
  view.routes.route_to_row.assign(output.expanded_row_idx.begin(), output.expanded_row_idx.end());
  view.routes.sorted_route.assign(output.hidden_states.rows, -1);
  for (size_t route = 0; route < view.routes.route_to_row.size(); ++route) {
    const int32_t row = view.routes.route_to_row[route];
    if (row >= 0)
      view.routes.sorted_route.at(static_cast<size_t>(row)) = static_cast<int32_t>(route);
  }
  const Rows answer = context.arena.AllocateRows(output.hidden_states.rows, dispatch.hidden_size());
  size_t row = 0;
  for (size_t e = 0; e < view.routes.counts.size(); ++e) {
    for (int32_t i = 0; i < view.routes.counts[e]; ++i, ++row) {
      quant::DequantizeRow(output.hidden_states, row, answer.Row(row));
      view.sorted_x.insert(view.sorted_x.end(), answer.Row(row), answer.Row(row) + answer.cols);
      for (size_t h = 0; h < answer.cols; ++h) answer.Row(row)[h] *= dispatch.gain()[e];
    }
  }
  const Rows back = dispatcher->Combine(context, moe::AscendTpCombineInput(answer));
  for (size_t t = 0; t < back.rows; ++t)
    view.combined.insert(view.combined.end(), back.Row(t), back.Row(t) + back.cols);
  return view;
}

// Whether threads and buffers for the case's ranks are no burden.
bool FitsHere(const DispatchCase& dispatch) {
  constexpr size_t kMostRanks = 16;
  constexpr double kMostFloats = 1 << 28;
  if (dispatch.num_ranks() > kMostRanks || dispatch.top_k() == 0 || dispatch.hidden_size() == 0)
    return false;
  const size_t slab = dispatch.protocol() == Protocol::kDeepepLl
                          ? dispatch.file().Size("num_max_dispatch_tokens_per_rank")
                          : 1;
  return static_cast<double>(dispatch.partition().num_experts()) * static_cast<double>(slab) *
             static_cast<double>(dispatch.num_ranks()) *
             static_cast<double>(dispatch.hidden_size()) <=
         kMostFloats;
}

Outputs RunThreads(const KindInput& input, const DispatchCase& dispatch,
                   const moe::DispatcherEntry& entry, size_t node_size) {
  std::vector<RankView> views;
  RunRanks(RankOptions{.num_ranks = dispatch.num_ranks(), .node_size = node_size},
           [&](ProcessGroup& ranks) {
             ThreadPool pool(1);
             Arena arena;
             ExecContext context{pool, arena};
             std::vector<RankView> all = DispatchRank(input, dispatch, ranks, context).Run(entry);
             if (ranks.rank() == 0) views = std::move(all);
           });
  return dispatch.Tensors(views);
}

}  // namespace

DispatchRuns DispatchOverThreads(const KindInput& input, const DispatchCase& dispatch) {
  DispatchRuns runs;
  if (!FitsHere(dispatch)) return runs;
  const size_t ranks = dispatch.num_ranks();
  for (const moe::DispatcherEntry* entry : DispatchersOf(input.registry, dispatch.protocol())) {
    if (dispatch.protocol() == Protocol::kLocalSort) {
      runs.emplace_back(entry->name,
                        dispatch.Tensors(SortByDispatcher(dispatch, *entry, input.context)));
      continue;
    }
    runs.emplace_back(fmt::format("{}, {} thread{}", entry->name, ranks, ranks == 1 ? "" : "s"),
                      RunThreads(input, dispatch, *entry, ranks));
    if (ranks % 2 != 0) continue;
    runs.emplace_back(fmt::format("{}, {} threads on 2 nodes", entry->name, ranks),
                      RunThreads(input, dispatch, *entry, ranks / 2));
  }
  return runs;
}

DispatchRuns DispatchOverWorld(const KindInput& input, const DispatchCase& dispatch) {
  DispatchRuns runs;
  ProcessGroup* world = input.options.world;
  const bool enough = world != nullptr && dispatch.num_ranks() <= world->size();
  if (!enough || dispatch.protocol() == Protocol::kLocalSort || !FitsHere(dispatch)) return runs;
  const std::unique_ptr<ProcessGroup> ranks =
      world->Split(world->rank() < dispatch.num_ranks() ? 0 : ProcessGroup::kNoGroup, world->rank(),
                   "replay", Deadline::After(input.options.ep.timeout, "replay"));
  if (ranks == nullptr) return runs;
  for (const moe::DispatcherEntry* entry : DispatchersOf(input.registry, dispatch.protocol())) {
    const std::vector<RankView> views =
        DispatchRank(input, dispatch, *ranks, input.context).Run(*entry);
    if (ranks->rank() != 0) continue;
    runs.emplace_back(
        fmt::format("{}, {} ranks ({})", entry->name, ranks->size(), ranks->carrier()),
        dispatch.Tensors(views));
  }
  return runs;
}

}  // namespace switchyard::replay
