// The tensors of a model's files, whatever the container, and what a check of their values found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"

namespace switchyard {

// What a model does with a tensor.
enum class TensorRole : uint8_t {
  kUnused,  // known and left out
  kVector,  // norms, biases, sinks
  kMatrix,  // floats, or blocks of ggml
  kCodes,   // quantised weights
  kScales,  // of codes, or of activations
  kOther    // zero points, orders, shapes
};
// "unused", "vector", …
std::string_view TensorRoleName(TensorRole role);

// One tensor as it is stored.
struct FileTensor {
  std::string name;  // in the file
  std::string file;
  DType dtype = DType::kF32;
  Shape shape;
  size_t bytes = 0;
  TensorRole role = TensorRole::kUnused;
  std::string use;  // the name that the model knows it by, or why it is not used
};

// A line for each problem: file, tensor, index and value.
struct Verification {
  std::vector<std::string> problems;
  std::vector<std::string> remarks;  // odd, but no reason to distrust the weights

  friend bool operator==(const Verification&, const Verification&) = default;
};

}  // namespace switchyard
