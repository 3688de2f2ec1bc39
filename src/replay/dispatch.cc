// Kind "dispatch": the layouts of the protocols, simulated for all ranks in one process. The expert
// of these cases is y_e(x) = gain[e] * x, so that combine can be checked without a matmul.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/config_reader.h"
#include "moe/dispatchers/layout.h"
#include "replay/case.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

using moe::IdSpace;
using moe::dispatchers::ExpertPartition;
using moe::dispatchers::RoutedTokens;

template <typename T>
void Append(std::vector<double>& out, const std::vector<T>& values) {
  out.insert(out.end(), values.begin(), values.end());
}

// The inputs of a case. Tokens of all ranks stand one after the other.
class DispatchCase {
 public:
  explicit DispatchCase(const CaseFile& file)
      : file_(file),
        partition_(file.Size("num_experts"), file.Size("world_size")),
        top_k_(file.Size("top_k")),
        hidden_size_(file.Size("hidden_size")) {
    ReadTokenCounts();
    const size_t n = num_tokens();
    file.View("in.x", {n, hidden_size_});
    file.View("in.topk_ids", {n, top_k_});
    file.View("in.topk_weights", {n, top_k_});
    file.View("in.expert_gain", {partition_.num_experts()});
    const std::vector<float> x = file.F32("in.x");
    x_.assign(x.begin(), x.end());
    ids_ = file.I32("in.topk_ids");
    weights_ = file.F32("in.topk_weights");
    gain_ = file.F32("in.expert_gain");
    moe::dispatchers::CheckRouted(All(), partition_.num_experts());
    if (file.Text("payload") != "bf16") SendAsFp8();
  }

  KindOutput Run() {
    const std::string protocol = file_.Text("protocol");
    if (protocol == "deepep_normal" || protocol == "mori") {
      RunTokenRows(protocol == "mori" ? IdSpace::kGlobal : IdSpace::kLocal);
    } else if (protocol == "deepep_ll") {
      RunLowLatency();
    } else if (protocol == "allgather") {
      RunAllGather();
    } else if (protocol == "local_sort") {
      RunLocalSort();
    } else {
      throw Error(ErrorCode::kUnsupported, fmt::format("case {}: unknown protocol {}", file_.name(),
                                                       QuoteForMessage(protocol)));
    }
    return std::move(output_);
  }

 private:
  size_t num_ranks() const { return partition_.num_ranks(); }
  size_t num_tokens() const { return first_token_.back(); }
  size_t num_tokens(size_t rank) const { return first_token_[rank + 1] - first_token_[rank]; }

  void ReadTokenCounts() {
    const auto& config = file_.config();
    const auto counts = config.find("tokens_per_rank");
    if (counts == config.end() || !counts->is_array() || counts->size() != num_ranks()) {
      file_.Corrupt(
          fmt::format("\"tokens_per_rank\" of the config is no list of {} counts", num_ranks()));
    }
    for (const auto& count : *counts) {
      constexpr size_t kMaxTokens = 1u << 30;
      if (!count.is_number_unsigned() || count.get<size_t>() > kMaxTokens) {
        file_.Corrupt("\"tokens_per_rank\" of the config holds what is no count");
      }
      first_token_.push_back(first_token_.back() + count.get<size_t>());
    }
  }

  RoutedTokens All() const { return {ids_, weights_, top_k_}; }

  // The tokens of each rank.
  std::vector<RoutedTokens> Sources() const {
    std::vector<RoutedTokens> sources;
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      const size_t first = first_token_[rank] * top_k_, count = num_tokens(rank) * top_k_;
      sources.push_back({std::span(ids_).subspan(first, count),
                         std::span(weights_).subspan(first, count), top_k_});
    }
    return sources;
  }

  void Put(const char* name, const Shape& shape, std::vector<double> values) {
    output_.outputs[name] = {shape, std::move(values)};
  }
  template <typename T>
  void PutAll(const char* name, const Shape& shape, const std::vector<T>& values) {
    Put(name, shape, {values.begin(), values.end()});
  }

  size_t TokenOf(int32_t src_rank, int32_t src_token) const {
    return first_token_[static_cast<size_t>(src_rank)] + static_cast<size_t>(src_token);
  }

  // to += factor * row `token` of x.
  void AddScaled(double factor, size_t token, double* to) const {
    for (size_t h = 0; h < hidden_size_; ++h) to[h] += factor * x_[token * hidden_size_ + h];
  }

  // The experts of one row, weighted and summed; ids count from `first_expert`, -1 is skipped.
  double SumOfExperts(std::span<const int32_t> ids, std::span<const float> weights,
                      size_t first_expert) const {
    double sum = 0;
    for (size_t k = 0; k < ids.size(); ++k) {
      if (ids[k] < 0) continue;
      sum += double{weights[k]} * double{gain_[first_expert + static_cast<size_t>(ids[k])]};
    }
    return sum;
  }

  std::vector<double> ZeroRows(size_t rows) const {
    return std::vector<double>(rows * hidden_size_);
  }

  void SendAsFp8();
  void PutSendLayouts();
  void RunTokenRows(IdSpace id_space);
  void RunLowLatency();
  void RunAllGather();
  void RunLocalSort();

  const CaseFile& file_;
  ExpertPartition partition_;
  size_t top_k_;
  size_t hidden_size_;
  std::vector<size_t> first_token_{0};  // [W + 1]
  std::vector<double> x_;               // [n, H], as it arrives
  std::vector<int32_t> ids_;
  std::vector<float> weights_, gain_;
  KindOutput output_;
};

