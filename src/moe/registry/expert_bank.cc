#include "switchyard/moe/registry/expert_bank.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

// The rows of `w13` from `first` on, every `step`-th.
ExpertBank Half(const ExpertBank& w13, size_t first, size_t step) {
  const ExpertMatrices view = w13.View();
  const MatrixFormat& format = w13.format;
  ExpertBank half = w13;
  half.rows = w13.rows / 2;
  half.stride = view.stride * step;
  half.bias_stride = w13.bias_stride * step;
  // One scale for the whole matrix serves both halves.
  const bool one_scale = format.scale_rows >= w13.rows;
  const size_t grid_row = !format.is_quantized() || one_scale ? 0 : first / format.scale_rows;
  half.scale_stride = view.scale_stride * step;
  for (const std::byte*& data : half.data) data += BytesOf(format.dtype, first * view.stride);
  for (const std::byte*& scale : half.scale)
    scale += grid_row * view.scale_stride * DTypeBytes(format.scale_dtype);
  for (const std::byte*& zero : half.zero) zero += grid_row * view.scale_stride;
  for (const float*& bias : half.bias) bias += first * w13.bias_stride;
  return half;
}

ExpertBank Pick(const ExpertBank& bank, std::span<const int32_t> slots) {
  ExpertBank picked = bank;
  const auto pick = [&](const auto& from, auto& to) {
    to.clear();
    if (from.empty()) return;
    for (int32_t slot : slots) {
      if (slot < 0 || static_cast<size_t>(slot) >= from.size()) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("expert {} was asked for, there are {}", slot, from.size()));
      }
      to.push_back(from[static_cast<size_t>(slot)]);
    }
  };
  pick(bank.data, picked.data);
  pick(bank.scale, picked.scale);
  pick(bank.zero, picked.zero);
  pick(bank.bias, picked.bias);
  pick(bank.tensor_scale, picked.tensor_scale);
  pick(bank.column_group, picked.column_group);
  return picked;
}

// Rows [row, row + rows) and columns [col, col + cols) of every matrix.
ExpertBank Block(const ExpertBank& bank, size_t row, size_t rows, size_t col, size_t cols) {
  const ExpertMatrices view = bank.View();
  const MatrixFormat& format = bank.format;
  // A scale that covers a whole side serves every part of it.
  const bool all_rows = !format.is_quantized() || format.scale_rows >= bank.rows;
  const bool all_cols = !format.is_quantized() || format.scale_cols >= bank.cols;
  if ((!all_rows && row % format.scale_rows != 0) || (!all_cols && col % format.scale_cols != 0)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("experts cannot be split at row {} and column {}: scales are for "
                            "blocks of {}x{}",
                            row, col, format.scale_rows, format.scale_cols));
  }
  if (col % DTypeBlock(format.dtype) != 0) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "experts cannot be split at column {}, inside {} values of {} that are stored together",
            col, DTypeBlock(format.dtype), DTypeName(format.dtype)));
  }
  if (format.has_column_groups && cols != bank.cols) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("experts cannot be split into columns {} to {}: their columns are in "
                            "groups that lie apart (desc_act)",
                            col, col + cols));
  }
  ExpertBank block = bank;
  block.rows = rows;
  block.cols = cols;
  block.stride = view.stride;
  block.scale_stride = view.scale_stride;
  const size_t grid_row = all_rows ? 0 : row / format.scale_rows;
  const size_t grid_col = all_cols ? 0 : col / format.scale_cols;
  const size_t grid_at = grid_row * view.scale_stride + grid_col;
  for (const std::byte*& data : block.data) data += BytesOf(format.dtype, row * view.stride + col);
  for (const std::byte*& scale : block.scale) scale += grid_at * DTypeBytes(format.scale_dtype);
  for (const std::byte*& zero : block.zero) zero += grid_at;
  for (const float*& bias : block.bias) bias += row * bank.bias_stride;
  if (all_rows && format.is_quantized()) block.format.scale_rows = rows;
  if (all_cols && format.is_quantized()) block.format.scale_cols = cols;
  return block;
}

}  // namespace

ExpertMatrices ExpertBank::View() const {
  ExpertMatrices view;
  view.format = format;
  view.rows = rows;
  view.cols = cols;
  view.stride = stride != 0 ? stride : cols;
  view.scale_stride = scale_stride;
  if (scale_stride == 0 && format.is_quantized() && format.scale_rows < rows)
    view.scale_stride = (cols + format.scale_cols - 1) / format.scale_cols;
  view.bias_stride = bias_stride;
  view.data = data;
  view.scale = scale;
  view.zero = zero;
  view.bias = bias;
  view.tensor_scale = tensor_scale;
  view.column_group = column_group;
  return view;
}

double BitsPerWeight(const ExpertBank& bank) {
  return BitsPerWeight(bank.format, bank.rows, bank.cols);
}

double BitsPerWeight(const MatrixFormat& format, size_t rows, size_t cols) {
  const double bits = BitsPerElement(format.dtype);
  if (!format.is_quantized() || rows == 0 || cols == 0) return bits;
  const auto blocks = [](size_t n, size_t block) { return (n + block - 1) / block; };
  const size_t scales = blocks(rows, format.scale_rows) * blocks(cols, format.scale_cols);
  const size_t scale_bits = DTypeBits(format.scale_dtype) + (format.has_zero ? 8 : 0);
  return bits + static_cast<double>(scales * scale_bits) / static_cast<double>(rows * cols);
}

std::pair<ExpertBank, ExpertBank> SplitGateUp(const ExpertBank& w13, bool interleaved) {
  if (w13.rows % 2 != 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("w13 has {} rows: gate and up must have as many each", w13.rows));
  const size_t inner = w13.rows / 2;
  const size_t block = w13.format.scale_rows;
  const bool shared = w13.format.is_quantized() && block < w13.rows;
  if (shared && (interleaved ? block != 1 : inner % block != 0)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("w13 has one scale for {} rows; {} rows of gate and up{} share some",
                            block, inner, interleaved ? " in turn" : ""));
  }
  return {Half(w13, 0, interleaved ? 2 : 1),
          Half(w13, interleaved ? 1 : inner, interleaved ? 2 : 1)};
}

ExpertWeights PickExperts(const ExpertWeights& weights, std::span<const int32_t> slots) {
  ExpertWeights picked = weights;
  picked.w1 = Pick(weights.w1, slots);
  picked.w3 = Pick(weights.w3, slots);
  picked.w2 = Pick(weights.w2, slots);
  return picked;
}

ExpertWeights SplitExperts(const ExpertWeights& weights, size_t part, size_t parts) {
  if (parts == 1) return weights;
  const size_t inner = weights.intermediate_size;
  if (inner % parts != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the intermediate size {} cannot be split into {} equal parts", inner, parts));
  }
  const size_t count = inner / parts;
  ExpertWeights split = weights;
  split.intermediate_size = count;
  split.w1 = Block(weights.w1, part * count, count, 0, weights.w1.cols);
  if (!weights.w3.data.empty())
    split.w3 = Block(weights.w3, part * count, count, 0, weights.w3.cols);
  split.w2 = Block(weights.w2, 0, weights.w2.rows, part * count, count);
  if (part != 0) split.w2.bias.clear();
  return split;
}

}  // namespace switchyard::moe
