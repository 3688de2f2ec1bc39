// Where the experts of a model's layers are, who is asked for them, and when they move.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model/weights.h"
#include "switchyard/model/model.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/moe/eplb/location.h"
#include "switchyard/moe/eplb/rebalancer.h"

namespace switchyard {

// One per model and rank. Layers are MoE layers, counted alone.
class ExpertPlacer {
 public:
  // Errors: kInvalidArgument naming the settings, if the experts and their copies cannot be divided
  //   among the ranks; those of InitialLocation.
  ExpertPlacer(const ModelConfig& config, const ModelOptions& options);

  const moe::ExpertLocation& location() const { return *location_; }
  // The experts of this rank.
  ExpertShare Share() const;

  // The layers' weights, as Share said; they outlive the placer. Collective if experts are to move.
  void Attach(std::vector<moe::ExpertWeights*> layers);

  // Around every pass, on every rank.
  void BeginPass();
  void EndPass();
  void AbortPass() noexcept;

  // What the router of a layer needs; refers to *this and to `placement`.
  void Fill(size_t layer, moe::ExpertPlacement& placement, moe::TopKInputs& inputs);
  // Whether physical ids differ from logical ones, and which they are.
  bool has_copies() const { return has_copies_; }
  std::span<const int32_t> PhysicalToLogical(size_t layer) const;

 private:
  void LeaveLostRanks();
  // Layers count all decoder layers, the recorder MoE layers alone.
  class Observer : public moe::RoutingObserver {
   public:
    void OnPhysicalExperts(const moe::RoutedExperts& routed) override {
      moe::RoutedExperts counted = routed;
      counted.layer_id = layer;
      to->OnPhysicalExperts(counted);
    }
    moe::RoutingObserver* to = nullptr;
    size_t layer = 0;
  };

  const moe::ExpertParallel* ep_;
  const ModelOptions& options_;
  moe::DispatchAlgorithm algorithm_;
  bool has_copies_;
  std::optional<moe::ExpertLocation> location_;
  std::unique_ptr<moe::ExpertRebalancer> rebalancer_;
  Observer observer_;
  size_t num_lost_ = 0;
};

}  // namespace switchyard
