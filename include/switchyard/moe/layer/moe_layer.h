// One MoE layer: top-k, dispatch, experts, combine. Contract 1.1, 1.2.
#pragma once

#include <memory>
#include <string>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/moe/registry/moe_runner.h"
#include "switchyard/moe/registry/registry.h"

namespace switchyard::moe {

// What a user may choose about a layer.
struct MoeLayerOptions {
  std::string runner = "auto";  // a registered runner, or auto = the scheme's first
  std::string a2a = "none";
  std::string act_dtype = "auto";  // auto, f32, bf16
  bool disable_fused = false;
};

// What the model says about it.
struct MoeLayerConfig {
  TopKConfig topk;
  size_t layer_id = 0;
  std::string activation = "silu";
  std::string scheme = "unquant";
};

// The routing of one call, for those who look on (the logits verb, statistics).
struct RoutingRecord {
  TopKOutput topk;
};

// Owns the experts' weight pointers, dispatcher and runner; the weights' bytes belong to the
// checkpoint. After a call that threw, the layer is usable again.
class MoeLayer {
 public:
  // Errors: kInvalidArgument (top-k), kNotFound (unknown scheme or runner, missing permute pair,
  //   each naming both keys), kUnsupported (a runner that the scheme does not list, an a2a backend
  //   that this build lacks).
  MoeLayer(const Registry& registry, const MoeLayerConfig& config, const MoeLayerOptions& options,
           ExpertWeights weights);

  // Shapes: hidden [T, H]; router_logits [T, E] f32; returns [T, H]. Results live in context.arena.
  //   T may be 0. `record`, if given, receives the routing (views into the arena).
  Rows Forward(ExecContext& context, ConstRows hidden, ConstRows router_logits,
               RoutingRecord* record = nullptr);

  const MoeRunner& runner() const { return *runner_; }
  const SchemeEntry& scheme() const { return *scheme_; }
  const TopKConfig& topk() const { return config_.topk; }
  const ExpertWeights& weights() const { return weights_; }

 private:
  MoeLayerConfig config_;
  ExpertWeights weights_;
  const SchemeEntry* scheme_;
  MoeQuantInfo quant_info_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<MoeRunner> runner_;
};

}  // namespace switchyard::moe
