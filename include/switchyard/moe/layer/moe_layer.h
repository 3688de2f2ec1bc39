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

class FusedMoe;

// What a user may choose about a layer.
struct MoeLayerOptions {
  std::string runner = "auto";  // a registered runner, or auto = the scheme's first
  std::string a2a = "none";
  std::string act_dtype = "auto";  // of activations that no scheme quantises: auto, f32, bf16
  // With act_dtype auto: such activations become int8 codes, 32 under one scale, before they meet
  // quantised weights. auto = for weights in blocks of ggml; on; off.
  std::string fast_activations = "auto";
  bool activation_quant = true;  // false: weight-only arithmetic where a scheme quantises them
  bool disable_fused = false;
  // How rows travel between ranks (contract 3.1): auto, f32, bf16, fp8, int8, mxfp8, mxfp4. auto
  // loses nothing.
  std::string dispatch_dtype = "auto";
  std::string combine_dtype = "auto";
  // The ranks that share the layer's experts, or null for one rank. Not owned. Everything about the
  // layer is then collective over them, and `weights` holds the experts of this rank only: the
  // physical experts [r * P/R, (r + 1) * P/R).
  ExpertParallel* ep = nullptr;
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
  // Over the global ids, 1 = an expert of this rank; empty = all are, or, with
  // MoeLayerOptions::ep, those of the rank's block (contract 3.2).
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
  ~MoeLayer();

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
    return PathNow().runner->Run(context, output, quant_info_);
  }

  // Those of the phase that the ranks are in, where there is one for each.
  const MoeRunner& runner() const { return *PathNow().runner; }
  Dispatcher& dispatcher() const { return *PathNow().dispatcher; }
  // Whether dispatcher and runner are bypassed by one operation (contract 3.13); those above exist
  // then, and are not called.
  bool is_fused_ep() const { return fused_ != nullptr; }
  const SchemeEntry& scheme_w13() const { return *scheme_w13_; }
  const SchemeEntry& scheme_w2() const { return *scheme_w2_; }
  const TopKConfig& topk() const { return config_.topk; }
  const ExpertWeights& weights() const { return weights_; }

  // For whoever moves experts between ranks (moe/eplb/rebalancer.h): pointers may be replaced in
  // place, between passes, by others to the same shapes and formats.
  ExpertWeights& mutable_weights() { return weights_; }

 private:
  // A dispatcher and the runner behind it.
  struct Path {
    std::unique_ptr<Dispatcher> dispatcher;
    std::unique_ptr<MoeRunner> runner;
  };
  const Path& PathNow() const;
  void ViewWeights();
  Path MakePath(const Registry& registry, const MoeLayerOptions& options,
                const DispatcherEntry& entry, std::string_view runner);
  void ScaleWeights();
  void MakeFused(const Registry& registry, const MoeLayerOptions& options);
  Rows RunExperts(ExecContext& context, ConstRows hidden, const TopKOutput& topk);

  MoeLayerConfig config_;
  ExpertWeights weights_;
  const SchemeEntry* scheme_w13_;
  const SchemeEntry* scheme_w2_;
  MoeQuantInfo quant_info_;
  ExpertParallel* ep_;
  bool activation_quant_;
  // One, or DeepEP's two: [0] for prefill, [1] for decode.
  std::vector<Path> paths_;
  std::unique_ptr<FusedMoe> fused_;  // backend ascend_fuseep: takes the place of the path
  float weight_scale_ = 1.0f;        // routed_scaling_factor, where it goes into the weights
};

}  // namespace switchyard::moe
