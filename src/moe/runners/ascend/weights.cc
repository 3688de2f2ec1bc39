// Vendor operands behind canonical matrices.
#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe {

AscendQuantInfo MakeAscendQuantInfo(const MoeQuantInfo& quant_info) {
  AscendQuantInfo info;
  static_cast<MoeQuantInfo&>(info) = quant_info;
  return info;
}

AscendExpertWeights::AscendExpertWeights(const Prefix& w13, const Prefix& w2, bool is_gated,
                                         size_t layer_id)
    : w13_(w13),
      w2_(w2),
      is_gated_(is_gated),
      w13_weights_(ascend::ImportOperands(w13.mode, w13.operands, "w13", layer_id)),
      w2_weights_(ascend::ImportOperands(w2.mode, w2.operands, "w2", layer_id)) {
  const auto check = [&](const Prefix& prefix, const ExpertMatrices& w, std::string_view name) {
    const ascend::GroupedMatmulMode found =
        ascend::ModeOf(w.format, w.cols, prefix.act.kind, layer_id);
    if (found == prefix.mode) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: {}: {} with rows of {} is {}", layer_id, name,
                            GroupedMatmulModeName(prefix.mode), ActQuantKindName(prefix.act.kind),
                            GroupedMatmulModeName(found)));
  };
  const ExpertMatrices both = w13_weights_.View();
  check(w13, both, "w13");
  check(w2, w2_weights_.View(), "w2");
  if (!is_gated) return;
  if (both.rows % 2 != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: w13 has {} rows, gate and up need an even number", layer_id,
                            both.rows));
  }
  // Row n of a grid of one row per channel starts at n * scale_stride.
  const size_t half = both.rows / 2;
  for (const std::byte* data : both.data)
    up_data_.push_back(data + BytesOf(both.format.dtype, half * both.stride));
  for (const std::byte* scale : both.scale)
    up_scale_.push_back(scale + half * both.scale_stride * DTypeBytes(both.format.scale_dtype));
  for (const std::byte* zero : both.zero) up_zero_.push_back(zero + half * both.scale_stride);
  for (const float* bias : both.bias) up_bias_.push_back(bias + half * both.bias_stride);
}

AscendQuantInfo AscendExpertWeights::QuantInfo() const {
  AscendQuantInfo info;
  info.w1 = w13_weights_.View();
  if (is_gated_) {
    info.w1.rows /= 2;
    info.w3 = info.w1;
    info.w3.data = up_data_;
    info.w3.scale = up_scale_;
    info.w3.zero = up_zero_;
    info.w3.bias = up_bias_;
  }
  info.w2 = w2_weights_.View();
  info.a13 = w13_.act;
  info.a2 = w2_.act;
  info.w13_operands = w13_.operands;
  info.w2_operands = w2_.operands;
  info.int_bias13 = w13_weights_.int_bias();
  info.int_bias2 = w2_weights_.int_bias();
  return info;
}

}  // namespace switchyard::moe
