// Weights that a user has quantised while they are loaded (--quantize).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "model/quantization/scheme.h"
#include "quant/weight_quant.h"

namespace switchyard {

// A line of the table of schemes.
struct OnlineScheme {
  std::string_view name;        // "w4a16_g128", what a user writes
  std::string_view moe_scheme;  // of moe/schemes
  std::string_view summary;
  quant::WeightQuant weights;
  ActQuant act;
  bool experts_only = false;
};
std::span<const OnlineScheme> OnlineSchemes();

// From float weights to a scheme: of attention, dense layers and experts. Routers, embedding, head
// and norms stay as they are, and so does a matrix whose inputs the groups of a scheme do not
// divide.
class OnlineQuantization {
 public:
  // Errors: kInvalidArgument listing the schemes if there is none of this name.
  explicit OnlineQuantization(std::string_view name);

  const OnlineScheme& scheme() const { return *scheme_; }
  // Empty if the matrix is quantised, else why not.
  std::string WhyNot(std::string_view module, size_t rows, size_t cols) const;
  // Bytes that a matrix of this size takes.
  size_t Bytes(size_t rows, size_t cols) const;
  // Shapes: view [rows, cols] of F32, F16 or BF16.
  // Errors: kCorruptData naming the module if a weight is NaN or infinite.
  WeightMatrix Quantize(std::string_view module, const TensorView& view,
                        WeightMemory& memory) const;

 private:
  const OnlineScheme* scheme_;
};

}  // namespace switchyard