void DispatchCase::SendAsFp8() {
  throw Error(ErrorCode::kUnsupported, fmt::format("case {}: unknown payload {}", file_.name(),
                                                   QuoteForMessage(file_.Text("payload"))));
}

void DispatchCase::PutSendLayouts() {
  std::vector<double> per_rank, per_expert, is_in_rank;
  for (const RoutedTokens& source : Sources()) {
    const auto layout = moe::dispatchers::ComputeDispatchLayout(partition_, source);
    Append(per_rank, layout.num_tokens_per_rank);
    Append(per_expert, layout.num_tokens_per_expert);
    Append(is_in_rank, layout.is_token_in_rank);
  }
  const size_t ranks = num_ranks();
  Put("out.num_tokens_per_rank", {ranks, ranks}, std::move(per_rank));
  Put("out.num_tokens_per_expert", {ranks, partition_.num_experts()}, std::move(per_expert));
  Put("out.is_token_in_rank", {num_tokens(), ranks}, std::move(is_in_rank));
}

// deepep_normal and mori: one row per token and receiving rank; the receiver weights and sums its
// experts, combine adds the ranks.
void DispatchCase::RunTokenRows(IdSpace id_space) {
  PutSendLayouts();
  const std::vector<RoutedTokens> sources = Sources();
  const size_t alignment = file_.SizeOr("expert_alignment", 1);
  std::vector<double> offsets{0}, src_rank, src_token, ids, weights, per_expert, aligned;
  std::vector<double> partial, combined = ZeroRows(num_tokens());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const auto rows = moe::dispatchers::ReceiveRows(partition_, rank, sources, id_space);
    offsets.push_back(offsets.back() + static_cast<double>(rows.num_rows()));
    Append(src_rank, rows.src_rank);
    Append(src_token, rows.src_token);
    Append(ids, rows.topk_ids);
    Append(weights, rows.topk_weights);
    Append(per_expert, rows.per_expert);
    Append(aligned, moe::dispatchers::AlignCounts(rows.per_expert, alignment));
    // Global ids come with those of other ranks' experts, which the runner masks.
    const std::vector<int32_t> local_ids =
        id_space == IdSpace::kLocal
            ? rows.topk_ids
            : moe::dispatchers::MapIds(moe::dispatchers::LocalExpertMap(partition_, rank),
                                       rows.topk_ids);
    const RoutedTokens received{local_ids, rows.topk_weights, top_k_};
    for (size_t i = 0; i < rows.num_rows(); ++i) {
      const double factor =
          SumOfExperts(received.Ids(i), received.Weights(i), rank * partition_.num_local());
      const size_t token = TokenOf(rows.src_rank[i], rows.src_token[i]);
      partial.resize(partial.size() + hidden_size_);
      AddScaled(factor, token, partial.data() + partial.size() - hidden_size_);
      AddScaled(factor, token, combined.data() + token * hidden_size_);
    }
  }
  const size_t m = src_rank.size(), ranks = num_ranks(), local = partition_.num_local();
  Put("out.recv_offsets", {ranks + 1}, std::move(offsets));
  Put("out.recv_src_rank", {m}, std::move(src_rank));
  Put("out.recv_src_token", {m}, std::move(src_token));
  Put("out.recv_topk_ids", {m, top_k_}, std::move(ids));
  Put("out.recv_topk_weights", {m, top_k_}, std::move(weights));
  Put("out.recv_per_expert", {ranks, local}, std::move(per_expert));
  Put("out.recv_per_expert_aligned", {ranks, local}, std::move(aligned));
  Put("out.partial", {m, hidden_size_}, std::move(partial));
  Put("out.combined", {num_tokens(), hidden_size_}, std::move(combined));
}

