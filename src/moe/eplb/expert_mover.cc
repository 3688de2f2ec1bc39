#include "switchyard/moe/eplb/expert_mover.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "moe/eplb/expert_layout.h"
#include "switchyard/core/error.h"
#include "switchyard/core/memory.h"

namespace switchyard::moe {
namespace {

// One expert's place in a mapping that it shares with those that came with it.
class Block {
 public:
  Block(std::shared_ptr<MappedMemory> memory, size_t offset, size_t bytes)
      : memory_(std::move(memory)), offset_(offset), bytes_(bytes) {}
  ~Block() { memory_->Release(offset_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return memory_->data() + offset_; }

 private:
  std::shared_ptr<MappedMemory> memory_;
  size_t offset_, bytes_;
};

// Both buffers of the exchanges; the carrier may hold on to them after a failure.
struct Transit {
  MappedMemory packed;
  std::shared_ptr<MappedMemory> received;
};

// An expert that this rank sends or receives, in one of its slots.
struct Parcel {
  size_t peer = 0;  // rank of the group
  size_t slot = 0;  // local
};

// Rows for every peer, of parcels that are sorted by peer.
std::vector<size_t> RowsPerPeer(const std::vector<Parcel>& parcels, size_t num_peers) {
  std::vector<size_t> rows(num_peers, 0);
  for (const Parcel& parcel : parcels) ++rows[parcel.peer];
  return rows;
}

std::vector<size_t> IdentityIfEmpty(std::span<const size_t> ep_ranks, size_t size) {
  std::vector<size_t> ranks(ep_ranks.begin(), ep_ranks.end());
  for (size_t rank = 0; ep_ranks.empty() && rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

}  // namespace

// What one rank sends and receives, in batches that all ranks count alike.
struct ExpertMover::Batches {
  struct Batch {
    std::vector<Parcel> sends, receives;
  };

  Batches(const MigrationPlan& plan, std::span<const size_t> ep_ranks, size_t group_rank,
          size_t experts_per_batch, size_t layer_id)
      : num_sent(plan.ep_size, 0), num_received(plan.ep_size, 0) {
    constexpr size_t kAbsent = SIZE_MAX;
    std::vector<size_t> group_rank_of(plan.ep_size, kAbsent);
    for (size_t g = 0; g < ep_ranks.size(); ++g)
      if (ep_ranks[g] < plan.ep_size) group_rank_of[ep_ranks[g]] = g;
    for (const ExpertTransfer& transfer : plan.transfers) {
      const size_t from = plan.RankOf(transfer.from), to = plan.RankOf(transfer.to);
      if (group_rank_of[from] == kAbsent || group_rank_of[to] == kAbsent) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("layer {}: an expert is to go from rank {} to rank {}, and one of "
                                "them is not in the group",
                                layer_id, from, to));
      }
      const size_t index = num_sent[from]++ / experts_per_batch;
      ++num_received[to];
      if (index >= batches.size()) batches.resize(index + 1);
      const size_t first_slot = ep_ranks[group_rank] * plan.slots_per_rank();
      if (group_rank_of[from] == group_rank)
        batches[index].sends.push_back({group_rank_of[to], transfer.from - first_slot});
      if (group_rank_of[to] == group_rank)
        batches[index].receives.push_back({group_rank_of[from], transfer.to - first_slot});
    }
    // Both sides list what passes between two ranks in the order of the plan.
    for (Batch& batch : batches) {
      std::ranges::stable_sort(batch.sends, {}, &Parcel::peer);
      std::ranges::stable_sort(batch.receives, {}, &Parcel::peer);
    }
  }

  // Experts that a rank has room for while it migrates.
  size_t Room(size_t ep_rank, size_t experts_per_batch) const {
    return num_received[ep_rank] + std::min(num_sent[ep_rank], experts_per_batch);
  }

