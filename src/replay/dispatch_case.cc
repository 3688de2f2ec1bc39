#include "replay/dispatch_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::replay {
namespace {

using moe::dispatchers::RoutedTokens;

constexpr size_t kScaleGroup = 128;  // of the fp8 payload

struct ProtocolName {
  std::string_view name;
  DispatchCase::Protocol protocol;
};
constexpr ProtocolName kProtocols[] = {{"deepep_normal", DispatchCase::Protocol::kDeepepNormal},
                                       {"deepep_ll", DispatchCase::Protocol::kDeepepLl},
                                       {"mori", DispatchCase::Protocol::kMori},
                                       {"allgather", DispatchCase::Protocol::kAllGather},
                                       {"local_sort", DispatchCase::Protocol::kLocalSort}};

DispatchCase::Protocol ReadProtocol(const CaseFile& file) {
  const std::string text = file.Text("protocol");
  for (const auto& [name, protocol] : kProtocols) {
    if (name == text) return protocol;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("case {}: unknown protocol {}", file.name(), QuoteForMessage(text)));
}

template <typename T>
void Append(std::vector<double>& out, const std::vector<T>& values) {
  out.insert(out.end(), values.begin(), values.end());
}

template <typename T>
std::vector<double> Doubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

// One member of every view, one behind the other.
template <typename T>
std::vector<double> Concatenate(const std::vector<RankView>& ranks,
                                std::vector<T> RankView::*member) {
  std::vector<double> all;
  for (const RankView& view : ranks) Append(all, view.*member);
  return all;
}

}  // namespace

DispatchCase::DispatchCase(const CaseFile& file)
    : file_(file),
      partition_(file.Size("num_experts"), file.Size("world_size")),
      top_k_(file.Size("top_k")),
      hidden_size_(file.Size("hidden_size")),
      protocol_(ReadProtocol(file)) {
  ReadTokenCounts();
  const size_t n = num_tokens();
  file.View("in.x", {n, hidden_size_});
  file.View("in.topk_ids", {n, top_k_});
  file.View("in.topk_weights", {n, top_k_});
  file.View("in.expert_gain", {partition_.num_experts()});
  x_ = file.F32("in.x");
  arriving_.assign(x_.begin(), x_.end());
  ids_ = file.I32("in.topk_ids");
  weights_ = file.F32("in.topk_weights");
  gain_ = file.F32("in.expert_gain");
  moe::dispatchers::CheckRouted(All(), partition_.num_experts());
  if (file.Text("payload") != "bf16") SendAsFp8();
}

void DispatchCase::ReadTokenCounts() {
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

// What arrives after the wire format: e4m3 with one scale for each 128 columns.
void DispatchCase::SendAsFp8() {
  if (file_.Text("payload") != "fp8_group128") {
    throw Error(ErrorCode::kUnsupported, fmt::format("case {}: unknown payload {}", file_.name(),
                                                     QuoteForMessage(file_.Text("payload"))));
  }
  if (hidden_size_ % kScaleGroup != 0) {
    file_.Corrupt(
        fmt::format("hidden_size is {}, expected a multiple of {} for payload fp8_group128",
                    hidden_size_, kScaleGroup));
  }
  is_fp8_ = true;
  for (size_t begin = 0; begin < arriving_.size(); begin += kScaleGroup) {
    const std::span<double> group = std::span(arriving_).subspan(begin, kScaleGroup);
    float amax = amax_floor();
    for (double value : group) amax = std::max(amax, static_cast<float>(std::abs(value)));
    const float scale = amax / kE4M3Max;
    for (double& value : group) {
      const uint8_t code = EncodeE4M3(static_cast<float>(value) / scale);
      codes_.push_back(code);
      value = double{DecodeE4M3(code)} * double{scale};
    }
    scales_.push_back(scale);
  }
}

RoutedTokens DispatchCase::Of(size_t rank) const {
  const size_t first = first_token_[rank] * top_k_, count = num_tokens(rank) * top_k_;
  return {std::span(ids_).subspan(first, count), std::span(weights_).subspan(first, count), top_k_};
}

std::vector<RoutedTokens> DispatchCase::Sources() const {
  std::vector<RoutedTokens> sources;
  for (size_t rank = 0; rank < num_ranks(); ++rank) sources.push_back(Of(rank));
  return sources;
}

double DispatchCase::SumOfExperts(std::span<const int32_t> ids, std::span<const float> weights,
                                  size_t first_expert) const {
  double sum = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    sum += double{weights[k]} * double{gain_[first_expert + static_cast<size_t>(ids[k])]};
  }
  return sum;
}

