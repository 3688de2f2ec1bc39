#include "model/quantization/online.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/convert/convert.h"
#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/model/checkpoint.h"

namespace switchyard {
namespace {

using quant::WeightQuant;

ActQuant Activations(ActQuantKind kind, MxScaleRule rule = MxScaleRule::kOcpFloor) {
  ActQuant act;
  act.kind = kind;
  act.mx_rule = rule;
  return act;
}

const std::vector<OnlineScheme>& Schemes() {
  static const std::vector<OnlineScheme> kSchemes = {
      {"fp8_block", "fp8_block", "e4m3 in 128x128 blocks, activations e4m3 per 1x128",
       WeightQuant::Fp8Block(128, 128), Activations(ActQuantKind::kFp8Group)},
      {"fp8_channel", "fp8_channel", "e4m3 with a scale per output, activations e4m3 per token",
       WeightQuant::Fp8Channel(), Activations(ActQuantKind::kFp8Token)},
      {"w8a8_int8", "w8a8_int8", "int8 with a scale per output, activations int8 per token",
       WeightQuant::Int8Channel(), Activations(ActQuantKind::kInt8Token)},
      {"w4a16_g32",
       "wna16",
       "int4 with a scale per 32 inputs",
       WeightQuant::Int4Group(32, DType::kBF16),
       {}},
      {"w4a16_g128",
       "wna16",
       "int4 with a scale per 128 inputs",
       WeightQuant::Int4Group(128, DType::kBF16),
       {}},
      {"awq",
       "awq",
       "u4 with a scale and a zero point per 128 inputs, rounded to nearest",
       WeightQuant::Uint4Group(128, DType::kF16),
       {}},
      {"mxfp8", "mxfp8", "e4m3 with a power of two per 32 inputs, activations the same",
       WeightQuant::MxFp8(MxScaleRule::kCeil), Activations(ActQuantKind::kMxFp8)},
      {"mxfp4",
       "mxfp4",
       "e2m1 with a power of two per 32 inputs",
       WeightQuant::MxFp4(MxScaleRule::kEven, MxRounding::kHalfToEven),
       {}},
      {"mxfp4_w4a4", "mxfp4_w4a4", "the same, activations too",
       WeightQuant::MxFp4(MxScaleRule::kEven, MxRounding::kHalfToEven),
       Activations(ActQuantKind::kMxFp4, MxScaleRule::kEven)},
      {"quark_int4fp8_moe", "quark_int4fp8",
       "experts int4 with a scale per output, activations e4m3 per token",
       WeightQuant::Int4Channel(), Activations(ActQuantKind::kFp8Token), true},
  };
  return kSchemes;
}

bool IsExpert(std::string_view module) {
  return module.find(".experts.") != std::string_view::npos;
}

}  // namespace

std::span<const OnlineScheme> OnlineSchemes() { return Schemes(); }

OnlineQuantization::OnlineQuantization(std::string_view name) {
  std::string known;
  for (const OnlineScheme& scheme : Schemes()) {
    if (scheme.name == name) scheme_ = &scheme;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", scheme.name);
    if (scheme.name == name) return;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("--quantize: there is no scheme {}; there are {}", QuoteForMessage(name), known));
}

std::string OnlineQuantization::WhyNot(std::string_view module, size_t /*rows*/,
                                       size_t cols) const {
  if (scheme_->experts_only && !IsExpert(module))
    return fmt::format("{} quantises experts alone", scheme_->name);
  const MatrixFormat& format = scheme_->weights.format;
  const bool has_groups = format.scale_rows == 1 && format.scale_cols != 0;
  if (has_groups && cols % format.scale_cols != 0)
    return fmt::format("{} inputs are no multiple of the group of {}", cols, format.scale_cols);
  return {};
}

size_t OnlineQuantization::Bytes(size_t rows, size_t cols) const {
  const MatrixFormat& format = scheme_->weights.format;
  const size_t block_rows = format.scale_rows == 0 ? std::max<size_t>(1, rows) : format.scale_rows;
  const size_t block_cols = format.scale_cols == 0 ? std::max<size_t>(1, cols) : format.scale_cols;
  const size_t cells = quant::CeilDiv(rows, block_rows) * quant::CeilDiv(cols, block_cols);
  return BytesOf(format.dtype, rows * cols) +
         cells * (DTypeBytes(format.scale_dtype) + (format.has_zero ? 1 : 0));
}

WeightMatrix OnlineQuantization::Quantize(std::string_view module, const TensorView& view,
                                          WeightMemory& memory) const {
  const BadValues bad = ScanForBadValues(view);
  if (bad.any()) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("tensor {}.weight: cannot be quantised: {} NaN and {} infinite values, "
                            "the first at element {}",
                            module, bad.nan, bad.inf, bad.first_index));
  }
  std::vector<float> values(view.NumElements());
  kernels::ConvertToF32(view.data, view.dtype, values.size(), values.data());
  WeightMatrix matrix = memory.Keep(quant::QuantizeMatrix(
      ConstRows(values.data(), view.shape[0], view.shape[1]), scheme_->weights));
  matrix.act = scheme_->act;
  return matrix;
}

}  // namespace switchyard
