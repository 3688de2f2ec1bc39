// The matrices and vectors of a model, one by one, under the names that hub checkpoints have.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "switchyard/model/config.h"

namespace switchyard {

struct ModelPart {
  enum class Kind {
    kEmbedding,
    kHead,
    kLinear,  // of attention and of dense and shared MLPs
    kExpert,  // one product of one expert
    kRouter,
    kLatentUp,   // kv_b_proj: it is split into the keys' and the values' matrices before it is used
    kVector,     // norms, biases, sinks: one row
    kExpertBias  // [E, rows]: of all experts
  };
  enum class Product { kGate, kUp, kDown };

  Kind kind = Kind::kLinear;
  std::string
      module;  // without ".weight"; of vectors the whole name; of experts the prefix "….experts."
  size_t rows = 0;
  size_t cols = 0;
  size_t layer = 0;
  size_t expert = 0;                 // of kExpert
  Product product = Product::kGate;  // of kExpert, kExpertBias

  bool is_matrix() const { return kind != Kind::kVector && kind != Kind::kExpertBias; }
};

// In the order of the layers; layers for multi-token prediction are left out.
std::vector<ModelPart> PartsOf(const ModelConfig& config);

// Module of an expert's product, as checkpoints of this model have them: "….experts.3.gate_proj".
std::string ExpertModule(const ModelConfig& config, const ModelPart& part);

// "gate_proj", "up_proj", "down_proj".
std::string ProductName(ModelPart::Product product);

}  // namespace switchyard
