// Carries out the migration of one layer: sends experts to other ranks, keeps the memory of those
// that came, and switches the pointers of the layer's weights. Contract 7.4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/moe/eplb/migration.h"
#include "switchyard/moe/registry/expert_bank.h"
#include "switchyard/parallel/deadline.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

class ExpertLayout;

// The tensors of one expert in one bank, with the strides of that bank; null where the bank has
// none.
struct ExpertPointers {
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
  const std::byte* zero = nullptr;
  const float* bias = nullptr;
  const float* tensor_scale = nullptr;
  const int32_t* column_group = nullptr;
};

// One expert of a layer. `owner` keeps its bytes alive while a slot uses them; null where they
// outlive the layer, as those of a checkpoint do.
struct LoadedExpert {
  ExpertPointers w1, w3, w2;
  std::shared_ptr<const void> owner;
};

// Finds an expert that no rank holds any more. Called on the rank that is to hold it.
// Errors: what it throws becomes the failure of the migration on all ranks.
using LoadExpert = std::function<LoadedExpert(size_t layer, size_t logical)>;

// Limits of a migration.
struct MoverOptions {
  size_t experts_per_batch = 32;  // that a rank packs and sends at a time
  // Most memory that a rank may take for one layer, received experts and packed ones together;
  // 0 = what the system has to spare.
  size_t max_bytes = 0;
};

// The weights of one layer on one rank, as they move. Received experts lie in big pages of this
// object, all of one migration in one mapping; the pages of each go back to the system when no slot
// uses it any more. Experts that lie elsewhere (in the checkpoint's mapping) stay there and their
// memory is not this object's business. Slots that hold the same expert share its bytes.
//
// Used by one thread; no product may read the weights while Switch runs.
class ExpertMover {
 public:
  // `weights` has one pointer per local slot in each list that it uses, and outlives the mover.
  // Errors: kInvalidArgument naming the layer, the list and the sizes.
  ExpertMover(ExpertWeights& weights, size_t num_slots, size_t layer_id,
              const MoverOptions& options = {});
  ~ExpertMover();
  ExpertMover(ExpertMover&&) noexcept;
  ExpertMover& operator=(ExpertMover&&) noexcept;

  // Bytes that one expert takes where it arrives.
  size_t expert_bytes() const;
  // Equal on ranks whose experts are laid out alike; all ranks of a migration must be.
  uint64_t fingerprint() const;

  // Fetches what the plan gives to this rank's slots, and sends what others need; nothing is
  // switched, so the layer computes as before. Collective over `group`, whose rank g is the EP rank
  // ep_ranks[g] (empty: all ranks in order). Without `load` a lost expert becomes zeros, which add
  // nothing to any token.
  // Errors: kFailedPrecondition if an earlier Prepare was neither switched nor discarded;
  //   kInvalidArgument if the plan has other slots or a rank of it is not in the group;
  //   kResourceExhausted on all ranks if one has too little memory, and what `load` throws; after
  //   these the group stays usable. kUnavailable if a peer is lost. After any error the layer is as
  //   before and nothing is prepared.
  void Prepare(const MigrationPlan& plan, ProcessGroup& group, std::span<const size_t> ep_ranks,
               const LoadExpert& load, const Deadline& deadline);
  // Writes the prepared pointers into the lists of the weights, in place, so that views of them
  // stay valid, and frees the experts that no slot uses any more. Nothing happens if nothing is
  // prepared.
  void Switch() noexcept;
  // Forgets what was prepared.
  void Discard() noexcept;

  // Memory of the experts that this object holds, prepared ones among them.
  size_t owned_bytes() const;
  // Experts and bytes that the last Prepare brought from other ranks.
  size_t num_received() const { return num_received_; }

 private:
  struct Slot {
    std::vector<const std::byte*> pointers;  // one per tensor of the layout
    std::shared_ptr<const void> owner;       // null if the bytes are not ours
    bool is_mapped = false;                  // the owner is a block of a mapping of this object
  };
  struct Batches;

  void ReserveMemory(Batches& batches, std::span<const size_t> ep_ranks,
                     const ProcessGroup& group) const;
  void FillSlots(const MigrationPlan& plan, size_t first_slot, const Batches& batches,
                 const LoadExpert& load);
  Slot Load(int32_t logical, const LoadExpert& load) const;
  void Exchange(const Batches& batches, ProcessGroup& group, const Deadline& deadline) const;

  ExpertWeights* weights_;
  size_t layer_id_;
  MoverOptions options_;
  std::unique_ptr<ExpertLayout> layout_;
  std::vector<Slot> slots_;
  std::vector<Slot> prepared_;  // empty, or one per slot
  size_t num_received_ = 0;
};

}  // namespace switchyard::moe
