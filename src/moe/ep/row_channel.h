// Moves rows to the ranks that compute them and their results back: what all dispatchers share.
// Communication, sections 5 and 6.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe/ep/wire.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

// All that decides the size and layout of the buffers.
struct RowChannelOptions {
  std::string protocol;    // "deepep_ll", for messages and so that protocols do not share buffers
  std::string setting;     // that limits max_tokens
  size_t max_tokens = 0;   // of one rank in one dispatch
  size_t hidden_size = 0;  // H
  size_t num_experts = 0;  // global ids
  WireLayout wire;         // of dispatched rows; one without values where nothing is dispatched
  ValueLayout home;        // of results
  ActQuant home_quant;     // how they are quantised, where `home` holds codes
  // Rows that are added up to one route's: the ranks that split an expert.
  size_t parts = 1;
  bool dispatches = true;  // false: every rank has all tokens, only results travel
  bool elastic = false;    // a rank that does not answer is taken out; else the pass fails

  bool operator==(const RowChannelOptions& other) const;
};

// The rows that a rank has received, by source rank and then token.
struct ReceivedTokens {
  std::span<const std::byte* const> rows;  // [N] packed as WireLayout says
  std::span<const uint32_t> begin;         // [R + 1] first row of each source
  std::span<const uint32_t> source;        // [N]
  std::span<const uint32_t> token;         // [N] number on its source

  size_t size() const { return token.size(); }
};

// The tokens whose results come back: [first, first + num_tokens) of what this rank routed.
struct OwnTokens {
  size_t num_tokens = 0;
  TopKOutput topk;  // of these tokens, global ids
};

// One protocol's buffers on one group. One exchange at a time: StartDispatch, FinishDispatch,
// StartCombine, FinishCombine; the first two fall away without dispatches.
//
// Inside a node everything goes through a shared window, with no call of the carrier:
//
//   part of a rank | pushed [node ranks, push_rows] | published [n] | lists [node ranks, n] |
//                  | results [n, K * parts] |
//
//   publish: the sender packs each row once into its own `published` and writes into its own
//            `lists` which of them each peer has to read; the peer reads them there.
//   push:    few rows: the sender packs them into its place in the peer's `pushed`.
//   results: whoever computed a route of token t, slot k writes it into the owner's
//            results[t, k * parts + part]; the owner adds them up in order of k.
//
// Two flags for each pair of ranks, counted in epochs: 0 = rows are there (their number, and which
// way), 1 = results are there. One copy of each area is enough, because a rank writes for epoch e
// only what its readers have left behind in e - 1:
//   published, lists, my place in pushed        read before the peer's results flag of e - 1, which
//                                               I have waited for in my combine of e - 1
//   results at an owner                         read before the owner's rows flag of e, which I
//                                               have waited for; without dispatches, before
//                                               GatherSlices of e - 1, which all ranks wait for
// A rank that gives an exchange up posts its remaining flags with the count kGivenUp, so nobody
// waits for it; before its next exchange it waits until all have left the old one.
//
// Between nodes rows and results travel by AllToAllV, counts first.
class RowChannel {
 public:
  // Collective.
  RowChannel(ExpertParallel& ep, ProcessGroup& group, RowChannelOptions options);
  ~RowChannel();

  const RowChannelOptions& options() const { return options_; }
  ProcessGroup& group() const { return group_; }

  // The rank of the group that computes part 0 of an expert, the others following it.
  size_t RankOf(int32_t id) const { return static_cast<size_t>(id) / num_local_ * options_.parts; }

  // Sends the tokens of `rows`, once to each rank that has one of their experts, or to all ranks.
  // Shapes: rows [T, H], topk [T, K]; both stay until FinishDispatch.
  // Errors: kInvalidArgument naming the setting if T > max_tokens, or the id.
  void StartDispatch(ExecContext& context, const QuantRows& rows, const TopKOutput& topk,
                     size_t layer_id, bool to_all);
  const ReceivedTokens& FinishDispatch(ExecContext& context);

  // Without a dispatch: the rows that every rank has, as if they had been received.
  void BeginWithoutDispatch(size_t layer_id);

