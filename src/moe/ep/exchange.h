// What the parts of a row channel have in common: the words in which its users speak to it, and one
// exchange's plan of who gets what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe/ep/node_map.h"
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
  ActQuant wire_quant;     // how they are quantised, where `wire` holds codes
  ValueLayout home;        // of results
  ActQuant home_quant;     // how they are quantised, where `home` holds codes
  // Rows that are added up to one route's: the ranks that split an expert.
  size_t parts = 1;
  bool dispatches = true;  // false: every rank has all tokens, only results travel
  // Within one node, a rank that does not answer is taken out; else the pass fails.
  bool elastic = false;
  size_t batch = 0;  // of two-batch overlap, 0 or 1: each has buffers of its own

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

// How results add up.
enum class ResultSum {
  kRoutes,  // out[t] = sum over k of weight[t, k] * row(t, k), in order of k
  kRows,  // rows are weighted sums of one rank each (over rails: of one node each), in the slot of
          // the token's first expert there; they are added in order of slots
};

// What a rank has computed.
struct ComputedResults {
  const ReceivedTokens* received;
  ConstRows rows;                   // [M, H'], H' <= H
  std::span<const int32_t> row_of;  // [N * K] row of slot k of received token i, -1 = none here
  ResultSum sum = ResultSum::kRoutes;
  std::span<const int32_t> ids = {};  // [N * K] global ids of the tokens; only without a dispatch
};

// Puts f32 rows into the form in which they travel.
class RowPacker {
 public:
  // Quantises them as `how` says if `layout` holds codes. Shapes: rows [M, H'], H' <= H; they and
  // `layout` stay while it is used.
  RowPacker(ExecContext& context, ConstRows rows, const ActQuant& how, const ValueLayout& layout);
  // layout.bytes() bytes, scales behind the codes; columns that are not there are 0.
  void Pack(size_t row, std::byte* to) const;

 private:
  ConstRows rows_;
  QuantRows coded_;
  const ValueLayout& layout_;
};

// One exchange under way.
//
// A token of `topk` has results in slots k * parts + part, part by part from the ranks that split
// the expert of its place k.
class Exchange {
 public:
  // Errors: kInvalidArgument and kUnsupported for numbers of experts that do not fit.
  Exchange(ExpertParallel& ep_in, ProcessGroup& group_in, RowChannelOptions options_in);

  ExpertParallel& ep;
  ProcessGroup& group;
  const RowChannelOptions options;
  const NodeMap nodes;
  const size_t num_local;  // experts of a rank
  const bool has_net;      // the group is on several nodes

  uint32_t epoch;
  size_t layer_id = 0;
  bool to_all = false;                         // every rank gets all tokens
  std::vector<std::vector<uint32_t>> targets;  // [R] tokens that go to each rank
  OwnTokens own;
  ResultSum sum = ResultSum::kRoutes;
  std::vector<std::vector<uint32_t>> result_slots;  // [R] t * NumSlots() + slot of what comes home
  ExchangeStats stats;

  // The rank that computes part 0 of an expert, the others following it.
  size_t RankOf(int32_t id) const { return static_cast<size_t>(id) / num_local * options.parts; }
  size_t NumSlots() const { return options.wire.top_k() * options.parts; }

  bool IsActive(size_t rank) const;
  Deadline Limit(std::string_view stage) const;
  std::string Where(std::string_view stage) const;
  [[noreturn]] void Rethrow(std::string_view stage, const Error& error) const;
  // What `rank` posts in this epoch or a later one. A process that has ended is noticed long before
  // the deadline.
  Signal Await(const SharedWindow& window, size_t rank, size_t flag,
               const Deadline& deadline) const;
  // A window with flags as if all epochs before this one had been. Collective; null in a group of
  // one.
  std::unique_ptr<SharedWindow> MakeWindow(std::string_view name, size_t bytes_per_rank,
                                           size_t num_flags, std::string_view setting) const;

