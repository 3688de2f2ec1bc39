// The experts of a layer while they are gathered, each matrix by itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/shape.h"
#include "switchyard/moe/registry/expert_bank.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard {

// One product of all experts. Shapes: lists are [E], or empty where it says so.
struct ExpertProduct {
  std::vector<WeightMatrix> matrices;  // those of other ranks stay empty
  std::string_view scheme;             // of moe/schemes, once SetScheme was called
  std::vector<TensorView> act_scales;  // static scales of activations of experts of other ranks
  std::vector<const float*> bias;      // or empty
  size_t bias_stride = 1;

  // All experts of a layer are multiplied by one kernel.
  // Errors: kUnsupported naming the module and both schemes.
  void SetScheme(const std::string& module, std::string_view found);
};

// Gate, up and down of one layer.
class ExpertSet {
 public:
  // `prefix` for messages: "model.layers.3.mlp.experts.".
  ExpertSet(std::string prefix, std::vector<bool> is_mine);

  bool is_mine(size_t expert) const { return is_mine_[expert]; }
  size_t size() const { return is_mine_.size(); }

  // The banks of all experts, in their order. Static scales of activations become the largest of
  // all experts, those of other ranks too (contract 5.2).
  // Errors: kUnsupported naming expert, expected and found, if own experts differ in format or in
  //   the offsets of their activations, or gate and up differ; kCorruptData for a scale that is no positive number.
  moe::ExpertWeights Assemble(size_t hidden, size_t inner) const;

  ExpertProduct gate, up, down;

 private:
  // Gate and up meet the same rows.
  void RequireOneFormat(const moe::ExpertWeights& experts) const;
  moe::ExpertBank MakeBank(const ExpertProduct& product, std::string_view name, size_t rows,
                           size_t cols) const;

  std::string prefix_;
  std::vector<bool> is_mine_;
};

}  // namespace switchyard
