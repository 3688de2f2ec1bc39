// The references that every runner is held to: one MoE layer in f64, by plain loops. Contract 8.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/runner.h"

namespace switchyard::moe {

// Which of the two references.
enum class OracleKind {
  kDense,    // weights dequantised exactly, activations untouched
  kFaithful  // activations quantised where the scheme does it (MoeQuantInfo::a13, a2), in f32 as a
             // kernel would; every sum in f64
};

// Tokens with their routing.
//
// Shapes: hidden [T, H]; topk_ids, topk_weights [T, K]; id -1 = no expert.
struct OracleTokens {
  ConstRows hidden;
  std::span<const int32_t> topk_ids;
  std::span<const float> topk_weights;
  size_t top_k = 0;
  size_t first_token = 0;  // number of the first one, for messages
};

// f64 rows.
struct OracleRows {
  size_t rows = 0;
  size_t cols = 0;
  std::vector<double> values;
};

// out[t] = factor * sum over k of w[t, k] * (W2[e] act(W1[e] x + b1[e], W3[e] x + b3[e]) + b2[e]),
// e = id of (t, k) through quant_info.expert_mask; with config.no_combine one row for each (t, k),
// 0 where the id is -1 or masked. apply_router_weight_on_input: (w x) takes the place of x, and the
// sum has no weights.
//
// Shapes: returns [T, H], or [T * K, H] with no_combine. config.formula must be set.
// Single-threaded, and as slow as it is plain: O(T K H I).
// Errors: kInvalidArgument naming layer, token and id for an id that is no expert; or the sizes of
//   rows, routing, mask and matrices that contradict each other; router weight on input with top_k
//   > 1.
OracleRows RunOracle(OracleKind kind, const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                     const OracleTokens& tokens);

}  // namespace switchyard::moe
