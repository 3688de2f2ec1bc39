#include "switchyard/moe/ascend/hidden_states_quant.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/quantize/quantize.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void RefuseDType(std::string_view found, size_t layer_id) {
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("layer {}: dynamic quantisation of hidden states to {}; there are int8 and "
                  "int4 per token, mxfp8 (e4m3) and mxfp4 (e2m1)",
                  layer_id, found));
}

ActQuantKind DynamicKind(DType dtype, size_t layer_id) {
  switch (dtype) {
    case DType::kI8: return ActQuantKind::kInt8Token;
    case DType::kI4: return ActQuantKind::kInt4Token;
    case DType::kF8E4M3: return ActQuantKind::kMxFp8;
    case DType::kF4E2M1: return ActQuantKind::kMxFp4;
    default: RefuseDType(DTypeName(dtype), layer_id);
  }
}

void CheckAttribute(std::span<const float> values, std::string_view name, size_t layer_id) {
  const auto refuse = [&](const std::string& what) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("layer {}: static quantisation of hidden states: {} {}", layer_id, name, what));
  };
  if (values.empty()) refuse("is missing");
  for (float value : values) {
    if (!std::isfinite(value)) refuse(fmt::format("holds {}", value));
  }
}

}  // namespace

DynamicHiddenStatesQuant::DynamicHiddenStatesQuant(DType dtype, size_t layer_id,
                                                   MxScaleRule mx_rule) {
  how_.kind = DynamicKind(dtype, layer_id);
  how_.mx_rule = mx_rule;
}

DynamicHiddenStatesQuant::DynamicHiddenStatesQuant(const ActQuant& how, size_t layer_id)
    : how_(how) {
  const bool known = how.kind == ActQuantKind::kInt8Token || how.kind == ActQuantKind::kInt4Token ||
                     how.kind == ActQuantKind::kMxFp8 || how.kind == ActQuantKind::kMxFp4;
  if (!known) RefuseDType(ActQuantKindName(how.kind), layer_id);
}

QuantRows DynamicHiddenStatesQuant::Run(ExecContext& context, ConstRows x) const {
  return quant::QuantizeRows(context, x, how_);
}

StaticHiddenStatesQuant::StaticHiddenStatesQuant(const StaticQuantAttributes& attributes,
                                                 size_t layer_id)
    : attributes_(attributes), layer_id_(layer_id) {
  CheckAttribute(attributes.scale_reciprocal, "scale_reciprocal", layer_id);
  CheckAttribute(attributes.offset, "offset", layer_id);
}

QuantRows StaticHiddenStatesQuant::Run(ExecContext& context, ConstRows x) const {
  const auto check = [&](std::span<const float> values, std::string_view name) {
    if (values.size() == 1 || values.size() == x.cols) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: static quantisation of hidden states: {} has {} values, "
                            "expected 1 or {}",
                            layer_id_, name, values.size(), x.cols));
  };
  check(attributes_.scale_reciprocal, "scale_reciprocal");
  check(attributes_.offset, "offset");
  QuantRows result;
  result.kind = ActQuantKind::kInt8Static;
  result.dtype = DType::kI8;
  result.rows = x.rows;
  result.cols = x.cols;
  result.stride = (x.cols + 63) / 64 * 64;
  int8_t* codes = context.arena.AllocateSpan<int8_t>(x.rows * result.stride).data();
  result.data = reinterpret_cast<const std::byte*>(codes);
  const bool one_value = attributes_.scale_reciprocal.size() == 1 && attributes_.offset.size() == 1;
  const auto at = [](std::span<const float> values, size_t k) {
    return values[values.size() == 1 ? 0 : k];
  };
  quant::ForEachRow(context, x.rows, [&](size_t i) {
    int8_t* out = codes + i * result.stride;
    if (one_value) {
      kernels::EncodeInt8(x.Row(i), x.cols,
                          {attributes_.scale_reciprocal[0], attributes_.offset[0]}, out);
      return;
    }
    for (size_t k = 0; k < x.cols; ++k) {
      kernels::EncodeInt8(x.Row(i) + k, 1,
                          {at(attributes_.scale_reciprocal, k), at(attributes_.offset, k)},
                          out + k);
    }
  });
  return result;
}

}  // namespace switchyard::moe::ascend
