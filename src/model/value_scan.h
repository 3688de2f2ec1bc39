// Values that no intact weight has: in floats, in codes, in scales, and inside the blocks of ggml.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "switchyard/core/thread_pool.h"
#include "switchyard/model/file_tensor.h"

namespace switchyard {

// A tensor of a file and its bytes.
struct LocatedTensor {
  FileTensor info;
  TensorView view;
};

// What is wrong in some elements of one tensor, or in the scales of its blocks.
struct ValueFindings {
  size_t nan = 0;
  size_t inf = 0;
  size_t negative = 0;  // scales only
  size_t zero = 0;      // scales only
  // The first that is NaN, infinite or negative: its element (of a block, the block's first), and
  // its value.
  size_t first_index = 0;
  float first_value = 0;

  bool any() const { return nan + inf + negative > 0; }
  void Add(const ValueFindings& later);
};

// Looks at every element of floats (F64 apart) and fp8 codes, at every value of kScales (plain
// bytes are e8m0), and at the scales of every block of ggml. Other types have no wrong values.
// Shapes: any; the data need not be aligned.
ValueFindings ScanValues(const TensorView& view, TensorRole role);

// Scans all tensors, in parallel; lines in the order of the tensors. Scales that are zero are a
// remark.
Verification ScanTensors(std::span<const LocatedTensor> tensors, ThreadPool& pool);

}  // namespace switchyard
