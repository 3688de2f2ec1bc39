// Layer and dispatcher meet: the arguments that come from the layer, and the dtype reconciliation
// table. Contract 4.2.
#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "switchyard/moe/runners/aiter.h"

namespace switchyard::moe {
namespace {

// From the way the scheme quantises activations and the form of its weights.
QuantType QuantTypeOf(const MoeQuantInfo& info) {
  switch (info.a13.kind) {
    case ActQuantKind::kInt8Token:
    case ActQuantKind::kInt4Token:
    case ActQuantKind::kInt8Static:
    case ActQuantKind::kFp8Token:
    case ActQuantKind::kFp8Tensor:
    case ActQuantKind::kFp8TensorStatic: return QuantType::kPerToken;
    case ActQuantKind::kFp8Group: return QuantType::kPer128x128;
    case ActQuantKind::kMxFp8:
    case ActQuantKind::kMxFp4: return QuantType::kPer1x32;
    case ActQuantKind::kNone: break;
  }
  // Weight-only: MX weights take the bf16 activations of per_1x32, the others are products of rows.
  return info.w1.format.scale_dtype == DType::kF8E8M0 && info.w1.format.is_quantized()
             ? QuantType::kPer1x32
             : QuantType::kNo;
}

}  // namespace

AiterMoeQuantInfo MakeAiterMoeQuantInfo(const MoeQuantInfo& quant_info,
                                        const MoeRunnerConfig& config) {
  AiterMoeQuantInfo info{quant_info};
  info.quant_type = QuantTypeOf(quant_info);
  info.doweight_stage1 = config.apply_router_weight_on_input;
  info.swiglu_limit = config.swiglu_limit.value_or(0.0f);
  info.fp8_activations = quant_info.a2.kind == ActQuantKind::kMxFp8 ||
                         quant_info.a2.kind == ActQuantKind::kFp8Token ||
                         quant_info.a2.kind == ActQuantKind::kFp8Group;
  return info;
}

Reconciled ReconcileWire(QuantType weights, ActQuantKind wire, bool clamped_interleaved) {
  const bool plain = wire == ActQuantKind::kNone;
  const bool fp8 = wire == ActQuantKind::kFp8Group;
  const bool fp4 = wire == ActQuantKind::kMxFp4;
  if (!plain && !fp8 && !fp4 && wire != ActQuantKind::kMxFp8) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("runner aiter takes rows sent as plain, fp8 (1x128), mxfp8 or mxfp4; "
                            "the dispatcher sent {} to weights of quant type {}",
                            ActQuantKindName(wire), QuantTypeName(weights)));
  }
  switch (weights) {
    case QuantType::kPer1x32: return {fp8 || (fp4 && clamped_interleaved), weights};
    case QuantType::kPer128x128:
    case QuantType::kPerToken: return {fp4 || wire == ActQuantKind::kMxFp8, weights};
    case QuantType::kNo:
      if (fp4 || wire == ActQuantKind::kMxFp8) return {false, QuantType::kPer1x32};
      return {false, fp8 ? QuantType::kPer128x128 : QuantType::kNo};
  }
  return {};
}

}  // namespace switchyard::moe
