#include "moe/runners/aiter/core.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/convert/convert.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/runners/builtin.h"
#include "quant/linear.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

// Rows whose gate and up products wait in cache for the activation.
constexpr size_t kRowsPerPass = 96;

// The slots (token * K + k) grouped by expert, in ascending order within each.
struct SortedSlots {
  std::span<uint32_t> slots;       // [M] slot of each sorted row
  std::span<int32_t> row_of_slot;  // [T * K] sorted row of each slot, -1 if skipped
  std::span<uint32_t> experts;     // the experts that have rows, ascending
  std::span<uint32_t> begin;       // [experts + 1] first row of each
  size_t num_rows = 0;
};

// A counting sort: O(T K + E).
SortedSlots SortByExpert(ExecContext& context, const AiterRunnerInput& input, size_t num_experts) {
  const size_t num_slots = input.topk_ids.size();
  SortedSlots sorted;
  sorted.slots = context.arena.AllocateSpan<uint32_t>(num_slots);
  sorted.row_of_slot = context.arena.AllocateSpan<int32_t>(num_slots);
  const std::span<uint32_t> next = context.arena.AllocateSpan<uint32_t>(num_experts);
  std::fill(next.begin(), next.end(), 0u);
  for (int32_t id : input.topk_ids) {
    if (id >= 0) ++next[static_cast<size_t>(id)];
  }
  sorted.experts = context.arena.AllocateSpan<uint32_t>(num_experts);
  sorted.begin = context.arena.AllocateSpan<uint32_t>(num_experts + 1);
  size_t used = 0;
  uint32_t row = 0;
  for (size_t e = 0; e < num_experts; ++e) {
    const uint32_t count = next[e];
    next[e] = row;
    if (count == 0) continue;
    sorted.experts[used] = static_cast<uint32_t>(e);
    sorted.begin[used++] = row;
    row += count;
  }
  sorted.begin[used] = row;
  sorted.experts = sorted.experts.first(used);
  sorted.num_rows = row;
  for (size_t slot = 0; slot < num_slots; ++slot) {
    const int32_t id = input.topk_ids[slot];
    if (id < 0) {
      sorted.row_of_slot[slot] = -1;
      continue;
    }
    const uint32_t at = next[static_cast<size_t>(id)]++;
    sorted.slots[at] = static_cast<uint32_t>(slot);
    sorted.row_of_slot[slot] = static_cast<int32_t>(at);
  }
  return sorted;
}

// One product of some activation rows with rows [n0, n0 + n) of an expert's matrix.
void Multiply(const ExpertMatrices& matrices, size_t expert, size_t n0, size_t n,
              const quant::ActRows& x, float* out, size_t out_stride) {
  kernels::MatmulArgs args;
  args.a_rows = x.rows.data();
  args.num_rows = x.rows.size();
  args.w = matrices.data[expert] + n0 * matrices.stride * DTypeBytes(matrices.dtype);
  args.w_stride = matrices.stride;
  args.n = n;
  args.k = matrices.cols;
  args.out = out;
  args.out_stride = out_stride;
  quant::MatmulFor(x.dtype, matrices.dtype)(args);
}

// hidden = act(x W1^T) * (x W3^T) for every sorted row, in the type that the down product
// multiplies with.
quant::ActRows GateUp(ExecContext& context, const SortedSlots& sorted, const quant::ActRows& x,
                      const MoeQuantInfo& weights, const Activation& activation,
                      DType hidden_dtype) {
  const size_t intermediate = weights.w1.rows;
  // Rows start at multiples of 64 bytes.
  const size_t stride = (intermediate + 31) / 32 * 32;
  std::byte* hidden =
      context.arena.AllocateSpan<std::byte>(sorted.num_rows * stride * DTypeBytes(hidden_dtype))
          .data();
  const std::span<const void*> hidden_rows =
      context.arena.AllocateSpan<const void*>(sorted.num_rows);
  for (size_t r = 0; r < sorted.num_rows; ++r)
    hidden_rows[r] = hidden + r * stride * DTypeBytes(hidden_dtype);
  const size_t task_rows =
      quant::TaskRows(sorted.experts.size() * intermediate, context.pool.num_threads());
  const size_t tasks_per_expert = (intermediate + task_rows - 1) / task_rows;
  float* scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * 2 * kRowsPerPass * task_rows)
          .data();
  context.pool.Run(sorted.experts.size() * tasks_per_expert, [&](size_t task, size_t worker) {
    const size_t index = task / tasks_per_expert;
    const size_t n0 = task % tasks_per_expert * task_rows;
    const size_t n = std::min(task_rows, intermediate - n0);
    float* gate = scratch + worker * 2 * kRowsPerPass * task_rows;
    float* up = gate + kRowsPerPass * task_rows;
    for (size_t row = sorted.begin[index]; row < sorted.begin[index + 1]; row += kRowsPerPass) {
      const quant::ActRows pass =
          x.Slice(row, std::min<size_t>(kRowsPerPass, sorted.begin[index + 1] - row));
      Multiply(weights.w1, sorted.experts[index], n0, n, pass, gate, n);
      Multiply(weights.w3, sorted.experts[index], n0, n, pass, up, n);
      for (size_t r = 0; r < pass.rows.size(); ++r) {
        std::byte* out = hidden + ((row + r) * stride + n0) * DTypeBytes(hidden_dtype);
        float* y = gate + r * n;
        activation(y, up + r * n, n, y);
        kernels::ConvertFromF32(y, n, hidden_dtype, out);
      }
    }
  });
  return {hidden_dtype, hidden_rows, intermediate};
}