  // How results add up.
  enum class Sum {
    kRoutes,  // out[t] = sum over k of weight[t, k] * row(t, k), in order of k
    kRows,    // rows are weighted sums of one rank each, in the slot of the token's first expert
              // there; they are added in order of slots
  };
  // What this rank has computed.
  struct Results {
    const ReceivedTokens* received;
    ConstRows rows;                   // [M, H'], H' <= H
    std::span<const int32_t> row_of;  // [N * K] row of slot k of received token i, -1 = none here
    Sum sum = Sum::kRoutes;
  };
  // `results` stay until FinishCombine; the rows that the own rank gets are not copied.
  void StartCombine(ExecContext& context, const Results& results, const OwnTokens& own);

  // Shapes: returns [T, H] in context.arena, T of the own tokens.
  Rows FinishCombine(ExecContext& context);

  // Gives the exchange under way up; harmless without one.
  void GiveUp() noexcept;

 private:
  struct Peer;
  enum Flag : size_t { kRowsFlag = 0, kResultsFlag = 1, kNumFlags = 2 };

  bool IsActive(size_t rank) const;
  void CheckDispatch(const QuantRows& rows, const TopKOutput& topk) const;
  void Begin(size_t layer_id);
  void ListTargets(ExecContext& context, const TopKOutput& topk, bool to_all);
  void SendInNode(ExecContext& context, const QuantRows& rows, const TopKOutput& topk);
  void SendOverNet(ExecContext& context, const QuantRows& rows, const TopKOutput& topk);
  void ReceiveInNode(size_t source, std::vector<const std::byte*>& rows);
  // What a peer says; nothing if it is, or has just been, taken out.
  std::optional<Signal> AwaitPeer(size_t rank, Flag flag, std::string_view stage);
  Signal LookUntil(size_t rank, Flag flag, const Deadline& deadline) const;
  void PostAll(Flag flag, uint32_t count);
  void AwaitOldExchange();
  [[noreturn]] void Rethrow(std::string_view stage, const Error& error) const;
  void WaitForNet(std::string_view stage);
  [[noreturn]] void ThrowGivenUp(size_t rank, std::string_view stage) const;
  std::byte* ResultSlot(size_t rank, size_t slot) const;
  size_t NumSlots() const { return options_.wire.top_k() * options_.parts; }
  std::string Where(std::string_view stage) const;
  void PackResult(ConstRows rows, const QuantRows& coded, size_t row, std::byte* to) const;
  void SendResultsOverNet(ExecContext& context, const Results& results, const QuantRows& coded);
  // Calls body(t * K + k) for each slot whose result `rank` sends here, ascending.
  template <typename Body>
  void ForEachSlotOf(size_t rank, const Body& body) const;
  void AddRoute(size_t slot, std::span<const std::byte* const> rows, float weight, float* decoded,
                float* out) const;

  ExpertParallel& ep_;
  ProcessGroup& group_;
  RowChannelOptions options_;
  size_t num_local_;
  std::vector<bool> in_node_;  // [R] shares memory with this rank
  bool has_net_ = false;
  std::unique_ptr<SharedWindow> window_;                     // null for a rank alone on its node
  size_t published_at_ = 0, lists_at_ = 0, results_at_ = 0;  // bytes into a part
  size_t push_rows_ = 0;
  std::vector<size_t> node_index_;  // [R] number among node_peers

  // The exchange under way.
  bool is_open_ = false;
  bool posted_[kNumFlags] = {};
  bool must_drain_ = false;
  uint32_t epoch_ = 0;
  size_t layer_id_ = 0;
  std::vector<std::vector<uint32_t>> targets_;  // [R] tokens that go to each rank
  ReceivedTokens received_;
  std::vector<const std::byte*> received_rows_;
  std::vector<uint32_t> received_begin_, received_source_, received_token_;
  OwnTokens own_;
  Sum sum_ = Sum::kRoutes;
  std::span<const std::byte*> own_rows_;  // [T * K] results of the own rank, null where none
  size_t own_cols_ = 0;                   // values of each; the rest are 0

  // Between nodes; buffers grow and stay.
  struct NetBuffers {
    std::vector<std::byte> send, recv;
    std::vector<size_t> send_rows, recv_rows;
    std::vector<uint32_t> send_counts, recv_counts;
  };
  std::shared_ptr<NetBuffers> net_out_, net_home_;
  PendingExchange pending_;
  std::vector<size_t> net_slots_;  // t * K * parts + … of each row that arrives
};

}  // namespace switchyard::moe