// deepep_ll: one row per slot, sent back as it is; combine applies the sender's weights.
void DispatchCase::RunLowLatency() {
  const std::vector<RoutedTokens> sources = Sources();
  const size_t max_tokens = file_.Size("num_max_dispatch_tokens_per_rank");
  std::vector<double> masked_m, recv_from, src_rank, src_token, expected_m, packed;
  std::vector<double> combined = ZeroRows(num_tokens());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const auto rows = moe::dispatchers::ReceiveLowLatency(partition_, rank, sources, max_tokens);
    Append(masked_m, rows.masked_m);
    Append(recv_from, rows.recv_from);
    Append(src_rank, rows.src_rank);
    Append(src_token, rows.src_token);
    expected_m.push_back(static_cast<double>(
        moe::dispatchers::ExpectedRowsPerExpert(num_tokens(rank), top_k_, partition_)));
    for (size_t i = 0; i < rows.src_rank.size(); ++i) {
      const size_t token = TokenOf(rows.src_rank[i], rows.src_token[i]);
      const size_t route = token * top_k_ + static_cast<size_t>(rows.src_column[i]);
      packed.resize(packed.size() + hidden_size_);
      AddScaled(1, token, packed.data() + packed.size() - hidden_size_);
      AddScaled(double{weights_[route]} * double{gain_[static_cast<size_t>(ids_[route])]}, token,
                combined.data() + token * hidden_size_);
    }
  }
  const size_t m = src_rank.size(), ranks = num_ranks(), local = partition_.num_local();
  Put("out.masked_m", {ranks, local}, std::move(masked_m));
  Put("out.recv_from", {ranks, local, ranks}, std::move(recv_from));
  Put("out.packed_src_rank", {m}, std::move(src_rank));
  Put("out.packed_src_token", {m}, std::move(src_token));
  Put("out.packed_x", {m, hidden_size_}, std::move(packed));
  Put("out.expected_m", {ranks}, std::move(expected_m));
  Put("out.combined", {num_tokens(), hidden_size_}, std::move(combined));
}

// allgather: every rank sees every token and computes its own experts; combine adds the ranks.
void DispatchCase::RunAllGather() {
  const size_t n = num_tokens();
  std::vector<double> local_ids, partial = ZeroRows(num_ranks() * n), combined = ZeroRows(n);
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const std::vector<int32_t> ids =
        moe::dispatchers::MapIds(moe::dispatchers::LocalExpertMap(partition_, rank), ids_);
    Append(local_ids, ids);
    const RoutedTokens local{ids, weights_, top_k_};
    for (size_t token = 0; token < n; ++token) {
      const double factor =
          SumOfExperts(local.Ids(token), local.Weights(token), rank * partition_.num_local());
      AddScaled(factor, token, partial.data() + (rank * n + token) * hidden_size_);
      AddScaled(factor, token, combined.data() + token * hidden_size_);
    }
  }
  Put("out.local_topk_ids", {num_ranks(), n, top_k_}, std::move(local_ids));
  Put("out.partial", {num_ranks(), n, hidden_size_}, std::move(partial));
  Put("out.combined", {n, hidden_size_}, std::move(combined));
}

// local_sort: the routes of one rank grouped by expert.
void DispatchCase::RunLocalSort() {
  const auto routes = moe::dispatchers::SortRoutes(ids_, partition_.num_experts());
  const size_t m = routes.sorted_route.size();
  std::vector<double> sorted_x = ZeroRows(m), combined = ZeroRows(num_tokens());
  for (size_t row = 0; row < m; ++row) {
    AddScaled(1, static_cast<size_t>(routes.sorted_route[row]) / top_k_,
              sorted_x.data() + row * hidden_size_);
  }
  for (size_t route = 0; route < ids_.size(); ++route) {
    if (routes.route_to_row[route] < 0) continue;
    const double factor = double{weights_[route]} * double{gain_[static_cast<size_t>(ids_[route])]};
    const double* from =
        sorted_x.data() + static_cast<size_t>(routes.route_to_row[route]) * hidden_size_;
    double* to = combined.data() + route / top_k_ * hidden_size_;
    for (size_t h = 0; h < hidden_size_; ++h) to[h] += factor * from[h];
  }
  PutAll("out.counts", {partition_.num_experts()}, routes.counts);
  PutAll("out.cumulative", {partition_.num_experts()}, routes.cumulative);
  PutAll("out.sorted_route", {m}, routes.sorted_route);
  PutAll("out.route_to_row", {num_tokens(), top_k_}, routes.route_to_row);
  Put("out.sorted_x", {m, hidden_size_}, std::move(sorted_x));
  Put("out.combined", {num_tokens(), hidden_size_}, std::move(combined));
}

}  // namespace

KindOutput ReplayDispatch(const KindInput& input) {
  try {
    return DispatchCase(input.file).Run();
  } catch (const Error& e) {
    // What the layout functions refuse stands in the file.
    if (e.code() != ErrorCode::kInvalidArgument) throw;
    input.file.Corrupt(e.message());
  }
}

}  // namespace switchyard::replay
