// How one weight matrix is stored, for those who look into a checkpoint.
#pragma once

#include <cstddef>
#include <string>

#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"

namespace switchyard {

// One matrix of a model: what its config and its tensors say.
struct StoredMatrix {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  std::string format;  // "BF16", "F8_E4M3, a scale per 128x128 block; activations e4m3 per 1x128"
  std::string note;    // why it is not quantised although the config says so, or empty
  bool is_quantized = false;
  size_t rows = 0;
  size_t cols = 0;
  size_t bytes = 0;  // of its tensors in the checkpoint
  // What it is computed as: a name of moe/schemes. Of what is quantised on loading the new scheme.
  std::string scheme = "unquant";
  // Of the codes, or of the floats; weights that share a scale, 0 = there are no scales.
  DType dtype = DType::kF32;
  size_t block_rows = 0;
  size_t block_cols = 0;
  ActQuantKind activations = ActQuantKind::kNone;  // what becomes of the rows that it meets
  bool is_repacked = false;  // a copy is read; the bytes in the file are let go

  size_t elements() const { return rows * cols; }
};

}  // namespace switchyard
