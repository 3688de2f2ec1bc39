// The memory of FuseEP and its flags.
//
// The part of a rank has an area for each source (rows, their scales, and which expert wants which
// row), and a place for each route of its own tokens, into which the rank that computed the route
// writes its row. Flags, from every rank to every rank:
//   block b    the rows for the experts of block b are in; count = routes. Posted in the order of
//   b. done, one for even and one for odd epochs: all of the receiver's routes are computed and
//   home.
//
// One step is one epoch. In epoch e every rank posts every block and one done flag to every rank,
// itself included, whatever happens: a rank that fails posts kAborted in place of what it has not
// posted yet. And no rank begins epoch e + 1 before it has seen the done flag of e of all ranks. So
// one half of memory suffices:
//   - A source writes rows of e + 1 into the area of d after it has seen the done flag of e of d,
//     which d posts after its last read of the area.
//   - d writes results of e + 1 home to s after it has seen a block of e + 1 of s, which s posts
//     after it has left epoch e, and with it its last read of the places. A result of e that d may
//     still have written was before the done flag that s has seen.
//   - A block flag of e + 1 takes the place of that of e after the receiver's done flag of e, which
//     it posts when it needs no block flag of e any more.
//   - A done flag has no such guard: a rank that fails at once posts it before its peers have
//   looked
//     at that of the epoch before. Hence two of them. That of e + 2 is posted after all ranks have
//     posted that of e + 1, and so have left e.
// In each case the reader finds e, or what was there before e; never anything later. So flags are
// compared for equality, and epochs may wrap around.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/group_base.h"
#include "switchyard/moe/fuseep/fused_moe.h"
#include "switchyard/parallel/deadline.h"
#include "switchyard/parallel/shared_window.h"

namespace switchyard::moe::fuseep {

// A route in the area of a source: which of its rows, and for which slot (token * K + k).
struct Route {
  uint32_t row;
  uint32_t slot;
};

// Where everything is in a rank's part.
struct Layout {
  // Errors: those of FusedMoeBytes.
  Layout(const FusedMoeShape& shape_in, size_t max_tokens_in, size_t num_ranks_in);

  FusedMoeShape shape;
  size_t max_tokens;
  size_t num_ranks;
  size_t experts_per_block;
  size_t num_blocks;
  size_t row_stride;   // bytes of a row that travels
  size_t home_stride;  // floats of a row that comes home
  // In the area of a source, after its rows:
  size_t scales_at;  // f32 [max_tokens]
  size_t counts_at;  // u32 [L] routes of each expert
  size_t routes_at;  // Route [max_tokens * K], by expert
  size_t source_bytes;
  size_t homes_at;  // after the areas of all sources
  size_t part_bytes;
  size_t flag_bytes;

  size_t num_flags() const { return num_blocks + 2; }
  size_t bytes() const { return part_bytes + flag_bytes; }
  // The experts of a block, of those of a rank.
  size_t BlockBegin(size_t block) const { return block * experts_per_block; }
  size_t BlockEnd(size_t block) const {
    return std::min(BlockBegin(block) + experts_per_block, shape.num_local_experts);
  }
};

// What a layer is called in messages; lives as long as the layer, because deadlines quote it.
struct Names {
  explicit Names(size_t layer_id);
  std::string layer, begin, dispatch, combine;
};

// Owns the window, and keeps the promises above.
class Window {
 public:
  // Collective.
  Window(ProcessGroup& group, const Layout& layout, const FusedMoeOptions& options);

  const Layout& layout() const { return layout_; }
  size_t rank() const { return group_.rank(); }
  size_t num_ranks() const { return layout_.num_ranks; }

  // --- An epoch ---
  // Begins the next one, once all ranks have left the last one.
  // Errors: kUnavailable naming the ranks that have not; then nothing has begun.
  void Begin(const Names& names, std::chrono::milliseconds timeout);
  // Posts the next block, to every rank with its number of routes.
  void PostBlock(std::span<const uint32_t> counts);
  // Tells a rank that its routes are home.
  void PostDone(size_t to, uint32_t count);
  // Ends the epoch on behalf of a rank that cannot go on: posts all that is missing.
  void Abandon() noexcept;

  // The routes of a block of a source; nothing if it has not come.
  // Errors: kUnavailable naming the rank that failed.
  std::optional<uint32_t> BlockFrom(size_t from, size_t block);
  // Whether all that this rank sent to `from` is home. Errors: as BlockFrom.
  bool DoneFrom(size_t from);
  // Whether these would say, or throw, anything.
  bool HasBlock(size_t from, size_t block) const { return IsHere(BlockSignal(from, block)); }
  bool HasDone(size_t from) const { return IsHere(DoneSignal(from, epoch_)); }

  // Waits until done() holds.
  // Errors: kUnavailable with the stage and the text of late(), or if the group has failed.
  template <typename Done, typename Late>
  void Wait(const Done& done, std::chrono::milliseconds timeout, std::string_view stage,
            const Late& late) {
    group_base_.WaitUntil(done, Deadline::After(timeout, stage), window_->name(), nullptr, late,
                          [this] { RequireAlive(); });
  }

  // --- Memory ---
  // What `source` sends to rank `at`.
  std::byte* RowOf(size_t at, size_t source, size_t row) const {
    return Area(at, source) + row * layout_.row_stride;
  }
  float* Scales(size_t at, size_t source) const {
    return reinterpret_cast<float*>(Area(at, source) + layout_.scales_at);
  }
  uint32_t* Counts(size_t at, size_t source) const {
    return reinterpret_cast<uint32_t*>(Area(at, source) + layout_.counts_at);
  }
  Route* Routes(size_t at, size_t source) const {
    return reinterpret_cast<Route*>(Area(at, source) + layout_.routes_at);
  }
  // Where the row of a slot of rank `at` comes home.
  float* Home(size_t at, size_t slot) const {
    return reinterpret_cast<float*>(parts_[at] + layout_.homes_at) + slot * layout_.home_stride;
  }

 private:
  std::byte* Area(size_t at, size_t source) const {
    return parts_[at] + source * layout_.source_bytes;
  }
  size_t DoneFlag(uint32_t epoch) const { return layout_.num_blocks + (epoch & 1u); }
  Signal BlockSignal(size_t from, size_t block) const { return window_->Peek(from, block); }
  Signal DoneSignal(size_t from, uint32_t epoch) const {
    return window_->Peek(from, DoneFlag(epoch));
  }
  bool IsHere(Signal signal) const { return signal.epoch == epoch_; }
  [[noreturn]] void ThrowPeerFailed(size_t peer);
  void RequireAlive() const;

  ProcessGroup& group_;
  parallel::GroupBase& group_base_;
  std::function<bool(size_t)> is_dead_;
  const Layout layout_;
  std::unique_ptr<SharedWindow> window_;
  std::vector<std::byte*> parts_;  // of each rank
  uint32_t epoch_;
  const Names* names_ = nullptr;  // of the layer whose epoch it is
  // Of this epoch, and this rank's:
  size_t blocks_posted_ = 0;
  std::vector<bool> done_posted_;  // to each rank
  size_t culprit_ = 0;             // who failed first, as far as this rank knows
};

// "rank 2", "ranks 0, 3"
std::string RankList(std::span<const size_t> ranks);

}  // namespace switchyard::moe::fuseep
