// Matrices of every format that has panels, for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/convert/convert.h"
#include "kernels/decode/decode.h"
#include "kernels/panels/panel.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/quant_format.h"
#include "testing/guarded.h"
#include "testing/random.h"

namespace switchyard::testing {

using kernels::CodeRow;
using kernels::kPanelRows;

inline constexpr DType kGgmlTypes[] = {
    DType::kGgmlQ40,   DType::kGgmlQ41,   DType::kGgmlQ50,    DType::kGgmlQ51,  DType::kGgmlQ80,
    DType::kGgmlQ2K,   DType::kGgmlQ3K,   DType::kGgmlQ4K,    DType::kGgmlQ5K,  DType::kGgmlQ6K,
    DType::kGgmlIq4Nl, DType::kGgmlIq4Xs, DType::kGgmlMxFp4,  DType::kGgmlIq3S, DType::kGgmlIq3Xxs,
    DType::kGgmlIq2S,  DType::kGgmlIq2Xs, DType::kGgmlIq2Xxs, DType::kGgmlIq1S, DType::kGgmlIq1M,
    DType::kGgmlTq10,  DType::kGgmlTq20};

inline MatrixFormat Plain(DType dtype) { return {.dtype = dtype}; }

inline MatrixFormat Scaled(DType dtype, DType scale_dtype, size_t scale_rows, size_t scale_cols,
                           bool has_zero = false, bool has_tensor_scale = false) {
  return {dtype, scale_dtype, scale_rows, scale_cols, has_zero, has_tensor_scale, false};
}

inline constexpr size_t kAll = size_t{1} << 20;  // scale_rows or scale_cols: of the whole matrix

// Every kind of codes with every kind of scales that panels have for it. Shapes: of [rows, cols].
inline std::vector<MatrixFormat> AllFormats() {
  std::vector<MatrixFormat> all = {Plain(DType::kBF16), Plain(DType::kF16), Plain(DType::kF32)};
  for (DType dtype : kGgmlTypes) all.push_back(Plain(dtype));
  for (DType dtype :
       {DType::kI8, DType::kU8, DType::kI4, DType::kU4, DType::kF4E2M1, DType::kF8E4M3}) {
    all.push_back(Scaled(dtype, DType::kF32, 1, kAll));
    all.push_back(Scaled(dtype, DType::kBF16, kAll, kAll, false, true));
    all.push_back(Scaled(dtype, DType::kF32, 128, 128));
    all.push_back(Scaled(dtype, DType::kF16, 32, 32));
    for (DType scale : {DType::kF16, DType::kBF16, DType::kF32, DType::kF8E8M0, DType::kF8E4M3}) {
      for (size_t group : {16u, 32u, 96u}) {
        all.push_back(Scaled(dtype, scale, 1, group));
        all.push_back(Scaled(dtype, scale, 1, group, true));
      }
    }
    all.push_back(Scaled(dtype, DType::kF8E4M3, 1, 16, false, true));
    all.push_back(Scaled(dtype, DType::kF8E4M3, 1, 32, false, true));
  }
  return all;
}

inline std::string NameOf(const MatrixFormat& format, size_t rows, size_t cols) {
  return std::string(DTypeName(format.dtype)) + " scales " +
         std::string(DTypeName(format.scale_dtype)) + " of " + std::to_string(format.scale_rows) +
         "x" + std::to_string(format.scale_cols) + (format.has_zero ? " with zeros, [" : ", [") +
         std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

inline size_t CeilDiv(size_t a, size_t b) { return (a + b - 1) / b; }

// A matrix of random codes and finite scales. Its arrays end at unreadable pages.
class RandomMatrix {
 public:
  RandomMatrix(const MatrixFormat& format, size_t rows, size_t cols, std::mt19937_64& random)
      : format_(format),
        rows_(rows),
        cols_(cols),
        row_bytes_(BytesOf(format.dtype, cols)),
        groups_(format.is_quantized() ? CeilDiv(cols, format.scale_cols) : 0),
        grid_(format.is_quantized() ? CeilDiv(rows, format.scale_rows) * groups_ : 0),
        codes_(rows * row_bytes_),
        scales_(grid_ * (format.is_quantized() ? DTypeBytes(format.scale_dtype) : 0)),
        zeros_(format.has_zero ? grid_ : 0) {
    for (uint8_t& byte : codes_.span()) byte = static_cast<uint8_t>(random());
    for (uint8_t& byte : zeros_.span()) byte = static_cast<uint8_t>(random() % 16);
    if (format.is_quantized()) FillScales(random);
    if (format.has_tensor_scale) tensor_scale_ = 0.37f;
    if (format.dtype == DType::kGgmlMxFp4) {  // products that f32 holds
      for (size_t i = 0; i < codes_.size(); i += 17) codes_[i] = std::min<uint8_t>(codes_[i], 250);
    }
  }

  CodeRow Row(size_t i) const {
    CodeRow row;
    row.dtype = format_.dtype;
    row.q = codes_.data() + i * row_bytes_;
    row.n = cols_;
    if (!format_.is_quantized()) return row;
    const size_t at = i / format_.scale_rows * groups_;
    row.scale_dtype = format_.scale_dtype;
    row.scale = scales_.data() + at * DTypeBytes(format_.scale_dtype);
    row.zero = format_.has_zero ? zeros_.data() + at : nullptr;
    row.group = format_.scale_cols;
    row.tensor_scale = tensor_scale_;
    return row;
  }
  // Those of panel i.
  std::vector<CodeRow> PanelRows(size_t i) const {
    std::vector<CodeRow> rows;
    for (size_t r = i * kPanelRows; r < std::min(rows_, (i + 1) * kPanelRows); ++r)
      rows.push_back(Row(r));
    return rows;
  }
  std::span<uint8_t> codes() { return codes_.span(); }

 private:
  void FillScales(std::mt19937_64& random) {
    for (uint8_t& byte : scales_.span()) byte = static_cast<uint8_t>(random());
    if (format_.scale_dtype == DType::kF8E8M0) return FillExponents();
    if (format_.scale_dtype == DType::kF8E4M3) {
      for (uint8_t& byte : scales_.span()) byte = (byte & 0x7f) == 0x7f ? 0x38 : byte;
      return;
    }
    const std::vector<float> values = RandomFloats(random, grid_, 0.1f);
    kernels::ConvertFromF32(values.data(), grid_, format_.scale_dtype, scales_.data());
  }
  void FillExponents() {
    for (uint8_t& byte : scales_.span()) byte = std::min<uint8_t>(byte, 250);
  }

  MatrixFormat format_;
  size_t rows_, cols_, row_bytes_, groups_, grid_;
  GuardedBuffer<uint8_t> codes_, scales_, zeros_;
  float tensor_scale_ = 1.0f;
};

}  // namespace switchyard::testing
