// What a runner knows about its layer. Contract 1.6.
#pragma once

#include <cstddef>
#include <string>

#include "switchyard/core/dtype.h"

namespace switchyard::moe {

// Fixed when the layer is built; owned by the layer.
struct MoeRunnerConfig {
  size_t num_experts = 0;                      // global experts known to the layer
  size_t num_local_experts = 0;                // of those, stored on this rank
  size_t hidden_size = 0;                      // H
  size_t intermediate_size_per_partition = 0;  // I
  size_t layer_id = 0;                         // global layer index, for messages
  size_t top_k = 0;                            // columns of the ids
  std::string activation = "silu";             // a name of kernels/activations/activations.def
  bool is_gated = true;                        // two halves (gate, up) before the activation
  double routed_scaling_factor =
      1.0;  // of the routed sum, where the weights do not hold it yet (contract 2.6, place 2)
  DType activation_dtype =
      DType::kF32;  // arithmetic of activations: kF32, or kBF16 (rounded before each product)
};

}  // namespace switchyard::moe
