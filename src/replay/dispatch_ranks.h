// A dispatch case by the real dispatchers, whose ranks are threads or those of the world.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "replay/dispatch_case.h"

namespace switchyard::replay {

// How a case was run ("nixl, 4 threads") and the tensors that it gave.
using DispatchRuns = std::vector<std::pair<std::string, Outputs>>;

// By every dispatcher that has the case's layout, with threads as the ranks: on one node and, of an
// even number of ranks, as if on two. Nothing if the case is too large to be run here.
DispatchRuns DispatchOverThreads(const KindInput& input, const DispatchCase& dispatch);

// The same over the first ranks of options.world; nothing if there are not enough. Collective over
// the world; the tensors are those of rank 0.
// Errors: kUnavailable if a rank does not answer in time.
DispatchRuns DispatchOverWorld(const KindInput& input, const DispatchCase& dispatch);

}  // namespace switchyard::replay