// Global ids come with those of other ranks' experts, which the runner masks.
std::vector<int32_t> DispatchCase::LocalIds(size_t rank, const RankView& view) const {
  if (protocol_ == Protocol::kDeepepNormal) return view.topk_ids;
  return moe::dispatchers::MapIds(moe::dispatchers::LocalExpertMap(partition_, rank),
                                  view.topk_ids);
}

void DispatchCase::AppendScaled(const RankView& view, size_t i, double factor,
                                std::vector<double>& to) const {
  for (size_t h = 0; h < hidden_size_; ++h) to.push_back(factor * view.x[i * hidden_size_ + h]);
}

Outputs DispatchCase::Tensors(const std::vector<RankView>& ranks) const {
  Outputs outputs;
  outputs["out.combined"] = {{num_tokens(), hidden_size_}, Concatenate(ranks, &RankView::combined)};
  if (is_fp8_) PutPayload(ranks, outputs);
  switch (protocol_) {
    case Protocol::kDeepepNormal:
    case Protocol::kMori: PutTokenRows(ranks, outputs); break;
    case Protocol::kDeepepLl: PutLowLatency(ranks, outputs); break;
    case Protocol::kAllGather: PutAllGather(ranks, outputs); break;
    case Protocol::kLocalSort: break;  // has tensors of its own
  }
  return outputs;
}

// The codes and scales of each token as they were received; of one that nobody gets, as they would
// be sent.
void DispatchCase::PutPayload(const std::vector<RankView>& ranks, Outputs& outputs) const {
  const size_t groups = hidden_size_ / kScaleGroup;
  std::vector<double> codes = codes_, scales = scales_;
  const auto copy_row = [](const std::vector<double>& from, size_t from_row,
                           std::vector<double>& to, size_t to_row, size_t width) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_row * width), width,
                to.begin() + static_cast<std::ptrdiff_t>(to_row * width));
  };
  for (const RankView& view : ranks) {
    for (size_t i = 0; i < view.src_rank.size() && !view.codes.empty(); ++i) {
      if (view.src_rank[i] < 0) continue;
      const size_t token = first_token_[static_cast<size_t>(view.src_rank[i])] +
                           static_cast<size_t>(view.src_token[i]);
      copy_row(view.codes, i, codes, token, hidden_size_);
      copy_row(view.scales, i, scales, token, groups);
    }
  }
  outputs["out.payload_q"] = {{num_tokens(), hidden_size_}, std::move(codes)};
  outputs["out.payload_scale"] = {{num_tokens(), groups}, std::move(scales)};
}

// What was received says what was sent.
void DispatchCase::PutSendLayouts(const std::vector<RankView>& ranks, Outputs& outputs) const {
  const size_t num = num_ranks(), experts = partition_.num_experts();
  std::vector<double> per_rank(num * num), per_expert(num * experts), in_rank(num_tokens() * num);
  for (size_t rank = 0; rank < num; ++rank) {
    const RankView& view = ranks[rank];
    const std::vector<int32_t> ids = LocalIds(rank, view);
    for (size_t i = 0; i < view.src_rank.size(); ++i) {
      if (view.src_rank[i] < 0) continue;
      const auto source = static_cast<size_t>(view.src_rank[i]);
      const size_t token = first_token_[source] + static_cast<size_t>(view.src_token[i]);
      per_rank[source * num + rank] += 1;
      in_rank[token * num + rank] = 1;
      for (size_t k = 0; k < top_k_; ++k) {
        const int32_t id = ids[i * top_k_ + k];
        if (id < 0) continue;
        const size_t expert = rank * partition_.num_local() + static_cast<size_t>(id);
        per_expert[source * experts + expert] += 1;
      }
    }
  }
  outputs["out.num_tokens_per_rank"] = {{num, num}, std::move(per_rank)};
  outputs["out.num_tokens_per_expert"] = {{num, experts}, std::move(per_expert)};
  outputs["out.is_token_in_rank"] = {{num_tokens(), num}, std::move(in_rank)};
}

