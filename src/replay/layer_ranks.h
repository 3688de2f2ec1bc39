// A layer case computed by several ranks together.
#pragma once

#include <string>
#include <vector>

#include "replay/case.h"
#include "switchyard/moe/layer/moe_layer.h"

namespace switchyard::replay {

// A layer with all its experts, and one pass of it.
struct LayerPass {
  const moe::MoeLayerConfig& config;
  const moe::ExpertWeights& weights;
  ConstRows hidden;             // [T, H]
  const moe::TopKOutput& topk;  // logical ids
};

// What a user chooses about a layer of a case.
moe::MoeLayerOptions LayerOptionsOf(const ReplayOptions& options);

// Whether a pass goes over ranks: there are several, or a protocol that needs groups was asked for.
bool GoesOverRanks(const ReplayOptions& options);

// Spreads the layer over the ranks of options.world (over one, a thread, if there are none) and
// runs the pass. Collective.
//
// Each rank gets the same number of experts, some of them copies if there is no other way; runner
// ascend with backend none splits each expert instead. Tokens are everybody's, or divided.
//
// Shapes: returns [T, H] on every rank. `skipped` is set, on all ranks, if these options or this
//   number of ranks cannot compute the case.
// Errors: kInternal if ranks that should have the same results do not; those of MoeLayer.
std::vector<float> RunOverRanks(const KindInput& input, const LayerPass& pass,
                                std::string& skipped);

}  // namespace switchyard::replay
