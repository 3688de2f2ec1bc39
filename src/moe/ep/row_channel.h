// Moves rows to the ranks that compute them and their results back: what all dispatchers share.
// Communication, sections 5 and 6.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moe/ep/exchange.h"
#include "moe/ep/net_exchange.h"
#include "moe/ep/node_exchange.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

// One protocol's buffers on one group. One exchange at a time: StartDispatch, FinishDispatch,
// StartCombine, FinishCombine; the first two fall away without dispatches. Channels of different
// batches may have exchanges under way at once, as long as all ranks take the stages in one order.
//
// Inside a node everything goes through a shared window, with no call of the carrier
// (NodeExchange). Between nodes rows and results travel by AllToAllV, counts first: from rank to
// rank, or once for each node (RailExchange; NodeMap::UsesRails says which).
//
// A rank that gives an exchange up tells its peers, and nobody waits for it. Collectives cannot be
// left by one rank alone, so on several nodes that aborts the group.
class RowChannel {
 public:
  using Sum = ResultSum;
  using Results = ComputedResults;

  // Collective. `net` carries what goes between nodes: the rail or all ranks, see
  // ExpertParallel::Channel; null on one node.
  RowChannel(ExpertParallel& ep, ProcessGroup& group, ProcessGroup* net, RowChannelOptions options);
  ~RowChannel();

  const RowChannelOptions& options() const { return exchange_.options; }
  ProcessGroup& group() const { return exchange_.group; }
  // What this rank has sent so far.
  const ExchangeStats& stats() const { return exchange_.stats; }

  // Sends tokens, once to each rank that has one of their experts, or to all ranks.
  // Shapes: hidden [T, H], topk [T, K]; both stay until FinishDispatch.
  // Errors: kInvalidArgument naming the setting if T > max_tokens, or the id.
  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk,
                     size_t layer_id, bool to_all);
  // The rows stay where they are until StartCombine.
  const ReceivedTokens& FinishDispatch(ExecContext& context);

  // Without a dispatch: the rows that every rank has, as if they had been received.
  void BeginWithoutDispatch(size_t layer_id);

  // `results` stay until FinishCombine; the rows that the own rank gets are not copied.
  void StartCombine(ExecContext& context, const Results& results, const OwnTokens& own);

  // Shapes: returns [T, H] in context.arena, T of the own tokens.
  Rows FinishCombine(ExecContext& context);

  // Gives the exchange under way up; harmless without one.
  void GiveUp() noexcept;

 private:
  void CheckDispatch(ConstRows hidden, const TopKOutput& topk) const;
  void CheckCombine(const Results& results, const OwnTokens& own) const;
  void Begin(size_t layer_id);
  PackedTokens Pack(ExecContext& context, ConstRows hidden, const TopKOutput& topk) const;
  void PutResultsInNode(ExecContext& context, const Results& results, const RowPacker& packer);
  // What one token's sum is made of, for each worker.
  struct Summands {
    size_t slots;  // at most so many
    size_t cols;
    const float** rows = nullptr;
    float* weights = nullptr;
    float* decoded = nullptr;  // rows that travel as codes; null if they do not

    Summands Of(size_t worker) const {
      const size_t first = worker * slots;
      return {slots, cols, rows + first, weights + first,
              decoded == nullptr ? nullptr : decoded + first * cols};
    }
  };
  Summands MakeSummands(ExecContext& context) const;
  void SumToken(size_t token, std::span<const std::byte* const> rows, const Summands& summands,
                float* out) const;

  Exchange exchange_;
  NodeExchange node_;
  std::unique_ptr<NetExchange> net_;  // null on one node
  bool is_open_ = false;
  NetExchange::RowsOfSources rows_of_;  // [R]
  ReceivedTokens received_;
  std::vector<const std::byte*> received_rows_;
  std::vector<uint32_t> received_begin_, received_source_, received_token_;
  std::span<const std::byte*> own_rows_;  // [T * K] results of the own rank, null where none
  size_t own_cols_ = 0;                   // values of each; the rest are 0
};

}  // namespace switchyard::moe
