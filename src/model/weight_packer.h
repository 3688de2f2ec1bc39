// From weights as a checkpoint stores them to weights as products read them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "model/weights.h"
#include "switchyard/core/memory.h"
#include "switchyard/core/thread_pool.h"

namespace switchyard {

// What PackWeights tells about bytes of the source, on any thread.
struct PackHooks {
  std::function<void(const std::byte* data, size_t bytes)> prepare;  // about to be read
  std::function<void(const std::byte* data, size_t bytes)> release;  // read for the last time
};

// Puts the matrices of linear layers, experts and head into panels (kernels/panels/panel.h), in
// parallel, each in place of what it was packed from: what is released is read by nobody any more,
// and what of `weights.owned` has served goes too. Stays where it is: the embedding (and a head
// tied to it), routers, the heads of latent attention, and formats that have no panels. Bits of
// codes and scales do not change. Returns the memory of the panels, in big pages where the system
// gives them; weights refer to it. Null if nothing moved: panels are no part of a file that the
// system could drop and read again, so all stays as it is if they take more than `available` bytes
// (0 = unknown) and what goes of `weights.owned`.
// Errors: kResourceExhausted if the system refuses memory.
std::shared_ptr<const MappedMemory> PackWeights(TransformerWeights& weights, ThreadPool& pool,
                                                const PackHooks& hooks, size_t available);

}  // namespace switchyard
