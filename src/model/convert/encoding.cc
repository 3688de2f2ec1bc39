#include "model/convert/encoding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/convert/convert.h"
#include "quant/ggml_quant.h"
#include "quant/packing.h"

namespace switchyard {
namespace {

using quant::QuantMatrix;
using quant::WeightQuant;

std::string DescribeScales(const MatrixFormat& format) {
  if (format.scale_rows > 1)
    return fmt::format("a scale per {}x{} block", format.scale_rows, format.scale_cols);
  return format.scale_cols == 0 ? std::string("a scale per output")
                                : fmt::format("a scale per {} inputs", format.scale_cols);
}

std::string DescribeCodes(const MatrixFormat& format) {
  return fmt::format("{}, {}{}", DTypeName(format.dtype), DescribeScales(format),
                     format.has_zero ? " and a zero point" : "");
}

std::string GroupMismatch(const MatrixFormat& format, size_t cols) {
  const bool has_groups = format.scale_rows == 1 && format.scale_cols != 0;
  if (has_groups && cols % format.scale_cols != 0)
    return fmt::format("{} inputs are no multiple of the group of {}", cols, format.scale_cols);
  return {};
}

std::string NoMultiple(std::string_view what, size_t count, size_t step) {
  if (count % step == 0) return {};
  return fmt::format("{} {} are no multiple of {}, which the packing needs", count, what, step);
}

// One run: rows side by side.
EncodedPiece Contiguous(size_t tensor, size_t offset, std::vector<std::byte> bytes) {
  const size_t size = bytes.size();
  return {tensor, offset, size, size, std::move(bytes)};
}

// Whole rows of `row_bytes`, row n of the matrix at its place.
EncodedPiece PlacedRows(size_t tensor, size_t first, RowPlace place, size_t row_bytes,
                        std::vector<std::byte> bytes) {
  const size_t offset = (place.first + first * place.step) * row_bytes;
  if (place.step == 1) return Contiguous(tensor, offset, std::move(bytes));
  return {tensor, offset, row_bytes, place.step * row_bytes, std::move(bytes)};
}

template <typename T>
std::vector<std::byte> BytesOfValues(std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  return {bytes.begin(), bytes.end()};
}

// Floats, or blocks of ggml: nothing lies beside them.
class Unscaled : public Encoding {
 public:
  explicit Unscaled(DType dtype) : dtype_(dtype) {}

  std::string Describe() const override { return std::string(DTypeName(dtype_)); }
  bool is_quantized() const override { return IsGgmlBlock(dtype_); }
  std::string WhyNot(size_t /*rows*/, size_t cols) const override {
    if (cols % DTypeBlock(dtype_) == 0) return {};
    return fmt::format("{} inputs are no multiple of the block of {}", cols, DTypeBlock(dtype_));
  }
  std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const override {
    return {{"weight", dtype_, Shape{rows, cols}}};
  }
  EncodedRows Encode(ConstRows values, size_t first, size_t /*rows*/,
                     RowPlace place) const override {
    const size_t row_bytes = BytesOf(dtype_, values.cols);
    std::vector<std::byte> bytes(values.rows * row_bytes);
    for (size_t n = 0; n < values.rows; ++n) {
      const std::span<std::byte> row = std::span(bytes).subspan(n * row_bytes, row_bytes);
      if (IsGgmlBlock(dtype_)) {
        quant::EncodeGgmlRow(dtype_, values.RowSpan(n), row);
      } else {
        kernels::ConvertFromF32(values.Row(n), values.cols, dtype_, row.data());
      }
    }
    EncodedRows encoded;
    encoded.pieces.push_back(PlacedRows(0, first, place, row_bytes, std::move(bytes)));
    encoded.matrix =
        WeightMatrix::Dense(encoded.pieces[0].bytes.data(), dtype_, values.rows, values.cols);
    return encoded;
  }

 private:
  DType dtype_;
};

// What the schemes of QuantizeMatrix share.
class Quantized : public Encoding {
 public:
  explicit Quantized(const WeightQuant& how) : how_(how) {}

