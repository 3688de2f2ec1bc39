// Kind "dispatch": the layouts of the protocols, as functions of the ids and by the real
// dispatchers.
#include <algorithm>

#include "replay/dispatch_case.h"
#include "replay/dispatch_ranks.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

using moe::IdSpace;
using moe::dispatchers::RoutedTokens;
using Protocol = DispatchCase::Protocol;

// What all ranks would receive, from the layout functions alone.
class FromLayouts {
 public:
  explicit FromLayouts(const DispatchCase& dispatch)
      : case_(dispatch), views_(dispatch.num_ranks()) {
    for (size_t rank = 0; rank < views_.size(); ++rank)
      views_[rank].combined.resize(case_.num_tokens(rank) * case_.hidden_size());
  }

  Outputs Run() {
    if (case_.protocol() == Protocol::kLocalSort) return SortLocally();
    for (size_t rank = 0; rank < views_.size(); ++rank) {
      switch (case_.protocol()) {
        case Protocol::kDeepepNormal: ReceiveTokenRows(rank, IdSpace::kLocal); break;
        case Protocol::kMori: ReceiveTokenRows(rank, IdSpace::kGlobal); break;
        case Protocol::kDeepepLl: ReceiveLowLatency(rank); break;
        default: ReceiveAll(rank); break;
      }
    }
    Outputs outputs = case_.Tensors(views_);
    const bool has_layouts =
        case_.protocol() == Protocol::kDeepepNormal || case_.protocol() == Protocol::kMori;
    if (has_layouts) PutSendLayouts(outputs);
    return outputs;
  }

 private:
  std::span<const double> Arriving(size_t token) const {
    return case_.arriving().subspan(token * case_.hidden_size(), case_.hidden_size());
  }

  // to[row] += factor * token.
  void AddScaled(double factor, size_t token, std::vector<double>& to, size_t row) const {
    const std::span<const double> x = Arriving(token);
    for (size_t h = 0; h < x.size(); ++h) to[row * x.size() + h] += factor * x[h];
  }

  // Row `token` of rank `source` arrives at `view`; the sender gets `factor` times it back.
  void Deliver(RankView& view, int32_t source, int32_t token, double factor) {
    const auto rank = static_cast<size_t>(source);
    const size_t from = case_.first_token(rank) + static_cast<size_t>(token);
    view.src_rank.push_back(source);
    view.src_token.push_back(token);
    const std::span<const double> x = Arriving(from);
    view.x.insert(view.x.end(), x.begin(), x.end());
    AddScaled(factor, from, views_[rank].combined, static_cast<size_t>(token));
  }

  double FactorOf(size_t rank, std::span<const int32_t> local_ids,
                  std::span<const float> weights) const {
    return case_.SumOfExperts(local_ids, weights, rank * case_.partition().num_local());
  }

  void ReceiveTokenRows(size_t rank, IdSpace id_space) {
    const auto rows =
        moe::dispatchers::ReceiveRows(case_.partition(), rank, case_.Sources(), id_space);
    RankView& view = views_[rank];
    view.topk_ids = rows.topk_ids;
    view.topk_weights = rows.topk_weights;
    view.per_expert = rows.per_expert;
    const std::vector<int32_t> local_ids = case_.LocalIds(rank, view);
    const RoutedTokens received{local_ids, rows.topk_weights, case_.top_k()};
    for (size_t i = 0; i < rows.num_rows(); ++i)
      Deliver(view, rows.src_rank[i], rows.src_token[i],
              FactorOf(rank, received.Ids(i), received.Weights(i)));
  }

