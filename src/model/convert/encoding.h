// How a float matrix becomes the tensors of a file, some rows at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "quant/matrix.h"
#include "quant/weight_quant.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/rows.h"
#include "switchyard/core/shape.h"
#include "switchyard/quant/weight_matrix.h"

namespace switchyard {

// A tensor of an encoded matrix: MODULE.suffix.
struct EncodedTensor {
  std::string_view suffix;
  DType dtype = DType::kF32;
  Shape shape;
};

// Bytes for one tensor: runs of `run_bytes`, which lie `stride` apart in the tensor from `offset`
// on.
struct EncodedPiece {
  size_t tensor = 0;  // index in Encoding::Tensors
  size_t offset = 0;
  size_t run_bytes = 0;
  size_t stride = 0;
  std::vector<std::byte> bytes;
};

// Some rows, encoded. `matrix` is how they will be read back; it refers to the other members.
struct EncodedRows {
  std::vector<EncodedPiece> pieces;
  quant::QuantMatrix codes;
  WeightMatrix matrix;
};

// Where row n of a matrix goes in tensors that hold more than one: row first + n * step.
struct RowPlace {
  size_t first = 0;
  size_t step = 1;
};

// Stateless; any thread may encode.
class Encoding {
 public:
  virtual ~Encoding() = default;

  // "I4, a scale per 32 inputs"
  virtual std::string Describe() const = 0;
  // Whether values change other than by rounding to a float type.
  virtual bool is_quantized() const { return true; }
  // Why a matrix of this size cannot be encoded; empty if it can.
  virtual std::string WhyNot(size_t /*rows*/, size_t /*cols*/) const { return {}; }
  virtual std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const = 0;
  // Rows that are encoded together begin at multiples of it.
  virtual size_t row_step() const { return 1; }
  // Rows [first, first + values.rows) of a matrix of `rows` rows.
  virtual EncodedRows Encode(ConstRows values, size_t first, size_t rows, RowPlace place) const = 0;
};

// Plain floats (F32, F16, BF16), or blocks of ggml of a type that quant::CanEncodeGgml.
std::unique_ptr<Encoding> UnscaledEncoding(DType dtype);

// Codes as they lie in memory (8 bits, or two 4-bit codes in a byte), and scales on a grid.
struct CodesLayout {
  quant::WeightQuant how;
  std::string_view codes = "weight", scale = "weight_scale";
  DType scale_dtype = DType::kF32;  // of the tensor; U8 for e8m0
  bool mx_blocks = false;           // codes [N, K/32, 16], scales [N, K/32]: the banks of gpt-oss
};
std::unique_ptr<Encoding> CodesEncoding(const CodesLayout& layout);

// compressed-tensors pack-quantized; AutoAWQ gemm; GPTQ v1, symmetric.
std::unique_ptr<Encoding> PackQuantizedEncoding(const quant::WeightQuant& how);
std::unique_ptr<Encoding> AwqEncoding(const quant::WeightQuant& how);
std::unique_ptr<Encoding> GptqEncoding(size_t group);

}  // namespace switchyard
