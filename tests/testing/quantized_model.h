// Small models in every quantised format, of random codes, with the floats that the codes stand
// for: the truth is in the plain formulas of this file's source, not in the engine.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "testing/model_folder.h"

namespace switchyard::testing {

// A matrix as a checkpoint stores it, and what it stands for.
struct StoredWeights {
  std::map<std::string, ModelFolder::Tensor> tensors;  // by suffix: "weight", "weight_scale"
  std::vector<float> values;                           // [rows, cols]
};

using Random = std::mt19937;
using Encoder =
    std::function<StoredWeights(Random& random, const std::string& module, size_t rows, size_t cols)>;

// One way to store a model.
struct QuantizedFormat {
  std::string name;
  nlohmann::ordered_json config;  // quantization_config; null for ModelSlim
  // Of a linear module; one without an entry in the result is stored as plain f32.
  Encoder encode;
  // ModelSlim: what quant_model_description.json says about a linear module.
  std::function<std::string(const std::string& module)> described = nullptr;
  nlohmann::ordered_json description_extra = nlohmann::ordered_json::object();
  size_t hidden = 128;
  size_t inner = 64;
  size_t vocab = 64;
  std::string file_of_config = {};  // where the config is a file of its own
  bool w4a4_new_packing = false;
};

// Every format that the engine reads, some in several variants.
std::vector<QuantizedFormat> QuantizedFormats();
// Errors: std::out_of_range if there is none of this name.
QuantizedFormat QuantizedFormatOf(std::string_view name);

// A Qwen3-MoE of one layer with four experts, two of a token, and the same with plain f32 weights.
struct QuantizedModel {
  explicit QuantizedModel(const QuantizedFormat& format, uint32_t seed = 1);
  ModelFolder quantized, plain;
};

}  // namespace switchyard::testing
