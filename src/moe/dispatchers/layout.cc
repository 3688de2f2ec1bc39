#include "moe/dispatchers/layout.h"

#include <fmt/format.h>

#include <limits>
#include <numeric>

#include "switchyard/core/error.h"

namespace switchyard::moe::dispatchers {
namespace {

constexpr size_t kMaxCount = std::numeric_limits<int32_t>::max();

[[noreturn]] void Refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

int32_t Narrow(size_t value) { return static_cast<int32_t>(value); }

void CheckIds(std::span<const int32_t> ids, size_t num_experts, size_t top_k) {
  if (ids.size() > kMaxCount) {
    Refuse(fmt::format("dispatch: {} routes, at most {} are possible", ids.size(), kMaxCount));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == -1 || (ids[i] >= 0 && static_cast<size_t>(ids[i]) < num_experts)) continue;
    Refuse(fmt::format("dispatch: token {}, slot {}: expert id {}, expected -1 or 0 to {}",
                       i / top_k, i % top_k, ids[i], num_experts - 1));
  }
}

void CheckSources(const ExpertPartition& partition, size_t rank,
                  std::span<const RoutedTokens> sources) {
  if (sources.size() != partition.num_ranks() || rank >= partition.num_ranks()) {
    Refuse(fmt::format("dispatch: rank {} with {} sources, expected those of {} ranks", rank,
                       sources.size(), partition.num_ranks()));
  }
  for (const RoutedTokens& source : sources) {
    if (source.top_k != sources[0].top_k) {
      Refuse(
          fmt::format("dispatch: a rank has top_k {}, another {}", source.top_k, sources[0].top_k));
    }
    CheckRouted(source, partition.num_experts());
  }
}

// Appends the slots of one received token. Slots of other ranks' experts are cut in local ids.
void AppendSlots(const ExpertPartition& partition, size_t rank, const RoutedTokens& source,
                 size_t token, IdSpace id_space, ReceivedRows& rows) {
  const auto ids = source.Ids(token);
  const auto weights = source.Weights(token);
  for (size_t k = 0; k < ids.size(); ++k) {
    const int32_t local = partition.LocalId(ids[k], rank);
    if (local >= 0) ++rows.per_expert[static_cast<size_t>(local)];
    const bool is_cut = id_space == IdSpace::kLocal && local < 0;
    rows.topk_ids.push_back(id_space == IdSpace::kLocal ? local : ids[k]);
    rows.topk_weights.push_back(is_cut ? 0.0f : weights[k]);
  }
}

}  // namespace

ExpertPartition::ExpertPartition(size_t num_experts, size_t num_ranks)
    : num_ranks_(num_ranks), num_local_(num_ranks == 0 ? 0 : num_experts / num_ranks) {
  if (num_ranks == 0 || num_experts == 0 || num_experts % num_ranks != 0) {
    Refuse(fmt::format("expert parallelism: {} experts cannot be divided evenly among {} ranks",
                       num_experts, num_ranks));
  }
  if (num_experts > kMaxCount) {
    Refuse(fmt::format("expert parallelism: {} experts, at most {} are possible", num_experts,
                       kMaxCount));
  }
}

void CheckRouted(const RoutedTokens& tokens, size_t num_experts) {
  if (tokens.top_k == 0 || tokens.ids.size() % tokens.top_k != 0 ||
      tokens.weights.size() != tokens.ids.size()) {
    Refuse(
        fmt::format("dispatch: {} ids and {} weights with top_k {}, expected [tokens, top_k] of "
                    "both",
                    tokens.ids.size(), tokens.weights.size(), tokens.top_k));
  }
  CheckIds(tokens.ids, num_experts, tokens.top_k);
}

DispatchLayout ComputeDispatchLayout(const ExpertPartition& partition, const RoutedTokens& tokens) {
  CheckRouted(tokens, partition.num_experts());
  const size_t num_ranks = partition.num_ranks();
  DispatchLayout layout{std::vector<int32_t>(num_ranks),
                        std::vector<int32_t>(partition.num_experts()),
                        std::vector<uint8_t>(tokens.num_tokens() * num_ranks)};
  for (size_t token = 0; token < tokens.num_tokens(); ++token) {
    for (int32_t id : tokens.Ids(token)) {
      if (id < 0) continue;
      const size_t rank = partition.RankOf(id);
      uint8_t& is_in_rank = layout.is_token_in_rank[token * num_ranks + rank];
      if (is_in_rank == 0) ++layout.num_tokens_per_rank[rank];
      is_in_rank = 1;
      ++layout.num_tokens_per_expert[static_cast<size_t>(id)];
    }
  }
  return layout;
}

std::vector<int32_t> TokensForRank(const DispatchLayout& layout, size_t rank) {
  const size_t num_ranks = layout.num_tokens_per_rank.size();
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(layout.num_tokens_per_rank[rank]));
  for (size_t i = rank; i < layout.is_token_in_rank.size(); i += num_ranks) {
    if (layout.is_token_in_rank[i] != 0) tokens.push_back(Narrow(i / num_ranks));
  }
  return tokens;
}

