// Rows and results between the ranks of a node, through a shared window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "moe/ep/exchange.h"
#include "switchyard/parallel/shared_window.h"

namespace switchyard::moe {

//   part of a rank | pushed [node ranks, push_rows] | published [n] | lists [node ranks, n] |
//                  | results [n, K * parts] |
//
//   publish: the sender packs each row once into its own `published` and writes into its own
//            `lists` which of them each peer has to read; the peer reads them there.
//   push:    few rows: the sender copies them into its place in the peer's `pushed`.
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
class NodeExchange {
 public:
  // Collective.
  explicit NodeExchange(Exchange& exchange);

  // Waits until the peers have left an exchange that was given up. Before the epoch goes on.
  void AwaitOldExchange();
  void Begin();
  // Gives the exchange under way up.
  void GiveUp();

  // Where to pack so many tokens; null: anywhere, they are pushed.
  std::byte* PackRoom(size_t num_tokens) const;
  // The tokens of exchange.targets, packed in PackRoom if there is one.
  void Send(ExecContext& context, const PackedTokens& packed, size_t num_tokens);
  // Adds the rows of a peer.
  void Receive(size_t source, std::vector<const std::byte*>& rows);

  // Where the result of another rank's token goes: null for one that is not waiting for it.
  // slot = t * NumSlots() + …
  std::byte* ResultSlot(size_t owner, size_t slot) const;
  // All results of this rank are in their places.
  void PostResults(size_t count);
  // Waits for those of the peers. Shapes: rows [T * NumSlots()].
  void CollectResults(std::span<const std::byte*> rows);

 private:
  enum Flag : size_t { kRowsFlag = 0, kResultsFlag = 1, kNumFlags = 2 };

  // What a peer says; nothing if it is, or has just been, taken out.
  std::optional<Signal> AwaitPeer(size_t rank, Flag flag, std::string_view stage);
  void PostAll(Flag flag, uint32_t count);
  std::byte* Place(size_t rank, size_t slot) const;
  std::byte* Pushed(size_t receiver, size_t sender) const;
  std::byte* Published(size_t rank) const;
  uint32_t* List(size_t sender, size_t receiver) const;

  Exchange& exchange_;
  const size_t row_bytes_;
  size_t push_rows_;
  size_t published_at_ = 0, lists_at_ = 0, results_at_ = 0;  // bytes into a part
  std::unique_ptr<SharedWindow> window_;                     // null in a group of one
  bool posted_[kNumFlags] = {};
  bool must_drain_ = false;
};

}  // namespace switchyard::moe
