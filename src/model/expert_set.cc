#include "model/expert_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/quantization/stored_codes.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

std::string Describe(const MatrixFormat& format) {
  if (!format.is_quantized()) return std::string(DTypeName(format.dtype));
  return fmt::format("{} with {} scales per {}x{}{}", DTypeName(format.dtype),
                     DTypeName(format.scale_dtype), format.scale_rows, format.scale_cols,
                     format.has_column_groups ? " of columns that lie apart" : "");
}

// The larger one, for both banks: their rows are quantised once.
void ShareActScale(moe::ExpertBank& a, moe::ExpertBank& b) {
  a.act.scale = b.act.scale = std::max(a.act.scale, b.act.scale);
}

}  // namespace

void ExpertProduct::SetScheme(const std::string& module, std::string_view found) {
  if (scheme.empty()) scheme = found;
  if (scheme == found) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}: it is stored as {}, the layer's first expert as {}; experts of a layer "
                  "must share one scheme",
                  module, found, scheme));
}

ExpertSet::ExpertSet(std::string prefix, std::vector<bool> is_mine)
    : prefix_(std::move(prefix)), is_mine_(std::move(is_mine)) {
  for (ExpertProduct* product : {&gate, &up, &down}) product->matrices.resize(is_mine_.size());
}

moe::ExpertBank ExpertSet::MakeBank(const ExpertProduct& product, std::string_view name,
                                    size_t rows, size_t cols) const {
  moe::ExpertBank bank;
  bank.rows = rows;
  bank.cols = cols;
  const WeightMatrix* first = nullptr;
  for (size_t e = 0; e < is_mine_.size(); ++e) {
    const WeightMatrix& matrix = product.matrices[e];
    const bool mine = is_mine_[e];
    if (mine && first == nullptr) {
      first = &matrix;
      bank.format = matrix.format;
      bank.stride = matrix.stride;
      bank.scale_stride = matrix.scale_stride;
      bank.act = matrix.act;
    }
    if (mine && (matrix.format != first->format || matrix.act.kind != first->act.kind ||
                 matrix.act.offset != first->act.offset)) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}{}.{}: its weights are {}, those of the first expert are {}; experts "
                      "of a layer must share one type",
                      prefix_, e, name, Describe(matrix.format), Describe(first->format)));
    }
    if (mine) bank.act.scale = std::max(bank.act.scale, matrix.act.scale);
    bank.data.push_back(matrix.data);
  }
  if (first == nullptr) return bank;
  // The others' scales count too, so that every rank quantises alike.
  for (const TensorView& view : product.act_scales) {
    if (view.data == nullptr) continue;
    const float scale = ScaleValue(view, 0);
    if (!(scale > 0.0f) || !std::isfinite(scale)) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}*.{}: a scale of activations is {}, expected a positive finite "
                              "number",
                              prefix_, name, scale));
    }
    bank.act.scale = std::max(bank.act.scale, scale);
  }
  const auto collect = [&](auto member, auto& list) {
    for (const WeightMatrix& matrix : product.matrices) list.push_back(matrix.*member);
  };
  if (bank.format.is_quantized()) collect(&WeightMatrix::scale, bank.scale);
  if (bank.format.has_zero) collect(&WeightMatrix::zero, bank.zero);
  if (bank.format.has_tensor_scale) collect(&WeightMatrix::tensor_scale, bank.tensor_scale);
  if (bank.format.has_column_groups) collect(&WeightMatrix::column_group, bank.column_group);
  bank.bias = product.bias;
  bank.bias_stride = product.bias_stride;
  if (!std::ranges::all_of(product.matrices,
                           [](const WeightMatrix& matrix) { return matrix.bias == nullptr; })) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}*.{}: biases inside quantised experts are not computed", prefix_, name));
  }
  return bank;
}

void ExpertSet::RequireOneFormat(const moe::ExpertWeights& experts) const {
  const MatrixFormat &gate_format = experts.w1.format, &up_format = experts.w3.format;
  const bool are_decoded = IsGgmlBlock(gate_format.dtype) && IsGgmlBlock(up_format.dtype);
  if (gate_format == up_format || are_decoded) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}*: the weights of gate_proj are {}, those of up_proj are {}; they must "
                  "share one type",
                  prefix_, Describe(gate_format), Describe(up_format)));
}

moe::ExpertWeights ExpertSet::Assemble(size_t hidden, size_t inner) const {
  moe::ExpertWeights experts;
  experts.hidden_size = hidden;
  experts.intermediate_size = inner;
  experts.w1 = MakeBank(gate, "gate_proj", inner, hidden);
  experts.w3 = MakeBank(up, "up_proj", inner, hidden);
  experts.w2 = MakeBank(down, "down_proj", hidden, inner);
  RequireOneFormat(experts);
  ShareActScale(experts.w1, experts.w3);
  return experts;
}

}  // namespace switchyard
