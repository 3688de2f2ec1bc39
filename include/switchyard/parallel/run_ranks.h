// Ranks as threads of one process: the carrier for tests and debugging, with no launcher and under
// any sanitizer.
#pragma once

#include <cstddef>
#include <functional>

#include "switchyard/parallel/process_group.h"

namespace switchyard {

// How RunRanks arranges its ranks.
struct RankOptions {
  size_t num_ranks = 1;
  // Ranks per pretended node; 0 takes SWITCHYARD_FAKE_NODE_SIZE, and without it one node for all.
  size_t node_size = 0;
};

// Calls body(world) on `num_ranks` threads, each with its own rank of one group "world", and
// returns when all have ended. A rank that throws aborts the world, so that the others fail with
// its message instead of waiting.
// Errors: rethrows what the first failing rank threw; kInvalidArgument if num_ranks is 0 or
//   SWITCHYARD_FAKE_NODE_SIZE is not a number.
void RunRanks(const RankOptions& options, const std::function<void(ProcessGroup&)>& body);
inline void RunRanks(size_t num_ranks, const std::function<void(ProcessGroup&)>& body) {
  RunRanks(RankOptions{.num_ranks = num_ranks}, body);
}

}  // namespace switchyard
