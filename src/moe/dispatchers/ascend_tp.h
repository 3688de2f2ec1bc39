// Dispatcher "ascend_tp" with the gather of its tensor-parallel group.
#pragma once

#include <memory>

#include "switchyard/moe/ascend/all_gather.h"
#include "switchyard/moe/contract/dispatcher.h"

namespace switchyard::moe::dispatchers {

// `gather` is what GGUF layers put around the finalizer (contract 5.7); empty = one rank. With `ep`
// the ranks that split the experts (MoE-TP) add their results up; GGUF layers gather instead, by
// default over the same ranks.
// Errors: kUnsupported naming the layer for no_combine, for experts spread over ranks, and for
//   split experts behind tokens that each rank has of its own.
std::unique_ptr<Dispatcher> MakeAscendTp(const MoeRunnerConfig& config,
                                         ascend::GatherColumns gather,
                                         ExpertParallel* ep = nullptr);

}  // namespace switchyard::moe::dispatchers