  std::vector<Batch> batches;
  std::vector<size_t> num_sent, num_received;  // [R]
  std::shared_ptr<Transit> transit;
};

ExpertMover::ExpertMover(ExpertWeights& weights, size_t num_slots, size_t layer_id,
                         const MoverOptions& options)
    : weights_(&weights),
      layer_id_(layer_id),
      options_(options),
      layout_(std::make_unique<ExpertLayout>(weights, num_slots, layer_id)) {
  if (options.experts_per_batch == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "expert migration: experts_per_batch must be at least 1, found 0");
  }
  for (size_t slot = 0; slot < num_slots; ++slot)
    slots_.push_back({layout_->Pointers(weights, slot), nullptr, false});
}

ExpertMover::~ExpertMover() = default;
ExpertMover::ExpertMover(ExpertMover&&) noexcept = default;
ExpertMover& ExpertMover::operator=(ExpertMover&&) noexcept = default;

size_t ExpertMover::expert_bytes() const { return layout_->bytes(); }
uint64_t ExpertMover::fingerprint() const { return layout_->Fingerprint(); }

void ExpertMover::Prepare(const MigrationPlan& plan, ProcessGroup& group,
                          std::span<const size_t> ep_ranks, const LoadExpert& load,
                          const Deadline& deadline) {
  const std::vector<size_t> ranks = IdentityIfEmpty(ep_ranks, group.size());
  std::unique_ptr<Batches> batches;
  const auto collect = [&] {
    if (!prepared_.empty()) {
      throw Error(ErrorCode::kFailedPrecondition,
                  fmt::format("layer {}: a migration was prepared and not switched", layer_id_));
    }
    if (ranks.size() != group.size() || plan.ep_size == 0 ||
        plan.moves.size() != slots_.size() * plan.ep_size || ranks[group.rank()] >= plan.ep_size) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("layer {}: a plan of {} slots on {} ranks does not fit {} local "
                      "slots and a group of {}",
                      layer_id_, plan.moves.size(), plan.ep_size, slots_.size(), group.size()));
    }
    batches =
        std::make_unique<Batches>(plan, ranks, group.rank(), options_.experts_per_batch, layer_id_);
    ReserveMemory(*batches, ranks, group);
    FillSlots(plan, ranks[group.rank()] * slots_.size(), *batches, load);
  };
  try {
    RunTogether(group, deadline, collect);
    Exchange(*batches, group, deadline);
  } catch (...) {
    Discard();
    throw;
  }
}

// Asks for memory before anything moves. A node's ranks share its memory, so each looks at what all
// of them need.
void ExpertMover::ReserveMemory(Batches& batches, std::span<const size_t> ep_ranks,
                                const ProcessGroup& group) const {
  const auto bytes_of = [&](size_t group_rank) {
    return batches.Room(ep_ranks[group_rank], options_.experts_per_batch) * layout_->bytes();
  };
  size_t on_node = 0;
  for (size_t peer : group.node_peers()) on_node += bytes_of(peer);
  const size_t mine = bytes_of(group.rank());
  const size_t available = AvailableBytes();
  if (options_.max_bytes != 0 && mine > options_.max_bytes) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("layer {}: moving its experts takes {} bytes, {} are allowed",
                            layer_id_, mine, options_.max_bytes));
  }
  if (available != 0 && on_node > available) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("layer {}: moving its experts takes {} bytes on this node, {} are "
                            "available",
                            layer_id_, on_node, available));
  }
  const size_t me = ep_ranks[group.rank()];
  const size_t packed = std::min(batches.num_sent[me], options_.experts_per_batch);
  batches.transit = std::make_shared<Transit>();
  batches.transit->packed = MappedMemory(packed * layout_->bytes(), "experts to send");
  batches.transit->received = std::make_shared<MappedMemory>(
      batches.num_received[me] * layout_->bytes(), "experts from other ranks");
}

