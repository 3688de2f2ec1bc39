// Model shapes as a simulation sees them: parameters, bytes and operations of each part.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::simulate {

// A decoder-only MoE model. H hidden, I inner size of an expert.
struct ModelShape {
  std::string name;    // "qwen3-30b-a3b"
  std::string scheme;  // how the weights of the experts are stored: "bf16"
  size_t hidden = 0, inner = 0;
  size_t num_experts = 0, top_k = 0;
  size_t moe_layers = 0;
  size_t dense_layers = 0;  // whose MLP is no MoE
  double expert_bytes_per_weight = 2;
  double other_bytes_per_weight = 2;  // attention, shared experts, head
  // Parameters.
  double attention_params = 0;  // projections of one layer
  double dense_params = 0;      // MLP of one dense layer
  double shared_params = 0;     // shared experts of one MoE layer
  double head_params = 0;
  // Attention of one token of one layer, for each key in its context.
  double kv_bytes = 0;
  double flops_per_key = 0;

  double expert_params() const {
    return 3.0 * static_cast<double>(hidden) * static_cast<double>(inner);
  }
  double expert_bytes() const { return expert_params() * expert_bytes_per_weight; }
};

// The shape of "NAME" (bf16) or "NAME:SCHEME", NAME being one of model/shapes.h.
// Errors: kNotFound listing the names, or kUnsupported listing the schemes.
// Source: the models' published config.json.
ModelShape FindShape(std::string_view name_and_scheme);

}  // namespace switchyard::simulate
