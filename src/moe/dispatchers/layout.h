// Who sends what to whom: the layouts of the dispatch protocols as pure functions of the ids.
// Contract 3.2 to 3.5, 3.9, 4.1.1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe::dispatchers {

// Which rank holds which expert: rank r has the experts [r * E/R, (r+1) * E/R).
class ExpertPartition {
 public:
  // Errors: kInvalidArgument unless num_ranks >= 1 divides num_experts >= 1.
  ExpertPartition(size_t num_experts, size_t num_ranks);

  size_t num_experts() const { return num_ranks_ * num_local_; }
  size_t num_ranks() const { return num_ranks_; }
  size_t num_local() const { return num_local_; }  // L, experts of one rank

  // Of an id in [0, E).
  size_t RankOf(int32_t id) const { return static_cast<size_t>(id) / num_local_; }
  // The id among the experts of `rank`, -1 if it is none of them; -1 stays -1.
  int32_t LocalId(int32_t id, size_t rank) const {
    if (id < 0 || RankOf(id) != rank) return -1;
    return id - static_cast<int32_t>(rank * num_local_);
  }

 private:
  size_t num_ranks_;
  size_t num_local_;
};

// The routing of the tokens of one rank. Shapes: ids, weights [T, K] row-major; -1 = empty slot.
struct RoutedTokens {
  std::span<const int32_t> ids;
  std::span<const float> weights;
  size_t top_k = 0;

  size_t num_tokens() const { return top_k == 0 ? 0 : ids.size() / top_k; }
  std::span<const int32_t> Ids(size_t token) const { return ids.subspan(token * top_k, top_k); }
  std::span<const float> Weights(size_t token) const {
    return weights.subspan(token * top_k, top_k);
  }
};

// Errors: kInvalidArgument naming token, slot and value if an id is neither -1 nor in [0, E), and
//   if the sizes of ids and weights are no multiple of top_k or differ.
void CheckRouted(const RoutedTokens& tokens, size_t num_experts);

// What one rank sends (contract 3.4, "layout step"). A token goes once to each rank that holds at
// least one of its experts.
struct DispatchLayout {
  std::vector<int32_t> num_tokens_per_rank;    // [R]
  std::vector<int32_t> num_tokens_per_expert;  // [E], slots
  std::vector<uint8_t> is_token_in_rank;       // [T, R]
};

// Errors: those of CheckRouted.
DispatchLayout ComputeDispatchLayout(const ExpertPartition& partition, const RoutedTokens& tokens);

// The tokens of the layout's rank that go to `rank`, ascending: the order of sending.
std::vector<int32_t> TokensForRank(const DispatchLayout& layout, size_t rank);

// The rows that one rank receives, by source rank and then token.
struct ReceivedRows {
  std::vector<int32_t> src_rank;    // [m]
  std::vector<int32_t> src_token;   // [m], number of the token on its rank
  std::vector<int32_t> topk_ids;    // [m, K]
  std::vector<float> topk_weights;  // [m, K]
  std::vector<int32_t> per_expert;  // [L], slots of local experts

  size_t num_rows() const { return src_rank.size(); }
};

// What `rank` receives when every rank s sends the tokens sources[s]. With IdSpace::kLocal
// (deepep_normal, contract 3.4) ids are local, and the slots of other ranks' experts get id -1 and
// weight 0; with kGlobal (mori, contract 3.9) ids and weights stay as they were sent.
// Errors: kInvalidArgument if there is not one source per rank, if their top_k differ; CheckRouted.
ReceivedRows ReceiveRows(const ExpertPartition& partition, size_t rank,
                         std::span<const RoutedTokens> sources, IdSpace id_space);

// `counts` rounded up to multiples of `alignment` >= 1 (contract 3.4: expert_alignment).
// Errors: kInvalidArgument if alignment is 0.
std::vector<int32_t> AlignCounts(std::span<const int32_t> counts, size_t alignment);

// The rows that one rank receives in low-latency mode: one per slot, so a token that chooses two of
// its experts comes twice. By local expert, then source rank, then token. Contract 3.5.
struct LowLatencyRows {
  std::vector<int32_t> masked_m;    // [L], rows of each local expert
  std::vector<int32_t> recv_from;   // [L, R], of them from each source rank
  std::vector<int32_t> src_rank;    // [m]
  std::vector<int32_t> src_token;   // [m]
  std::vector<int32_t> src_column;  // [m], the slot of the token, for its weight
};

// Errors: as ReceiveRows, and kInvalidArgument naming the setting if a rank has more than
//   `max_tokens_per_rank` tokens.
LowLatencyRows ReceiveLowLatency(const ExpertPartition& partition, size_t rank,
                                 std::span<const RoutedTokens> sources, size_t max_tokens_per_rank);

// Rows to expect per local expert: a scheduling hint, never a bound. num_tokens is the local count.
size_t ExpectedRowsPerExpert(size_t num_tokens, size_t top_k, const ExpertPartition& partition);

// From each global id to the local id on `rank`, or -1 (contract 3.2). Shapes: returns [E].
std::vector<int32_t> LocalExpertMap(const ExpertPartition& partition, size_t rank);

// map[id] for each id; -1 stays. Shapes: returns that of ids.
// Errors: kInvalidArgument if an id is neither -1 nor an index of `map`.
std::vector<int32_t> MapIds(std::span<const int32_t> map, std::span<const int32_t> ids);

// The routes (token * K + slot) sorted by expert, without the empty slots; stable, so routes of one
// expert keep their order. Contract 4.1.1.
struct SortedRoutes {
  std::vector<int32_t> counts;        // [E]
  std::vector<int32_t> cumulative;    // [E], inclusive sums of counts
  std::vector<int32_t> sorted_route;  // [m]
  std::vector<int32_t> route_to_row;  // [T * K], "expanded_row_idx"; -1 for an empty slot
};

// Errors: kInvalidArgument if an id is neither -1 nor in [0, E), or if there are 2^31 routes.
SortedRoutes SortRoutes(std::span<const int32_t> ids, size_t num_experts);

}  // namespace switchyard::moe::dispatchers