// Every new slot, those that arrive pointing to where they will.
void ExpertMover::FillSlots(const MigrationPlan& plan, size_t first_slot, const Batches& batches,
                            const LoadExpert& load) {
  std::vector<Slot> next(slots_.size());
  size_t arrived = 0;
  for (const Batches::Batch& batch : batches.batches) {
    for (const Parcel& parcel : batch.receives) {
      auto block = std::make_shared<const Block>(batches.transit->received,
                                                 arrived++ * layout_->bytes(), layout_->bytes());
      const std::byte* data = block->data();
      next[parcel.slot] = {layout_->PointersInto(data), std::move(block), true};
    }
  }
  for (size_t slot = 0; slot < next.size(); ++slot) {
    const SlotMove& move = plan.moves[first_slot + slot];
    switch (move.source) {
      case SlotSource::kUnchanged:
      case SlotSource::kIdle: next[slot] = slots_[slot]; break;
      case SlotSource::kLocalSlot: next[slot] = slots_[move.from - first_slot]; break;
      case SlotSource::kFreeRider: next[slot] = next[move.from - first_slot]; break;
      case SlotSource::kLost:
        next[slot] = Load(plan.physical_to_logical[first_slot + slot], load);
        break;
      case SlotSource::kSameNode:
      case SlotSource::kOtherNode: break;
    }
  }
  num_received_ = arrived;
  prepared_ = std::move(next);
}

ExpertMover::Slot ExpertMover::Load(int32_t logical, const LoadExpert& load) const {
  if (!load) {
    // Pages that nobody writes take no memory.
    auto memory = std::make_shared<MappedMemory>(layout_->bytes(), "an expert that is lost");
    auto block = std::make_shared<const Block>(std::move(memory), 0, layout_->bytes());
    const std::byte* data = block->data();
    return {layout_->PointersInto(data), std::move(block), true};
  }
  const LoadedExpert expert = load(layer_id_, static_cast<size_t>(logical));
  Slot slot{{}, expert.owner, false};
  for (const ExpertTensor& tensor : layout_->tensors()) {
    const ExpertPointers& bank = tensor.bank == 0   ? expert.w1
                                 : tensor.bank == 1 ? expert.w3
                                                    : expert.w2;
    const std::byte* parts[] = {bank.data,
                                bank.scale,
                                bank.zero,
                                reinterpret_cast<const std::byte*>(bank.bias),
                                reinterpret_cast<const std::byte*>(bank.tensor_scale),
                                reinterpret_cast<const std::byte*>(bank.column_group)};
    const std::byte* pointer = parts[static_cast<size_t>(tensor.part)];
    if (pointer == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: expert {} was loaded again without its {}", layer_id_,
                              logical, TensorName(tensor)));
    }
    slot.pointers.push_back(pointer);
  }
  return slot;
}

void ExpertMover::Exchange(const Batches& batches, ProcessGroup& group,
                           const Deadline& deadline) const {
  const Transit& transit = *batches.transit;
  size_t arrived = 0;
  for (const Batches::Batch& batch : batches.batches) {
    for (size_t i = 0; i < batch.sends.size(); ++i) {
      layout_->Pack(slots_[batch.sends[i].slot].pointers,
                    transit.packed.data() + i * layout_->bytes());
    }
    const std::vector<size_t> send_rows = RowsPerPeer(batch.sends, group.size());
    const std::vector<size_t> recv_rows = RowsPerPeer(batch.receives, group.size());
    RowExchange exchange;
    exchange.row_bytes = layout_->bytes();
    exchange.send = transit.packed.data();
    exchange.recv = transit.received->data() + arrived * layout_->bytes();
    exchange.send_rows = send_rows;
    exchange.recv_rows = recv_rows;
    exchange.owner = batches.transit;
    group.AllToAllV(exchange, deadline);
    arrived += batch.receives.size();
  }
}

void ExpertMover::Switch() noexcept {
  if (prepared_.empty()) return;
  for (size_t slot = 0; slot < prepared_.size(); ++slot)
    layout_->SetPointers(prepared_[slot].pointers, *weights_, slot);
  slots_ = std::exchange(prepared_, {});
}

void ExpertMover::Discard() noexcept {
  prepared_.clear();
  num_received_ = 0;
}

size_t ExpertMover::owned_bytes() const {
  std::set<const void*> blocks;
  for (const std::vector<Slot>* slots : {&slots_, &prepared_}) {
    for (const Slot& slot : *slots)
      if (slot.is_mapped) blocks.insert(slot.owner.get());
  }
  return blocks.size() * layout_->bytes();
}

}  // namespace switchyard::moe