// deepep_normal and mori: one row per token and receiving rank; the receiver weights and sums its
// experts, combine adds the ranks.
void DispatchCase::PutTokenRows(const std::vector<RankView>& ranks, Outputs& outputs) const {
  PutSendLayouts(ranks, outputs);
  const size_t alignment = file_.SizeOr("expert_alignment", 1);
  std::vector<double> offsets{0}, aligned, partial;
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const RankView& view = ranks[rank];
    offsets.push_back(offsets.back() + static_cast<double>(view.src_rank.size()));
    Append(aligned, moe::dispatchers::AlignCounts(view.per_expert, alignment));
    const std::vector<int32_t> local_ids = LocalIds(rank, view);
    const RoutedTokens received{local_ids, view.topk_weights, top_k_};
    for (size_t i = 0; i < view.src_rank.size(); ++i) {
      AppendScaled(
          view, i,
          SumOfExperts(received.Ids(i), received.Weights(i), rank * partition_.num_local()),
          partial);
    }
  }
  const auto m = static_cast<size_t>(offsets.back());
  const size_t num = num_ranks(), local = partition_.num_local();
  outputs["out.recv_offsets"] = {{num + 1}, std::move(offsets)};
  outputs["out.recv_src_rank"] = {{m}, Concatenate(ranks, &RankView::src_rank)};
  outputs["out.recv_src_token"] = {{m}, Concatenate(ranks, &RankView::src_token)};
  outputs["out.recv_topk_ids"] = {{m, top_k_}, Concatenate(ranks, &RankView::topk_ids)};
  outputs["out.recv_topk_weights"] = {{m, top_k_}, Concatenate(ranks, &RankView::topk_weights)};
  outputs["out.recv_per_expert"] = {{num, local}, Concatenate(ranks, &RankView::per_expert)};
  outputs["out.recv_per_expert_aligned"] = {{num, local}, std::move(aligned)};
  outputs["out.partial"] = {{m, hidden_size_}, std::move(partial)};
}

// deepep_ll: one row per slot, sent back as it is; combine applies the sender's weights.
void DispatchCase::PutLowLatency(const std::vector<RankView>& ranks, Outputs& outputs) const {
  const size_t num = num_ranks(), local = partition_.num_local();
  std::vector<double> recv_from(num * local * num);
  for (size_t rank = 0; rank < num; ++rank) {
    const RankView& view = ranks[rank];
    size_t row = 0;
    for (size_t expert = 0; expert < local; ++expert) {
      for (int32_t i = 0; i < view.per_expert[expert]; ++i, ++row) {
        if (view.src_rank[row] < 0) continue;
        const auto source = static_cast<size_t>(view.src_rank[row]);
        recv_from[(rank * local + expert) * num + source] += 1;
      }
    }
  }
  std::vector<double> sources = Concatenate(ranks, &RankView::src_rank);
  const size_t m = sources.size();
  outputs["out.masked_m"] = {{num, local}, Concatenate(ranks, &RankView::per_expert)};
  outputs["out.recv_from"] = {{num, local, num}, std::move(recv_from)};
  outputs["out.packed_src_rank"] = {{m}, std::move(sources)};
  outputs["out.packed_src_token"] = {{m}, Concatenate(ranks, &RankView::src_token)};
  outputs["out.packed_x"] = {{m, hidden_size_}, Concatenate(ranks, &RankView::x)};
  outputs["out.expected_m"] = {{num}, Concatenate(ranks, &RankView::expected_m)};
}

// allgather: every rank sees every token and computes its own experts; combine adds the ranks.
void DispatchCase::PutAllGather(const std::vector<RankView>& ranks, Outputs& outputs) const {
  const size_t n = num_tokens();
  std::vector<double> local_ids, partial;
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const RankView& view = ranks[rank];
    if (view.src_rank.size() != n) {
      throw Error(ErrorCode::kInternal, fmt::format("rank {} received {} tokens, expected all {}",
                                                    rank, view.src_rank.size(), n));
    }
    const std::vector<int32_t> ids = LocalIds(rank, view);
    const RoutedTokens received{ids, view.topk_weights, top_k_};
    Append(local_ids, ids);
    for (size_t i = 0; i < n; ++i) {
      AppendScaled(
          view, i,
          SumOfExperts(received.Ids(i), received.Weights(i), rank * partition_.num_local()),
          partial);
    }
  }
  outputs["out.local_topk_ids"] = {{num_ranks(), n, top_k_}, std::move(local_ids)};
  outputs["out.partial"] = {{num_ranks(), n, hidden_size_}, std::move(partial)};
}

Outputs DispatchCase::Tensors(const LocalSortView& view) const {
  const moe::dispatchers::SortedRoutes& routes = view.routes;
  const size_t m = routes.sorted_route.size(), experts = partition_.num_experts();
  Outputs outputs;
  outputs["out.counts"] = {{experts}, Doubles(routes.counts)};
  outputs["out.cumulative"] = {{experts}, Doubles(routes.cumulative)};
  outputs["out.sorted_route"] = {{m}, Doubles(routes.sorted_route)};
  outputs["out.route_to_row"] = {{num_tokens(), top_k_}, Doubles(routes.route_to_row)};
  outputs["out.sorted_x"] = {{m, hidden_size_}, view.sorted_x};
  outputs["out.combined"] = {{num_tokens(), hidden_size_}, view.combined};
  return outputs;
}

}  // namespace switchyard::replay
