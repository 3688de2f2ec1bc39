// One MoE layer: top-k, dispatch, experts, combine. Contract 1.1, 1.2.
#pragma once

#include <memory>
#include <string>
#include <vector>

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
  std::string act_dtype = "auto";  // of un-quantised products: auto, f32, bf16
  bool activation_quant = true;    // false: weight-only arithmetic where a scheme quantises them
  bool disable_fused = false;
};

// What the model says about it.
struct MoeLayerConfig {
  TopKConfig topk;
  // Its fields that describe the layer's arithmetic (layer_id, activation and its parameters,
  // is_gated, router weight on input, no_combine, routed_scaling_factor); sizes, runner and
  // activation dtype are filled in by the layer.
  MoeRunnerConfig runner;
  // Copies of experts included (contract 2.11); 0 = topk.num_experts. The weights hold these, then
  // the fused shared experts.
  size_t num_physical_experts = 0;
  std::string scheme_w13 = "unquant";
  std::string scheme_w2 = "unquant";
  // Over the global ids, 1 = an expert of this rank; empty = all are (contract 3.2).
  std::vector<int32_t> expert_mask;
  size_t hidden_pad = 0;  // see MoeQuantInfo
  size_t intermediate_pad = 0;
};

// The routing of one call, for those who look on (the logits verb, statistics).
struct RoutingRecord {
  TopKOutput topk;
};

// MoeRunner::Create with the kernels of w13 and w2 attached to the config, so that a runner which
// chooses by them (ascend) does so, and refuses, now (contract 5.0, create_moe_runner).
// Errors: those of MoeRunner::Create.
std::unique_ptr<MoeRunner> CreateMoeRunner(const Registry& registry,
                                           const MoeRunnerOptions& options,
                                           const MoeRunnerConfig& config,
                                           const MoeQuantInfo& quant_info, DispatchFormat format);

// Owns the experts' weight pointers, dispatcher and runner; the weights' bytes belong to the
// checkpoint. After a call that threw, the layer is usable again.
class MoeLayer {
 public:
  // Errors: kInvalidArgument (top-k, shapes, a bank whose format is not that of its scheme),
  //   kNotFound (unknown scheme, runner or activation, missing permute pair, each naming both
  //   keys), kUnsupported (a runner that a scheme does not list, an a2a backend that this build
  //   lacks). All name the layer.
  MoeLayer(const Registry& registry, const MoeLayerConfig& config, const MoeLayerOptions& options,
           ExpertWeights weights);

  // Shapes: hidden [T, H]; router_logits [T, E] f32; returns [T, H]. Results live in context.arena.
  //   T may be 0. `record`, if given, receives the routing (views into the arena). `inputs` as
  //   SelectExperts takes them; hidden and layer_id are filled in.
  // Errors: those of SelectExperts and ForwardRouted.
  Rows Forward(ExecContext& context, ConstRows hidden, ConstRows router_logits,
               RoutingRecord* record = nullptr, const TopKInputs& inputs = {});

  // The same from a routing made elsewhere.
  //
  // Shapes: hidden [T, H]; topk ids and weights [T, K]; returns [T, H], or [T * K, H] with
  //   no_combine.
  // Errors: kInvalidArgument naming layer, token and id for ids that are no expert, and for shapes
  //   that contradict each other. The layer is usable afterwards.
  Rows ForwardRouted(ExecContext& context, ConstRows hidden, const TopKOutput& topk);

  // The step between dispatch and combine, for engines that drive the dispatcher themselves: the
  // reference's quant_method.apply.
  // Errors: those of the runner.
  const CombineInput& Apply(ExecContext& context, const DispatchOutput& output) const {
    return runner_->Run(context, output, quant_info_);
  }

  const MoeRunner& runner() const { return *runner_; }
  const Dispatcher& dispatcher() const { return *dispatcher_; }
  const SchemeEntry& scheme_w13() const { return *scheme_w13_; }
  const SchemeEntry& scheme_w2() const { return *scheme_w2_; }
  const TopKConfig& topk() const { return config_.topk; }
  const ExpertWeights& weights() const { return weights_; }

 private:
  MoeLayerConfig config_;
  ExpertWeights weights_;
  const SchemeEntry* scheme_w13_;
  const SchemeEntry* scheme_w2_;
  MoeQuantInfo quant_info_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<MoeRunner> runner_;
  float weight_scale_ = 1.0f;  // routed_scaling_factor, where it goes into the weights
};

}  // namespace switchyard::moe
