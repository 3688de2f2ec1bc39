// A case of kind "dispatch": its inputs, and what its protocol's tensors say of what ranks
// received. The expert of these cases is y_e(x) = gain[e] * x, so that combine can be checked
// without a matmul.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/dispatchers/layout.h"
#include "replay/case.h"

namespace switchyard::replay {

// What one rank has received, and what came back to it. Which members count depends on the
// protocol.
struct RankView {
  // Received rows in their order; of low-latency rows by local expert. -1, -1 for a row that is no
  // token of these experts.
  std::vector<int32_t> src_rank, src_token;  // [m]
  std::vector<double> x;                     // [m, H] as it arrived
  std::vector<double> codes, scales;         // [m, H], [m, H/128] with an fp8 payload
  std::vector<int32_t> topk_ids;             // [m, K], not of low-latency rows
  std::vector<float> topk_weights;           // [m, K], likewise
  std::vector<int32_t> per_expert;           // [L] rows, or slots, of each local expert
  std::vector<int32_t> expected_m;           // [1], low latency
  std::vector<double> combined;              // [T, H] of the rank's own tokens
};

// The routes of local_sort, and what was made with them.
struct LocalSortView {
  moe::dispatchers::SortedRoutes routes;
  std::vector<double> sorted_x;  // [m, H]
  std::vector<double> combined;  // [n, H]
};

// Tokens of all ranks stand one after the other.
class DispatchCase {
 public:
  enum class Protocol { kDeepepNormal, kDeepepLl, kMori, kAllGather, kLocalSort };

  // Errors: kCorruptData naming the field or tensor; kInvalidArgument for ids that are no expert;
  //   kUnsupported for an unknown protocol or payload.
  explicit DispatchCase(const CaseFile& file);

  const CaseFile& file() const { return file_; }
  Protocol protocol() const { return protocol_; }
  const moe::dispatchers::ExpertPartition& partition() const { return partition_; }
  size_t num_ranks() const { return partition_.num_ranks(); }
  size_t top_k() const { return top_k_; }
  size_t hidden_size() const { return hidden_size_; }
  size_t num_tokens() const { return first_token_.back(); }
  size_t num_tokens(size_t rank) const { return first_token_[rank + 1] - first_token_[rank]; }
  size_t first_token(size_t rank) const { return first_token_[rank]; }
  bool is_fp8() const { return is_fp8_; }
  // Of the fp8 payload: the low-latency kernel has a floor of its own (contract 3.1).
  float amax_floor() const { return protocol_ == Protocol::kDeepepLl ? 1e-4f : 1e-10f; }

  std::span<const float> x() const { return x_; }                 // [n, H], as it is sent
  std::span<const double> arriving() const { return arriving_; }  // [n, H], after the wire format
  std::span<const int32_t> ids() const { return ids_; }
  std::span<const float> weights() const { return weights_; }
  std::span<const float> gain() const { return gain_; }
  moe::dispatchers::RoutedTokens All() const { return {ids_, weights_, top_k_}; }
  // The tokens of one rank, and of each.
  moe::dispatchers::RoutedTokens Of(size_t rank) const;
  std::vector<moe::dispatchers::RoutedTokens> Sources() const;

  // The experts of one received row, weighted and summed; `ids` count from `first_expert`, -1 is
  // skipped.
  double SumOfExperts(std::span<const int32_t> ids, std::span<const float> weights,
                      size_t first_expert) const;
  // The ids of a rank's received rows among its own experts, -1 = another's.
  std::vector<int32_t> LocalIds(size_t rank, const RankView& view) const;

  // The tensors of the protocol, from the views of all ranks.
  // Errors: kInternal if a view has not the rows that its protocol always brings.
  Outputs Tensors(const std::vector<RankView>& ranks) const;
  Outputs Tensors(const LocalSortView& view) const;

 private:
  void ReadTokenCounts();
  void SendAsFp8();
  void PutPayload(const std::vector<RankView>& ranks, Outputs& outputs) const;
  void PutSendLayouts(const std::vector<RankView>& ranks, Outputs& outputs) const;
  void PutTokenRows(const std::vector<RankView>& ranks, Outputs& outputs) const;
  void PutLowLatency(const std::vector<RankView>& ranks, Outputs& outputs) const;
  void PutAllGather(const std::vector<RankView>& ranks, Outputs& outputs) const;
  // Appends row i of x times `factor`.
  void AppendScaled(const RankView& view, size_t i, double factor, std::vector<double>& to) const;

  const CaseFile& file_;
  moe::dispatchers::ExpertPartition partition_;
  size_t top_k_;
  size_t hidden_size_;
  Protocol protocol_;
  bool is_fp8_ = false;
  std::vector<size_t> first_token_{0};  // [W + 1]
  std::vector<float> x_;
  std::vector<double> arriving_;
  std::vector<double> codes_, scales_;  // of the fp8 payload
  std::vector<int32_t> ids_;
  std::vector<float> weights_, gain_;
};

}  // namespace switchyard::replay
