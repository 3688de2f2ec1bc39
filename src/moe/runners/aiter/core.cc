#include "moe/runners/aiter/core.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/elementwise/elementwise.h"
#include "moe/runners/aiter/epilogue.h"
#include "moe/runners/aiter/sorted_slots.h"
#include "moe/runners/builtin.h"
#include "quant/act_quant.h"
#include "quant/copy_rows.h"
#include "quant/expert_matmul.h"
#include "quant/expert_rows.h"
#include "quant/linear.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

// A bank without its padded columns and rows (hidden_pad, intermediate_pad).
ExpertMatrices Trimmed(const ExpertMatrices& matrices, size_t row_pad, size_t col_pad) {
  if (row_pad == 0 && col_pad == 0) return matrices;
  SY_CHECK(!matrices.format.in_panels);
  ExpertMatrices trimmed = matrices;
  trimmed.rows -= std::min(row_pad, trimmed.rows);
  trimmed.cols -= std::min(col_pad, trimmed.cols);
  return trimmed;
}

// The tokens that have an expert here, in order. Other rows (skipped tokens, the unused places of a
// slab) are never read: they may hold anything, and must not count in a scale.
struct LiveTokens {
  std::span<uint32_t> rows;   // token of each live row
  std::span<uint32_t> index;  // live row of each token that is one
};

LiveTokens FindLive(ExecContext& context, const SortedSlots& sorted, size_t num_tokens,
                    size_t top_k) {
  LiveTokens live;
  live.rows = context.arena.AllocateSpan<uint32_t>(num_tokens);
  live.index = context.arena.AllocateSpan<uint32_t>(num_tokens);
  uint32_t count = 0;
  for (size_t t = 0; t < num_tokens; ++t) {
    const auto slots = sorted.row_of_slot.subspan(t * top_k, top_k);
    if (std::none_of(slots.begin(), slots.end(), [](int32_t row) { return row >= 0; })) continue;
    live.index[t] = count;
    live.rows[count++] = static_cast<uint32_t>(t);
  }
  live.rows = live.rows.first(count);
  return live;
}

// The live rows alone; the rows themselves if all are live.
QuantRows Compact(ExecContext& context, const QuantRows& x, std::span<const uint32_t> rows) {
  if (rows.size() == x.rows) return x;
  return quant::PickRows(context, x, rows.size(), [&](size_t i) { return rows[i]; });
}

// The rows that gemm1 multiplies: without padded columns, each times its router weight where the
// layer wants that.
QuantRows Gemm1Rows(ExecContext& context, const AiterRunnerInput& input,
                    const AiterMoeQuantInfo& weights, std::span<const uint32_t> live) {
  QuantRows x = Compact(context, input.hidden_states, live);
  x.cols -= std::min(weights.hidden_pad, x.cols);
  if (!weights.doweight_stage1) return x;
  const Rows scaled = context.arena.AllocateRows(x.rows, x.cols);
  quant::DequantizeRows(context, x, scaled);
  for (size_t i = 0; i < scaled.rows; ++i)
    kernels::Scale(scaled.Row(i), input.topk_weights[live[i]], scaled.cols);
  return QuantRows::Plain(scaled);
}

// Sizes that contradict each other would be read past their ends.
void CheckCall(const AiterRunnerInput& input, const MoeQuantInfo& weights,
               const MoeRunnerConfig& config) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: runner aiter: {}", config.layer_id, what));
  };
  RequireExperts(weights, input.expert_mask, config.is_gated, config.layer_id);
  const QuantRows& x = input.hidden_states;
  if (x.cols != weights.w1.cols)
    refuse(fmt::format("hidden states have {} columns, expected {}", x.cols, weights.w1.cols));
  if (input.topk_ids.size() != x.rows * input.top_k ||
      input.topk_weights.size() != input.topk_ids.size())
    refuse(fmt::format("{} rows with top_k {}, {} ids and {} weights", x.rows, input.top_k,
                       input.topk_ids.size(), input.topk_weights.size()));
  if (config.apply_router_weight_on_input && input.top_k > 1)
    refuse(fmt::format("apply_router_weight_on_input needs top_k 1, found {}", input.top_k));
  const size_t out_rows = x.rows * (config.no_combine ? input.top_k : 1);
  const Rows& out = input.output;
  if (out.data != nullptr && (out.rows != out_rows || out.cols != weights.w2.rows))
    refuse(fmt::format("output is [{}, {}], expected [{}, {}]", out.rows, out.cols, out_rows,
                       weights.w2.rows));
  const DType dtype = input.output_dtype.value_or(DType::kF32);
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16)
    refuse(fmt::format("results cannot be rounded to {}", DTypeName(dtype)));
}

// Products of sorted rows with one matrix of each expert that has some.
StageWork WorkOf(const ExpertMatrices& matrices, const SortedSlots& sorted, DType activations) {
  const auto elements = static_cast<double>(matrices.rows * matrices.cols);
  StageWork work;
  work.bytes = elements * BitsPerWeight(matrices.format, matrices.rows, matrices.cols) / 8 *
               static_cast<double>(sorted.groups.experts.size());
  work.ops = 2 * elements * static_cast<double>(sorted.num_rows());
  work.arithmetic = ArithmeticOf(matrices.format.dtype, activations);
  return work;
}