  void ReceiveLowLatency(size_t rank) {
    const auto rows =
        moe::dispatchers::ReceiveLowLatency(case_.partition(), rank, case_.Sources(),
                                            case_.file().Size("num_max_dispatch_tokens_per_rank"));
    RankView& view = views_[rank];
    view.per_expert = rows.masked_m;
    view.expected_m = {static_cast<int32_t>(moe::dispatchers::ExpectedRowsPerExpert(
        case_.num_tokens(rank), case_.top_k(), case_.partition()))};
    for (size_t i = 0; i < rows.src_rank.size(); ++i) {
      const size_t token = case_.first_token(static_cast<size_t>(rows.src_rank[i])) +
                           static_cast<size_t>(rows.src_token[i]);
      const size_t route = token * case_.top_k() + static_cast<size_t>(rows.src_column[i]);
      const double gain = case_.gain()[static_cast<size_t>(case_.ids()[route])];
      Deliver(view, rows.src_rank[i], rows.src_token[i], double{case_.weights()[route]} * gain);
    }
  }

  void ReceiveAll(size_t rank) {
    RankView& view = views_[rank];
    view.topk_ids.assign(case_.ids().begin(), case_.ids().end());
    view.topk_weights.assign(case_.weights().begin(), case_.weights().end());
    const std::vector<int32_t> local_ids = case_.LocalIds(rank, view);
    const RoutedTokens local{local_ids, view.topk_weights, case_.top_k()};
    for (size_t source = 0; source < views_.size(); ++source) {
      for (size_t t = 0; t < case_.num_tokens(source); ++t) {
        const size_t row = case_.first_token(source) + t;
        Deliver(view, static_cast<int32_t>(source), static_cast<int32_t>(t),
                FactorOf(rank, local.Ids(row), local.Weights(row)));
      }
    }
  }

  void PutSendLayouts(Outputs& outputs) const {
    std::vector<double> per_rank, per_expert, is_in_rank;
    const auto append = [](std::vector<double>& to, const auto& values) {
      to.insert(to.end(), values.begin(), values.end());
    };
    for (const RoutedTokens& source : case_.Sources()) {
      const auto layout = moe::dispatchers::ComputeDispatchLayout(case_.partition(), source);
      append(per_rank, layout.num_tokens_per_rank);
      append(per_expert, layout.num_tokens_per_expert);
      append(is_in_rank, layout.is_token_in_rank);
    }
    outputs["out.num_tokens_per_rank"].values = std::move(per_rank);
    outputs["out.num_tokens_per_expert"].values = std::move(per_expert);
    outputs["out.is_token_in_rank"].values = std::move(is_in_rank);
  }

  // The routes of one rank grouped by expert.
  Outputs SortLocally() const {
    const size_t h = case_.hidden_size(), top_k = case_.top_k();
    LocalSortView view;
    view.routes = moe::dispatchers::SortRoutes(case_.ids(), case_.partition().num_experts());
    view.combined.resize(case_.num_tokens() * h);
    for (const int32_t route : view.routes.sorted_route) {
      const std::span<const double> x = Arriving(static_cast<size_t>(route) / top_k);
      view.sorted_x.insert(view.sorted_x.end(), x.begin(), x.end());
    }
    for (size_t route = 0; route < case_.ids().size(); ++route) {
      if (view.routes.route_to_row[route] < 0) continue;
      const double gain = case_.gain()[static_cast<size_t>(case_.ids()[route])];
      AddScaled(double{case_.weights()[route]} * gain, route / top_k, view.combined, route / top_k);
    }
    return case_.Tensors(view);
  }

  const DispatchCase& case_;
  std::vector<RankView> views_;
};

}  // namespace

KindOutput ReplayDispatch(const KindInput& input) {
  try {
    const DispatchCase dispatch(input.file);
    KindOutput output;
    output.others = DispatchOverWorld(input, dispatch);
    if (!IsFirstRank(input.options)) return output;
    output.outputs = FromLayouts(dispatch).Run();
    for (auto& other : DispatchOverThreads(input, dispatch))
      output.others.push_back(std::move(other));
    return output;
  } catch (const Error& e) {
    // What the layout functions refuse stands in the file.
    if (e.code() != ErrorCode::kInvalidArgument) throw;
    input.file.Corrupt(e.message());
  }
}

}  // namespace switchyard::replay
