// How the tensors of one expert lie in one block of memory, which is what travels between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/moe/registry/expert_bank.h"

namespace switchyard::moe {

// The lists of pointers of a bank.
enum class ExpertPart : uint8_t { kData, kScale, kZero, kBias, kTensorScale, kColumnGroup };

// One tensor of an expert: `rows` rows of row_bytes bytes, each `stride` bytes after the last.
struct ExpertTensor {
  size_t bank = 0;  // of ExpertWeights: 0 = w1, 1 = w3, 2 = w2
  ExpertPart part = ExpertPart::kData;
  size_t rows = 0;
  size_t row_bytes = 0;
  size_t stride = 0;
  size_t offset = 0;  // in the block

  size_t Extent() const { return rows == 0 ? 0 : (rows - 1) * stride + row_bytes; }
};

// "scales of w1".
std::string TensorName(const ExpertTensor& tensor);

// The block keeps the strides of the banks, because a bank has one stride for all of its experts.
// Where w1 and w3 are the alternating rows of one matrix they alternate in the block too, so that
// no gap is stored or sent.
class ExpertLayout {
 public:
  // Errors: kInvalidArgument naming the layer, the tensor and the sizes, if a list has neither 0
  //   nor num_slots pointers, or a stride is smaller than its rows.
  ExpertLayout(const ExpertWeights& weights, size_t num_slots, size_t layer_id);

  // Of the block: a multiple of the page size, so that each block's pages can be given back.
  size_t bytes() const { return bytes_; }
  size_t num_tensors() const { return tensors_.size(); }
  // Equal on two ranks if their blocks are laid out alike.
  uint64_t Fingerprint() const;

  // The pointers of one slot, one per tensor.
  std::vector<const std::byte*> Pointers(const ExpertWeights& weights, size_t slot) const;
  // The pointers of an expert that lies in `block`.
  std::vector<const std::byte*> PointersInto(const std::byte* block) const;
  // Copies the expert that `pointers` name into `block`.
  void Pack(const std::vector<const std::byte*>& pointers, std::byte* block) const;
  // Writes the pointers of one slot, in place.
  void SetPointers(const std::vector<const std::byte*>& pointers, ExpertWeights& weights,
                   size_t slot) const;

  const std::vector<ExpertTensor>& tensors() const { return tensors_; }

 private:
  void AddTensors(const ExpertBank& bank, size_t index, size_t num_slots, size_t layer_id);
  void PlaceTensors(const ExpertWeights& weights, size_t num_slots);

  std::vector<ExpertTensor> tensors_;
  size_t bytes_ = 0;
};

}  // namespace switchyard::moe