  std::string Describe() const override { return DescribeCodes(how_.format); }
  std::string WhyNot(size_t /*rows*/, size_t cols) const override {
    return GroupMismatch(how_.format, cols);
  }
  size_t row_step() const override { return std::max<size_t>(1, how_.format.scale_rows); }
  EncodedRows Encode(ConstRows values, size_t first, size_t rows, RowPlace place) const override {
    EncodedRows encoded;
    encoded.codes = Quantize(values);
    encoded.matrix = encoded.codes.View();
    encoded.pieces = Pieces(encoded.codes, first, rows, place);
    return encoded;
  }

 protected:
  const MatrixFormat& format() const { return how_.format; }
  size_t GroupsOf(size_t cols) const {
    return how_.format.scale_cols == 0 ? 1 : quant::CeilDiv(cols, how_.format.scale_cols);
  }
  virtual QuantMatrix Quantize(ConstRows values) const {
    return quant::QuantizeMatrix(values, how_);
  }
  virtual std::vector<EncodedPiece> Pieces(const QuantMatrix& codes, size_t first, size_t rows,
                                           RowPlace place) const = 0;

 private:
  WeightQuant how_;
};

class Codes : public Quantized {
 public:
  explicit Codes(const CodesLayout& layout) : Quantized(layout.how), layout_(layout) {}

  std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const override {
    const size_t grid_rows = quant::CeilDiv(rows, row_step());
    const bool is_packed = DTypeBits(format().dtype) == 4;
    const DType codes = is_packed ? DType::kU8 : format().dtype;
    if (layout_.mx_blocks) {
      return {{layout_.codes, codes, Shape{rows, cols / 32, 16}},
              {layout_.scale, layout_.scale_dtype, Shape{rows, cols / 32}}};
    }
    return {{layout_.codes, codes, Shape{rows, is_packed ? cols / 2 : cols}},
            {layout_.scale, layout_.scale_dtype, Shape{grid_rows, GroupsOf(cols)}}};
  }

 protected:
  std::vector<EncodedPiece> Pieces(const QuantMatrix& codes, size_t first, size_t /*rows*/,
                                   RowPlace place) const override {
    const size_t scale_row = codes.scale_stride * DTypeBytes(codes.format.scale_dtype);
    return {PlacedRows(0, first, place, BytesOf(codes.format.dtype, codes.cols), codes.data),
            PlacedRows(1, first / row_step(), place, scale_row, codes.scale)};
  }

 private:
  CodesLayout layout_;
};

class PackQuantized : public Quantized {
 public:
  using Quantized::Quantized;

  std::string WhyNot(size_t rows, size_t cols) const override {
    const std::string why = Quantized::WhyNot(rows, cols);
    return why.empty() ? NoMultiple("inputs", cols, 8) : why;
  }
  std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const override {
    return {{"weight_packed", DType::kI32, Shape{rows, cols / 8}},
            {"weight_scale", format().scale_dtype, Shape{rows, GroupsOf(cols)}},
            {"weight_shape", DType::kI64, Shape{2}}};
  }

 protected:
  std::vector<EncodedPiece> Pieces(const QuantMatrix& codes, size_t first, size_t rows,
                                   RowPlace place) const override {
    const std::vector<int32_t> words = quant::ExportWna16(codes);
    const size_t scale_row = codes.scale_stride * DTypeBytes(codes.format.scale_dtype);
    std::vector<EncodedPiece> pieces;
    pieces.push_back(PlacedRows(0, first, place, codes.cols / 2, BytesOfValues<int32_t>(words)));
    pieces.push_back(PlacedRows(1, first, place, scale_row, codes.scale));
    if (first == 0) {
      const int64_t shape[] = {static_cast<int64_t>(rows), static_cast<int64_t>(codes.cols)};
      pieces.push_back(Contiguous(2, 0, BytesOfValues<int64_t>(shape)));
    }
    return pieces;
  }
};

// Tensors with outputs innermost: rows of the matrix are columns of theirs.
// Shapes: values [lines, count], for a tensor [lines, all].
template <typename T>
EncodedPiece Columns(size_t tensor, size_t first, size_t count, size_t all,
                     const std::vector<T>& values) {
  return {tensor, first * sizeof(T), count * sizeof(T), all * sizeof(T), BytesOfValues<T>(values)};
}

class Awq : public Quantized {
 public:
  using Quantized::Quantized;

