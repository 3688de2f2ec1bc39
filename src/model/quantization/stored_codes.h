// Schemes whose codes are used where the file has them: one code in a byte, or two along the
// inputs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/quantization/scheme.h"
#include "switchyard/core/quant_format.h"

namespace switchyard {

// Types of scales, offsets and the like.
std::vector<DType> FloatDTypes();

// What differs between them. Codes are [N, K] for 8-bit types and [N, K/2] bytes for 4-bit ones.
struct StoredCodesOptions {
  std::string_view moe_scheme;
  std::string_view codes = "weight";  // suffix
  DType dtype = DType::kF8E4M3;       // kF8E4M3 kI8 kI4 kF4E2M1
  std::string_view scale = "weight_scale";
  // Of the scale grid [ceil(N / scale_rows), ceil(K / scale_cols)]; 0 = the whole side.
  size_t scale_rows = 1;
  size_t scale_cols = 0;
  std::vector<DType> scale_dtypes = FloatDTypes();
  std::string_view tensor_scale = {};       // suffix of one f32 for all scales, or none
  bool tensor_scale_is_reciprocal = false;  // it divides
  // What becomes of activations. Of static kinds the scale is the tensor `input_scale`, the offset
  // the optional tensor `input_offset`.
  ActQuant act;
  std::string_view input_scale = "input_scale";
  std::string_view input_offset = {};
  // Tensors that must be there for the producer's own engine, and have no effect on the product of
  // stored codes; zero offsets of symmetric formats are checked to be zero.
  std::string_view zero_offset = {};  // [N, 1] floats
  std::vector<StoredTensor> unused;   // checked for shape only
};

// The offsets and scales are checked when they are read.
class StoredCodes : public StorageScheme {
 public:
  explicit StoredCodes(StoredCodesOptions options) : options_(std::move(options)) {}

  std::string_view moe_scheme() const override { return options_.moe_scheme; }
  std::string Describe() const override;
  std::string_view codes() const override { return options_.codes; }
  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override;
  bool repacks() const override { return false; }
  std::string_view act_scale() const override;
  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override;

 private:
  size_t ScaleRows(size_t rows) const;
  size_t ScaleCols(size_t cols) const;

  StoredCodesOptions options_;
};

// What several schemes share.
// Value i of a tensor of floats (F32 F16 BF16, or e4m3 and e8m0 codes).
float ScaleValue(const TensorView& view, size_t i);
// Errors: kCorruptData naming the tensor and the element, if one is NaN, infinite or negative, or
//   all are 0 although codes are not.
void CheckScales(const MatrixTensors& tensors, std::string_view suffix, const TensorView& scales,
                 const TensorView& codes);
// Errors: kCorruptData unless every offset is 0.
void RequireZeroOffsets(const MatrixTensors& tensors, std::string_view suffix,
                        const TensorView& offsets);
// The offset of static int8 activations. Errors: kCorruptData unless it is a whole number in [-128,
// 127].
float ActOffset(const MatrixTensors& tensors, std::string_view suffix, const TensorView& view);
// One positive finite number. Errors: kCorruptData naming the tensor.
float PositiveScalar(const MatrixTensors& tensors, std::string_view suffix, const TensorView& view);
// "; activations int8 per token", or "; activations as they are".
std::string DescribeActivations(const ActQuant& act);

// Shapes under which files store one number, and one per row.
std::vector<Shape> ScalarShapes();
std::vector<Shape> PerRowShapes(size_t rows);

}  // namespace switchyard
