// One way in which a checkpoint stores a weight matrix, and what it becomes in memory. Contract
// 5.0, 5.15.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "quant/matrix.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard {

// A tensor of a matrix: MODULE.suffix.
struct StoredTensor {
  std::string_view suffix;    // "weight_scale_inv"
  std::vector<Shape> shapes;  // any of these; the first stands in messages
  std::vector<DType> dtypes;
  bool is_required = true;
};

// The tensors of one matrix, in the order in which its scheme names them.
struct MatrixTensors {
  std::string module;  // "model.layers.0.self_attn.q_proj", for messages
  size_t rows = 0;
  size_t cols = 0;
  std::vector<TensorView> views;  // data is null where an optional tensor is absent

  bool Has(size_t i) const { return views[i].data != nullptr; }
  // Errors: kCorruptData: "MODULE.suffix: what".
  [[noreturn]] void Refuse(std::string_view suffix, const std::string& what) const;
};

// Memory that somebody keeps, and which bytes it is.
struct OwnedBytes {
  std::shared_ptr<const void> memory;
  const std::byte* begin = nullptr;
  size_t bytes = 0;
};

// What weights keep that is not read where the checkpoint has it. Any thread may add to it.
class WeightMemory {
 public:
  // The matrix is kept; the view refers to it.
  WeightMatrix Keep(quant::QuantMatrix matrix);
  // `count` values that are zero.
  template <typename T>
  T* New(size_t count) {
    const std::shared_ptr<T[]> memory(new T[count]());
    Add({memory, reinterpret_cast<const std::byte*>(memory.get()), count * sizeof(T)});
    return memory.get();
  }
  size_t bytes() const { return bytes_; }
  // Everything, for whoever keeps the views.
  std::vector<OwnedBytes> Take() { return std::move(kept_); }

 private:
  void Add(OwnedBytes owned);

  std::mutex mutex_;
  std::vector<OwnedBytes> kept_;
  size_t bytes_ = 0;
};

// Stateless once made; one object serves all matrices that are stored alike.
class StorageScheme {
 public:
  virtual ~StorageScheme() = default;

  // Of the experts' products: a name of moe/schemes.
  virtual std::string_view moe_scheme() const = 0;
  // "e4m3, a scale per 128x128 block; activations e4m3 per 1x128"
  virtual std::string Describe() const = 0;
  // Suffix of the tensor that holds the codes.
  virtual std::string_view codes() const = 0;
  // The first is the one that holds the codes.
  // Errors: kInvalidArgument for sizes that the packing cannot hold; the message does not name the
  //   matrix.
  virtual std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const = 0;
  // Whether Load copies the codes into another layout; the bytes of the file are then not read
  // again.
  virtual bool repacks() const = 0;
  // Name of the tensor with a static scale of activations, if there is one.
  virtual std::string_view act_scale() const { return {}; }
  // Checks the values of scales and zero points too.
  // Errors: kCorruptData and kUnsupported naming module, tensor, expected and found.
  virtual WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const = 0;
};

}  // namespace switchyard
