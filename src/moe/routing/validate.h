// What a call brings, checked before any token is routed.
#pragma once

#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Sizes and ranges of the inputs of one call; a few comparisons, and one per token of hash routing.
// Errors: kInvalidArgument, as SelectExperts says.
void CheckInputs(const TopKConfig& config, ConstRows logits, const TopKInputs& inputs);

}  // namespace switchyard::moe
