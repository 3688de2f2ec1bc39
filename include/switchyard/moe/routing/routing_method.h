// The routing methods that compute kernels name, and whether one is a given policy. Contract 2.9.
#pragma once

#include <string_view>

#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// The numbers are those of the kernels' interfaces.
enum class RoutingMethodType {
  kDefault = 0,           // softmax, top-k
  kRenormalize = 1,       // top-k, softmax over the chosen
  kDeepSeekV3 = 2,        // sigmoid, bias, top-2 sums of groups, groups, top-k, renormalize
  kLlama4 = 3,            // top-1, sigmoid
  kRenormalizeNaive = 4,  // softmax, top-k, renormalize
  kTopK = 5,              // top-k of the logits, no score
  kSigmoidRenorm = 6,     // sigmoid, top-k, renormalize
  kMiniMax2 = 7,          // sigmoid, bias, top-k, renormalize
  kSigmoid = 8,           // sigmoid, top-k
  kUnspecified = 9,
};
std::string_view RoutingMethodName(RoutingMethodType method);

// The method that is this policy exactly, kUnspecified if none is. The scaling factor is no part of
// a method: kernels take it as an argument.
RoutingMethodType RoutingMethodOf(const TopKConfig& config);

// Whether a kernel that routes by `method` itself may replace SelectExperts: the method is the
// policy, and there is no placement map, no shared column and no log1p variant.
bool RoutingMethodReproduces(RoutingMethodType method, const TopKConfig& config,
                             const TopKInputs& inputs);

}  // namespace switchyard::moe