  // The tokens for each bucket, ascending, where bucket_of(rank) takes what goes to a rank, or is
  // kNowhere.
  static constexpr size_t kNowhere = SIZE_MAX;
  using Lists = std::vector<std::vector<uint32_t>>;
  template <typename BucketOf>
  void ListTokens(const TopKOutput& topk, const BucketOf& bucket_of, Lists& lists) const;
  // The slots t * NumSlots() + … of results that come from each bucket, ascending: with kRows one
  // for each token.
  template <typename BucketOf>
  void ListSlots(const TopKOutput& topk, const BucketOf& bucket_of, Lists& lists) const;
  // Calls body(slot, rank) for each result that a rank has of one token, in order of slots.
  template <typename Body>
  void ForEachResult(std::span<const int32_t> ids, const Body& body) const;
  // How many results there are for the sources of which goes(source) holds.
  template <typename Goes>
  size_t CountResults(const ComputedResults& results, const Goes& goes) const;
};

// Posts `epoch` to all peers of the node as if it had come in steps, and waits for theirs: flags
// begin with epoch 0, and compare modulo 2^32.
void PostFirstEpoch(ProcessGroup& group, SharedWindow& window, uint32_t epoch,
                    const Deadline& deadline);

// The values of a packed result: in `packed` itself, or decoded into `scratch` [H].
const float* ResultValues(const ValueLayout& home, const std::byte* packed, float* scratch);

template <typename BucketOf>
void Exchange::ListTokens(const TopKOutput& topk, const BucketOf& bucket_of, Lists& lists) const {
  for (std::vector<uint32_t>& tokens : lists) tokens.clear();
  for (size_t t = 0; t < topk.num_tokens; ++t) {
    const auto add = [&, token = static_cast<uint32_t>(t)](size_t rank) {
      const size_t bucket = bucket_of(rank);
      if (bucket == kNowhere) return;
      std::vector<uint32_t>& tokens = lists[bucket];
      if (tokens.empty() || tokens.back() != token) tokens.push_back(token);
    };
    if (to_all) {
      for (size_t rank = 0; rank < group.size(); ++rank) add(rank);
      continue;
    }
    for (int32_t id : topk.Ids(t)) {
      if (id >= 0) add(RankOf(id));
    }
  }
}

template <typename BucketOf>
void Exchange::ListSlots(const TopKOutput& topk, const BucketOf& bucket_of, Lists& lists) const {
  for (std::vector<uint32_t>& slots : lists) slots.clear();
  for (size_t t = 0; t < topk.num_tokens; ++t) {
    const size_t first = t * NumSlots();
    ForEachResult(topk.Ids(t), [&](size_t slot, size_t rank) {
      const size_t bucket = bucket_of(rank);
      if (bucket == kNowhere) return;
      std::vector<uint32_t>& slots = lists[bucket];
      if (sum == ResultSum::kRows && !slots.empty() && slots.back() >= first) return;
      slots.push_back(static_cast<uint32_t>(first + slot));
    });
  }
}

template <typename Goes>
size_t Exchange::CountResults(const ComputedResults& results, const Goes& goes) const {
  const size_t top_k = options.wire.top_k();
  size_t count = 0;
  for (size_t i = 0; i < results.received->size(); ++i) {
    if (!goes(results.received->source[i])) continue;
    for (int32_t row : results.row_of.subspan(i * top_k, top_k)) count += row >= 0 ? 1 : 0;
  }
  return count;
}

template <typename Body>
void Exchange::ForEachResult(std::span<const int32_t> ids, const Body& body) const {
  const auto seen = [&](size_t k) {
    for (size_t before = 0; before < k; ++before) {
      if (ids[before] >= 0 && RankOf(ids[before]) == RankOf(ids[k])) return true;
    }
    return false;
  };
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0 || (sum == ResultSum::kRows && seen(k))) continue;
    for (size_t part = 0; part < options.parts; ++part)
      body(k * options.parts + part, RankOf(ids[k]) + part);
  }
}

}  // namespace switchyard::moe