  std::string WhyNot(size_t rows, size_t cols) const override {
    const std::string why = Quantized::WhyNot(rows, cols);
    return why.empty() ? NoMultiple("outputs", rows, 8) : why;
  }
  size_t row_step() const override { return 8; }
  std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const override {
    const size_t groups = GroupsOf(cols);
    return {{"qweight", DType::kI32, Shape{cols, rows / 8}},
            {"qzeros", DType::kI32, Shape{groups, rows / 8}},
            {"scales", DType::kF16, Shape{groups, rows}}};
  }

 protected:
  std::vector<EncodedPiece> Pieces(const QuantMatrix& codes, size_t first, size_t rows,
                                   RowPlace /*place*/) const override {
    const quant::OwnedAwq packed = quant::ExportAwq(codes);
    return {Columns(0, first / 8, codes.rows / 8, rows / 8, packed.qweight),
            Columns(1, first / 8, codes.rows / 8, rows / 8, packed.qzeros),
            Columns(2, first, codes.rows, rows, packed.scales)};
  }
};

class Gptq : public Quantized {
 public:
  explicit Gptq(size_t group) : Quantized(WeightQuant::Int4Group(group, DType::kF16)) {}

  std::string Describe() const override {
    return fmt::format("U4, {} and the zero point 8", DescribeScales(format()));
  }
  std::string WhyNot(size_t rows, size_t cols) const override {
    const std::string why = Quantized::WhyNot(rows, cols);
    return why.empty() ? NoMultiple("outputs", rows, 8) : why;
  }
  size_t row_step() const override { return 8; }
  std::vector<EncodedTensor> Tensors(size_t rows, size_t cols) const override {
    const size_t groups = GroupsOf(cols);
    return {{"qweight", DType::kI32, Shape{cols / 8, rows}},
            {"qzeros", DType::kI32, Shape{groups, rows / 8}},
            {"scales", DType::kF16, Shape{groups, rows}},
            {"g_idx", DType::kI32, Shape{cols}}};
  }

 protected:
  // Symmetric: signed codes, moved by 8.
  QuantMatrix Quantize(ConstRows values) const override {
    QuantMatrix codes = Quantized::Quantize(values);
    codes.format.dtype = DType::kU4;
    codes.format.has_zero = true;
    codes.zero.assign(codes.grid_rows() * codes.scale_stride, std::byte{8});
    for (std::byte& pair : codes.data) pair ^= std::byte{0x88};
    return codes;
  }
  std::vector<EncodedPiece> Pieces(const QuantMatrix& codes, size_t first, size_t rows,
                                   RowPlace /*place*/) const override {
    const quant::OwnedGptq packed = quant::ExportGptq(codes, quant::GptqFormat::kV1);
    std::vector<EncodedPiece> pieces = {
        Columns(0, first, codes.rows, rows, packed.qweight),
        Columns(1, first / 8, codes.rows / 8, rows / 8, packed.qzeros),
        Columns(2, first, codes.rows, rows, packed.scales)};
    if (first == 0) {
      std::vector<int32_t> group_of(codes.cols);
      for (size_t k = 0; k < codes.cols; ++k)
        group_of[k] = static_cast<int32_t>(k / codes.format.scale_cols);
      pieces.push_back(Contiguous(3, 0, BytesOfValues<int32_t>(group_of)));
    }
    return pieces;
  }
};

}  // namespace

std::unique_ptr<Encoding> UnscaledEncoding(DType dtype) {
  return std::make_unique<Unscaled>(dtype);
}
std::unique_ptr<Encoding> CodesEncoding(const CodesLayout& layout) {
  return std::make_unique<Codes>(layout);
}
std::unique_ptr<Encoding> PackQuantizedEncoding(const WeightQuant& how) {
  return std::make_unique<PackQuantized>(how);
}
std::unique_ptr<Encoding> AwqEncoding(const WeightQuant& how) { return std::make_unique<Awq>(how); }
std::unique_ptr<Encoding> GptqEncoding(size_t group) { return std::make_unique<Gptq>(group); }

}  // namespace switchyard
