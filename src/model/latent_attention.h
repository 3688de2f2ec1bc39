// Multi-head latent attention, computed on the latent rows themselves.
#pragma once

#include <functional>
#include <span>

#include "model/attention.h"
#include "model/tensor_parallel.h"
#include "model/weights.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/model/model.h"

namespace switchyard {

// What one layer's latent attention needs beside its input.
struct LatentAttentionArgs {
  const ModelConfig& config;
  const AttentionWeights& weights;
  TensorParallel& tensor_parallel;
  // The type of activations for a matrix.
  const std::function<DType(const WeightMatrix&)>& act_for;
  std::span<const SequenceChunk> chunks;
  const KvView& cache;
  size_t layer;
  const RopeTable& rope;
};

// A head's key and value are products of the latent row c of a token: k = [Wk c ; r], v = Wv c, r
// being the rotated part that all heads share. So a score is q k = (Wk^T q) c + q_r r, and the sum
// of values is Wv (sum of c): the cache holds [c ; r] alone, whatever the number of heads, and the
// matrices meet each query and each sum once instead of every key. One way for prompts and answers,
// so that how a sequence is cut into passes changes no bit.
//
//   x -- q_a, norm, q_b --> [q | q_r] per head -- Wk^T, rotation --> [q' | q_r'] -+
//   x -- kv_a, norm, rotation --> [c | r] --> cache ------------------- softmax --+--> sums of c
//   sums of c -- Wv per head --> out
//
// Shapes: x [T, H], normalised; returns [T, heads * value_dim], before the projection o.
// Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 (absorbed matrices).
Rows AttendLatent(ExecContext& context, const LatentAttentionArgs& args, ConstRows x);

}  // namespace switchyard
