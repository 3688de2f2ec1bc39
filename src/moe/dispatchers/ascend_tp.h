// Dispatcher "ascend_tp" with the gather of its tensor-parallel group.
#pragma once

#include <memory>

#include "switchyard/moe/ascend/all_gather.h"
#include "switchyard/moe/contract/dispatcher.h"

namespace switchyard::moe::dispatchers {

// `gather` is what GGUF layers put around the finalizer (contract 5.7); empty = one rank.
// Errors: kUnsupported naming the layer for no_combine.
std::unique_ptr<Dispatcher> MakeAscendTp(const MoeRunnerConfig& config,
                                         ascend::GatherColumns gather);

}  // namespace switchyard::moe::dispatchers
