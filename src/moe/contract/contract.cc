// Names and casts of the contract's types.
#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {
namespace {

void RequireStandard(DispatchFormat format, std::string_view what) {
  if (format == DispatchFormat::kStandard) return;
  throw Error(ErrorCode::kInternal, fmt::format("{} of format {} was taken for format standard",
                                                what, DispatchFormatName(format)));
}

}  // namespace

std::string_view ScoringFuncName(ScoringFunc scoring) {
  switch (scoring) {
    case ScoringFunc::kSoftmax: return "softmax";
    case ScoringFunc::kSigmoid: return "sigmoid";
    case ScoringFunc::kSqrtSoftplus: return "sqrtsoftplus";
  }
  return "?";
}

std::string_view RoutingPolicyName(RoutingPolicy policy) {
  switch (policy) {
    case RoutingPolicy::kScores: return "scores";
    case RoutingPolicy::kLlama4: return "llama4";
    case RoutingPolicy::kTopKThenSoftmax: return "topk_then_softmax";
    case RoutingPolicy::kPhimoeSparsemixer: return "phimoe_sparsemixer";
    case RoutingPolicy::kCohere2Sigmoid: return "cohere2_sigmoid";
    case RoutingPolicy::kAfmoe: return "afmoe";
    case RoutingPolicy::kGroupRouter: return "group_router";
    case RoutingPolicy::kGemma4: return "gemma4";
    case RoutingPolicy::kHash: return "hash";
    case RoutingPolicy::kFunction: return "function";
  }
  return "?";
}

std::string_view DispatchFormatName(DispatchFormat format) {
  switch (format) {
    case DispatchFormat::kStandard: return "standard";
    case DispatchFormat::kAscendTp: return "ascend_tp";
    case DispatchFormat::kDeepepNormal: return "deepep_normal";
    case DispatchFormat::kDeepepLl: return "deepep_ll";
    case DispatchFormat::kDeepepV2: return "deepep_v2";
    case DispatchFormat::kFlashinfer: return "flashinfer";
  }
  return "?";
}

const StandardDispatchOutput& AsStandard(const DispatchOutput& output) {
  RequireStandard(output.format, "a dispatch output");
  return static_cast<const StandardDispatchOutput&>(output);
}

const StandardCombineInput& AsStandard(const CombineInput& input) {
  RequireStandard(input.format, "a combine input");
  return static_cast<const StandardCombineInput&>(input);
}

}  // namespace switchyard::moe
