// Rows and results between nodes, once for each node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moe/ep/net_exchange.h"
#include "switchyard/parallel/shared_window.h"

namespace switchyard::moe {

// The ranks with the same number on their nodes are a rail. What rank (a, i), number i of node a,
// has for ranks of node b goes over rail i to its partner (b, i), which relays it:
//
//   out:   a token with experts on node b travels to (b, i) once; there it is put into the relay's
//          window, with lists of which rows each rank of the node has to read, in place.
//   home:  each rank of node b writes the results of that token into the relay's window; the relay
//          sends them back by token and slot. With ResultSum::kRows it adds those of a token up
//          first, so that one row travels for each token and node.
//
//   part of a rank | relayed [nodes - 1, n] | lists [node ranks, (nodes - 1) * n] |
//                  | results [nodes - 1, n, K * parts] |
//
// Two flags from each rank to each on its node: 0 = rows are there (their number), 1 = results of
// what the receiver relays are there. One copy of each area is enough, as in NodeExchange:
//   relayed, lists   the relay writes those of e in its FinishDispatch; their readers have left
//                    those of e - 1 when they posted results of e - 1, for which the relay has
//                    waited in Relay of e - 1
//   results          a rank writes those of e in its StartCombine, after the relay's rows of e,
//                    which the relay has posted after it sent those of e - 1; without dispatches,
//                    after GatherSlices of e - 1, which all ranks wait for
// A rank that gives up aborts the group, which ends the waits for flags too, and with them all use
// of the window.
class RailExchange final : public NetExchange {
 public:
  // Collective. `rail` is this rank's, in order of nodes.
  RailExchange(Exchange& exchange, ProcessGroup& rail);

  void StartDispatch(ExecContext& context, const PackedTokens& packed,
                     const TopKOutput& topk) override;
  void FinishDispatch(ExecContext& context, RowsOfSources& rows) override;
  void StartCombine(ExecContext& context, const ComputedResults& results,
                    const RowPacker& packer) override;
  void Relay(ExecContext& context) override;
  void CollectResults(std::span<const std::byte*> rows) override;
  void Drop() noexcept override;

 private:
  enum Flag : size_t { kRowsFlag = 0, kResultsFlag = 1, kNumFlags = 2 };

  // The tokens of this rank's partner on one node that have experts here.
  struct Relayed {
    std::vector<uint32_t> token;
    std::vector<int32_t> ids;  // [tokens * K]

    void Clear() {
      token.clear();
      ids.clear();
    }
  };
  // Everything below speaks of other nodes only.
  template <typename Body>
  void ForEachNode(const Body& body) const;
  size_t BucketOf(size_t rank) const;  // for Exchange::List…: the rank's node
  // Places are numbers of rows in `relayed`, and of tokens in `results`.
  size_t FirstPlace(size_t node) const;
  size_t NodeOfPlace(size_t place) const;
  size_t LocalIndex() const { return exchange_.nodes.index[exchange_.group.rank()]; }
  std::byte* RelayedRow(size_t relay, size_t place) const;
  uint32_t* List(size_t relay, size_t reader) const;
  std::byte* ResultSlot(size_t relay, size_t place, size_t slot) const;

  Signal AwaitPeer(size_t rank, Flag flag, std::string_view stage) const;
  void ReadArrivals();
  void Publish(ExecContext& context);
  void TakeFromRelay(size_t relay, RowsOfSources& rows) const;
  void ListWithoutDispatch(const ComputedResults& results);
  void ListResultsToSend();
  void SumResults(ExecContext& context, std::byte* to);

  Exchange& exchange_;
  const size_t row_bytes_;
  const size_t num_places_;
  size_t lists_at_ = 0, results_at_ = 0;  // bytes into a part
  std::unique_ptr<SharedWindow> window_;
  NetLeg out_, home_;
  Exchange::Lists tokens_of_;     // [nodes] that travel to each
  std::vector<Relayed> relayed_;  // [nodes]
  Exchange::Lists for_peer_;      // [node ranks] places of `relayed` for each
  Exchange::Lists of_node_;       // the same while they are read, of one node's tokens
  std::vector<bool> is_read_;     // [places] by any other rank
  Exchange::Lists slots_of_;      // [nodes] of the own tokens' results
  // The results that this rank sends home: row i is the sum of parts [begin[i], begin[i + 1]).
  std::vector<const std::byte*> parts_;
  std::vector<size_t> begin_;
};

}  // namespace switchyard::moe