void RoundTo(Rows rows, DType dtype) {
  for (size_t t = 0; t < rows.rows; ++t) {
    for (float& value : rows.RowSpan(t))
      value = dtype == DType::kBF16 ? ToFloat(ToBF16(value)) : ToFloat(ToF16(value));
  }
}

}  // namespace

AiterRunnerCore::AiterRunnerCore(const MoeRunnerConfig& config) : config_(config) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner aiter: {}", config.layer_id, what));
  };
  if (config.apply_router_weight_on_input && config.top_k > 1)
    refuse(fmt::format("apply_router_weight_on_input needs top_k 1, found {}", config.top_k));
  if (config.no_combine && config.routed_scaling_factor != 1.0)
    refuse("no_combine returns rows that are not summed; routed_scaling_factor has no place there");
}

const RunnerOutput& AiterRunnerCore::Run(ExecContext& context, const RunnerInput& base,
                                         const MoeQuantInfo& quant_info, RunningState&) const {
  const auto& input = static_cast<const AiterRunnerInput&>(base);
  CheckCall(input, quant_info, config_);
  AiterMoeQuantInfo weights = MakeAiterMoeQuantInfo(quant_info, config_);
  weights.w1 = Trimmed(quant_info.w1, quant_info.intermediate_pad, quant_info.hidden_pad);
  weights.w3 = Trimmed(quant_info.w3, quant_info.intermediate_pad, quant_info.hidden_pad);
  weights.w2 = Trimmed(quant_info.w2, quant_info.hidden_pad, quant_info.intermediate_pad);

  const size_t num_tokens = std::min(input.hidden_states.rows, input.num_local_tokens);
  const SortedSlots sorted = SortByExpert(context, input, num_tokens * input.top_k,
                                          weights.w1.num_experts(), config_.layer_id);
  // Each token is quantised or rounded once, whatever the number of its experts; a sorted row is a
  // pointer to it.
  const LiveTokens live = FindLive(context, sorted, num_tokens, input.top_k);
  // Rows that came as codes are not quantised again, not even when a weight has made them plain.
  const bool were_codes = input.hidden_states.kind != ActQuantKind::kNone;
  const quant::ActRows tokens = quant::PrepareExpertRows(
      context, Gemm1Rows(context, input, weights, live.rows), were_codes ? ActQuant{} : weights.a13,
      weights.w1.format, config_.activation_dtype);
  const std::span<uint32_t> token_of_row = context.arena.AllocateSpan<uint32_t>(sorted.num_rows());
  for (size_t row = 0; row < sorted.num_rows(); ++row)
    token_of_row[row] = live.index[sorted.slots[row] / input.top_k];
  const quant::ActRows x = quant::GatherRows(context.arena, tokens, token_of_row);
  const QuantRows hidden = [&] {
    const StageTimer timer(context.profile, Stage::kGateUp, [&] {
      StageWork work = WorkOf(weights.w1, sorted, config_.activation_dtype);
      work.bytes *= config_.is_gated ? 2 : 1;
      work.ops *= config_.is_gated ? 2 : 1;
      return work;
    });
    return quant::GateUp(
        context, sorted.groups, x, {weights.w1, weights.w3, config_.is_gated, config_.formula},
        quant::HiddenDType(weights.a2, weights.w2.format, config_.activation_dtype));
  }();
  const quant::ActRows prepared = quant::PrepareExpertRows(
      context, hidden, weights.a2, weights.w2.format, config_.activation_dtype);
  const Rows down = [&] {
    const StageTimer timer(context.profile, Stage::kDown,
                           [&] { return WorkOf(weights.w2, sorted, config_.activation_dtype); });
    return quant::Down(context, sorted.groups, prepared, weights.w2);
  }();

  auto* output = context.arena.New<AiterRunnerOutput>(input.promises);
  if (IsRoutewise(input.promises) || input.leaves_rows) {
    output->hidden_states = down;
    output->row_of_slot = sorted.row_of_slot;
    return *output;
  }
  const size_t rows_per_token = config_.no_combine ? input.top_k : 1;
  output->hidden_states = input.output.data != nullptr
                              ? input.output
                              : context.arena.AllocateRows(
                                    input.hidden_states.rows * rows_per_token, quant_info.w2.rows);
  const Epilogue epilogue{
      config_.no_combine,
      !weights.doweight_stage1 && (!config_.no_combine || config_.no_combine_keep_router_weight),
      static_cast<float>(config_.routed_scaling_factor)};
  {
    const StageTimer timer(context.profile, Stage::kCombine);
    epilogue.Run(context, sorted, input, down, output->hidden_states);
  }
  if (input.output_dtype && *input.output_dtype != DType::kF32)
    RoundTo(output->hidden_states, *input.output_dtype);
  return *output;
}

extern constinit const RunnerEntry aiter{
    "aiter", "fused: tokens sorted by expert, every expert's weights read once",
    [](const MoeRunnerConfig& config) -> std::unique_ptr<MoeRunnerCore> {
      return std::make_unique<AiterRunnerCore>(config);
    }};

}  // namespace switchyard::moe::runners
