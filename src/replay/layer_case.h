// What the kinds layer and qlayer share: tokens, routing and the description of the layer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "replay/case.h"
#include "replay/routing.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard::replay {

// The tokens and routing of a layer case, and its runner config; owns what they refer to.
class LayerCase {
 public:
  // Errors: kCorruptData naming the field or tensor.
  explicit LayerCase(const KindInput& input);
  LayerCase(const LayerCase&) = delete;
  LayerCase& operator=(const LayerCase&) = delete;

  size_t num_tokens() const { return num_tokens_; }
  size_t hidden_size() const { return hidden_size_; }
  size_t intermediate_size() const { return intermediate_size_; }
  size_t num_experts() const { return num_experts_; }
  ConstRows hidden() const { return ConstRows(hidden_.data(), num_tokens_, hidden_size_); }
  const moe::TopKOutput& topk() const { return topk_; }
  // Activation, scaling, combine and router-weight settings of the case.
  const moe::MoeLayerConfig& config() const { return config_; }

  // Gate, up and down banks from a stacked w13 [2 I, H] (or [I, H] when not gated) and w2, with the
  // biases of the case.
  moe::ExpertWeights Weights(moe::ExpertBank w13, moe::ExpertBank w2) const;

  // One call of the case's layer with these weights, over all ranks where there are several.
  // `skipped` is set if runner, scheme and backend do not go together. Collective.
  std::vector<double> Run(const KindInput& input, const moe::MoeLayerConfig& config,
                          moe::ExpertWeights weights, std::string& skipped) const;

  // One call of a layer on this rank alone, which moves nothing.
  std::vector<double> RunAlone(const KindInput& input, const moe::MoeLayerConfig& config,
                               moe::ExpertWeights weights, const moe::TopKOutput& topk,
                               std::string& skipped) const;

 private:
  void ReadRouting(const KindInput& input);
  // Pointers to the rows of a bias [E, n], or none.
  std::vector<const float*> Bias(const std::vector<float>& bias, size_t n) const;

  size_t num_tokens_, hidden_size_, intermediate_size_, num_experts_;
  std::vector<float> hidden_, weights_, b13_, b2_;
  std::vector<int32_t> ids_;
  std::unique_ptr<RoutingCase> routing_;
  moe::TopKOutput topk_;
  moe::MoeLayerConfig config_;
};

}  // namespace switchyard::replay