// One row per slot: hidden W2^T.
Rows Down(ExecContext& context, const SortedSlots& sorted, const quant::ActRows& hidden,
          const ExpertMatrices& w2) {
  const Rows out = context.arena.AllocateRows(sorted.num_rows, w2.rows);
  const size_t task_rows =
      quant::TaskRows(sorted.experts.size() * w2.rows, context.pool.num_threads());
  const size_t tasks_per_expert = (w2.rows + task_rows - 1) / task_rows;
  context.pool.Run(sorted.experts.size() * tasks_per_expert, [&](size_t task, size_t) {
    const size_t index = task / tasks_per_expert;
    const size_t n0 = task % tasks_per_expert * task_rows;
    const size_t begin = sorted.begin[index];
    Multiply(w2, sorted.experts[index], n0, std::min(task_rows, w2.rows - n0),
             hidden.Slice(begin, sorted.begin[index + 1] - begin), out.Row(begin) + n0, out.stride);
  });
  return out;
}

// out[t] = sum over k of weight[t, k] * scale * rows[row of (t, k)], columns in order.
Rows WeightedSum(ExecContext& context, const SortedSlots& sorted, const AiterRunnerInput& input,
                 ConstRows rows, float scale) {
  const Rows out = context.arena.AllocateRows(input.hidden_states.rows, rows.cols);
  constexpr size_t kTokensPerTask = 4;
  context.pool.Run((out.rows + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(out.rows, (task + 1) * kTokensPerTask);
    for (size_t t = task * kTokensPerTask; t < end; ++t) {
      std::fill_n(out.Row(t), out.cols, 0.0f);
      for (size_t slot = t * input.top_k; slot < (t + 1) * input.top_k; ++slot) {
        if (sorted.row_of_slot[slot] < 0) continue;
        kernels::ScaleAddTo(rows.Row(static_cast<size_t>(sorted.row_of_slot[slot])),
                            input.topk_weights[slot] * scale, out.cols, out.Row(t));
      }
    }
  });
  return out;
}

}  // namespace

AiterRunnerCore::AiterRunnerCore(const MoeRunnerConfig& config) : config_(config) {
  if (!config.is_gated) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "layer {}: runner aiter computes gated experts only; use --moe-runner reference",
            config.layer_id));
  }
}

const RunnerOutput& AiterRunnerCore::Run(ExecContext& context, const RunnerInput& base,
                                         const MoeQuantInfo& quant_info, RunningState&) const {
  const auto& input = static_cast<const AiterRunnerInput&>(base);
  const SortedSlots sorted = SortByExpert(context, input, config_.num_local_experts);
  // Each token is rounded once, whatever the number of its experts; a sorted row is a pointer to
  // it.
  const auto act_for = [&](const ExpertMatrices& w) {
    return kernels::FindMatmul(config_.activation_dtype, w.dtype) != nullptr
               ? config_.activation_dtype
               : DType::kF32;
  };
  const quant::ActRows tokens =
      quant::PrepareActivations(context, input.hidden_states, act_for(quant_info.w1));
  const std::span<const void*> rows = context.arena.AllocateSpan<const void*>(sorted.num_rows);
  for (size_t r = 0; r < sorted.num_rows; ++r) rows[r] = tokens.rows[sorted.slots[r] / input.top_k];
  const quant::ActRows hidden = GateUp(context, sorted, {tokens.dtype, rows, tokens.cols},
                                       quant_info, config_.formula, act_for(quant_info.w2));
  const Rows down = Down(context, sorted, hidden, quant_info.w2);
  auto* output = context.arena.New<AiterRunnerOutput>();
  output->runner = "aiter";
  output->hidden_states =
      WeightedSum(context, sorted, input, down, static_cast<float>(config_.routed_scaling_factor));
  return *output;
}

extern constinit const RunnerEntry aiter{
    "aiter", "fused: tokens sorted by expert, every expert's weights read once",
    [](const MoeRunnerConfig& config) -> std::unique_ptr<MoeRunnerCore> {
      return std::make_unique<AiterRunnerCore>(config);
    }};

}  // namespace switchyard::moe::runners
