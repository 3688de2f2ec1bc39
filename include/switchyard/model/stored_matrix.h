// How one weight matrix is stored, for those who look into a checkpoint.
#pragma once

#include <cstddef>
#include <string>

namespace switchyard {

// A weight matrix as it lies in the checkpoint, for `inspect` and errors.
struct StoredMatrix {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  std::string format;  // "BF16", "F8_E4M3, a scale per 128x128 block; activations e4m3 per 1x128"
  std::string note;    // why it is not quantised although the config says so, or empty
  bool is_quantized = false;
  size_t rows = 0;
  size_t cols = 0;
  size_t bytes = 0;  // of its tensors in the checkpoint

  size_t elements() const { return rows * cols; }
};

}  // namespace switchyard
