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
  return view;
}

double BitsPerWeight(const ExpertBank& bank) {
  double bits = static_cast<double>(DTypeBits(bank.format.dtype));
  if (!bank.format.is_quantized() || bank.rows == 0) return bits;
  const auto blocks = [](size_t n, size_t block) { return (n + block - 1) / block; };
  const size_t scales =
      blocks(bank.rows, bank.format.scale_rows) * blocks(bank.cols, bank.format.scale_cols);
  const size_t scale_bits = DTypeBits(bank.format.scale_dtype) + (bank.format.has_zero ? 8 : 0);
  return bits +
         static_cast<double>(scales * scale_bits) / static_cast<double>(bank.rows * bank.cols);
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

}  // namespace switchyard::moe