ReceivedRows ReceiveRows(const ExpertPartition& partition, size_t rank,
                         std::span<const RoutedTokens> sources, IdSpace id_space) {
  CheckSources(partition, rank, sources);
  ReceivedRows rows;
  rows.per_expert.resize(partition.num_local());
  for (size_t source = 0; source < sources.size(); ++source) {
    const DispatchLayout layout = ComputeDispatchLayout(partition, sources[source]);
    for (int32_t token : TokensForRank(layout, rank)) {
      rows.src_rank.push_back(Narrow(source));
      rows.src_token.push_back(token);
      AppendSlots(partition, rank, sources[source], static_cast<size_t>(token), id_space, rows);
    }
  }
  return rows;
}

std::vector<int32_t> AlignCounts(std::span<const int32_t> counts, size_t alignment) {
  if (alignment == 0) Refuse("expert_alignment is 0, expected at least 1");
  std::vector<int32_t> aligned;
  for (int32_t count : counts) {
    const size_t rounded = (static_cast<size_t>(count) + alignment - 1) / alignment * alignment;
    aligned.push_back(Narrow(rounded));
  }
  return aligned;
}

LowLatencyRows ReceiveLowLatency(const ExpertPartition& partition, size_t rank,
                                 std::span<const RoutedTokens> sources,
                                 size_t max_tokens_per_rank) {
  CheckSources(partition, rank, sources);
  for (size_t source = 0; source < sources.size(); ++source) {
    if (sources[source].num_tokens() > max_tokens_per_rank) {
      Refuse(
          fmt::format("low-latency dispatch: rank {} has {} tokens, "
                      "num_max_dispatch_tokens_per_rank allows {}",
                      source, sources[source].num_tokens(), max_tokens_per_rank));
    }
  }
  const size_t num_ranks = partition.num_ranks();
  LowLatencyRows rows;
  rows.masked_m.resize(partition.num_local());
  rows.recv_from.resize(partition.num_local() * num_ranks);
  for (size_t expert = 0; expert < partition.num_local(); ++expert) {
    const int32_t id = Narrow(rank * partition.num_local() + expert);
    for (size_t source = 0; source < num_ranks; ++source) {
      const RoutedTokens& tokens = sources[source];
      for (size_t route = 0; route < tokens.ids.size(); ++route) {
        if (tokens.ids[route] != id) continue;
        ++rows.masked_m[expert];
        ++rows.recv_from[expert * num_ranks + source];
        rows.src_rank.push_back(Narrow(source));
        rows.src_token.push_back(Narrow(route / tokens.top_k));
        rows.src_column.push_back(Narrow(route % tokens.top_k));
      }
    }
  }
  return rows;
}

size_t ExpectedRowsPerExpert(size_t num_tokens, size_t top_k, const ExpertPartition& partition) {
  const size_t num_experts = partition.num_experts();
  return (num_tokens * partition.num_ranks() * top_k + num_experts) / num_experts;
}

std::vector<int32_t> LocalExpertMap(const ExpertPartition& partition, size_t rank) {
  std::vector<int32_t> map(partition.num_experts());
  for (size_t id = 0; id < map.size(); ++id) map[id] = partition.LocalId(Narrow(id), rank);
  return map;
}

std::vector<int32_t> MapIds(std::span<const int32_t> map, std::span<const int32_t> ids) {
  CheckIds(ids, map.size(), 1);
  std::vector<int32_t> mapped;
  mapped.reserve(ids.size());
  for (int32_t id : ids) mapped.push_back(id < 0 ? -1 : map[static_cast<size_t>(id)]);
  return mapped;
}

SortedRoutes SortRoutes(std::span<const int32_t> ids, size_t num_experts) {
  CheckIds(ids, num_experts, 1);
  SortedRoutes routes;
  routes.counts.resize(num_experts);
  for (int32_t id : ids) {
    if (id >= 0) ++routes.counts[static_cast<size_t>(id)];
  }
  routes.cumulative.resize(num_experts);
  std::inclusive_scan(routes.counts.begin(), routes.counts.end(), routes.cumulative.begin());

  // A counting sort: `next` is the row of the next route of each expert.
  std::vector<int32_t> next(num_experts);
  std::exclusive_scan(routes.counts.begin(), routes.counts.end(), next.begin(), 0);
  routes.sorted_route.resize(num_experts == 0 ? 0 : static_cast<size_t>(routes.cumulative.back()));
  routes.route_to_row.assign(ids.size(), -1);
  for (size_t route = 0; route < ids.size(); ++route) {
    if (ids[route] < 0) continue;
    const int32_t row = next[static_cast<size_t>(ids[route])]++;
    routes.sorted_route[static_cast<size_t>(row)] = Narrow(route);
    routes.route_to_row[route] = row;
  }
  return routes;
}

}  // namespace switchyard::moe::dispatchers
