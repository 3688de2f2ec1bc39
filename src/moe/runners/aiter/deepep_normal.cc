// Format deepep_normal in and out of the aiter runner (contract 4.2): DeepEP's token rows, its
// expanded rows, and MORI's rows, which are told apart by their promises and their extra fields.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "moe/runners/aiter/deepep.h"
#include "moe/runners/builtin.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::runners {
namespace {

[[noreturn]] void Refuse(const MoeRunnerConfig& config, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("layer {}: {}", config.layer_id, what));
}

// -1 becomes the sink slot L, whose mask is 0.
void FillTokenRoutes(ExecContext& context, const DeepepNormalDispatchOutput& normal,
                     size_t num_local_experts, const MoeRunnerConfig& config,
                     AiterRunnerInput& input) {
  const std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(normal.topk_ids.size());
  const auto sink = static_cast<int32_t>(num_local_experts);
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int32_t id = normal.topk_ids[slot];
    // The sink is no id of the dispatch.
    if (id < -1 || id >= sink)
      Refuse(config, fmt::format("token {} names expert {}; ids are -1 to {}",
                                 slot / std::max<size_t>(1, normal.top_k), id, sink - 1));
    ids[slot] = id == -1 ? sink : id;
  }
  input.topk_ids = ids;
  input.topk_weights = normal.topk_weights;
  input.top_k = normal.top_k;
  input.expert_mask = SinkMask(context, num_local_experts);
}

// Rows sorted by expert: their experts follow from the counts.
void FillExpandedRows(ExecContext& context, const DeepepNormalDispatchOutput& normal,
                      size_t num_local_experts, const MoeRunnerConfig& config,
                      AiterRunnerInput& input) {
  const std::span<const int32_t> counts = normal.num_recv_tokens_per_expert;
  if (counts.size() != num_local_experts)
    Refuse(config, fmt::format("the dispatch counts the rows of {} experts, the rank has {}",
                               counts.size(), num_local_experts));
  const std::span<size_t> first = context.arena.AllocateSpan<size_t>(counts.size() + 1);
  first[0] = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] < 0)
      Refuse(config, fmt::format("the dispatch counts {} rows for expert {}", counts[e], e));
    first[e + 1] = first[e] + static_cast<size_t>(counts[e]);
  }
  if (first.back() > normal.hidden_states.rows)
    Refuse(config, fmt::format("the dispatch counts {} rows for its experts and holds {}",
                               first.back(), normal.hidden_states.rows));
  FillExpandedRoutes(
      context, counts, normal.hidden_states.rows, [&](size_t e) { return first[e]; }, input);
  input.expert_mask = SinkMask(context, counts.size());
}

// MORI: global ids, only the first num_recv_tokens rows are defined; the wire's type meets that of
// the weights in the table of contract 4.2.
void FillMoriRows(ExecContext& context, const DeepepNormalDispatchOutput& normal,
                  const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                  AiterRunnerInput& input) {
  const MoriDispatch& mori = *normal.mori;
  if (mori.expert_mask.empty())
    Refuse(config,
           "MORI rows carry global ids, and the dispatch gives no expert_mask that says "
           "which are local");
  const size_t num_slots = normal.hidden_states.rows * normal.top_k;
  if (normal.topk_ids.size() != num_slots || normal.topk_weights.size() != num_slots)
    Refuse(config,
           fmt::format("{} rows with top_k {}, {} ids and {} weights", normal.hidden_states.rows,
                       normal.top_k, normal.topk_ids.size(), normal.topk_weights.size()));
  const size_t cap = mori.recv_cap == 0 ? normal.hidden_states.rows
                                        : std::min(mori.recv_cap, normal.hidden_states.rows);
  if (mori.num_recv_tokens > cap)
    Refuse(config, fmt::format("{} rows were received, the buffer or the receive cap (recv_cap) "
                               "holds {}",
                               mori.num_recv_tokens, cap));
  if (mori.expert_output.data != nullptr && mori.expert_output.rows < cap)
    Refuse(config, fmt::format("expert_output has {} rows, expected at least {}",
                               mori.expert_output.rows, cap));
  const AiterMoeQuantInfo weights = MakeAiterMoeQuantInfo(quant_info, config);
  const bool clamped_interleaved = weights.swiglu_limit > 0 && config.gate_up_interleaved;
  const Reconciled reconciled =
      ReconcileWire(weights.quant_type, normal.hidden_states.kind, clamped_interleaved);
  input.quant_type = reconciled.quant_type;
  input.hidden_states = normal.hidden_states.Slice(0, cap);
  if (reconciled.dequantize) {
    const Rows rows = context.arena.AllocateRows(cap, normal.hidden_states.cols);
    const size_t defined = mori.num_recv_tokens;
    quant::DequantizeRows(context, input.hidden_states.Slice(0, defined), rows.Slice(0, defined));
    for (size_t t = 0; t < defined; ++t) {
      for (float& value : rows.RowSpan(t)) value = ToFloat(ToBF16(value));
    }
    input.hidden_states = QuantRows::Plain(rows);
  }
  input.topk_ids = normal.topk_ids.first(cap * normal.top_k);
  input.topk_weights = normal.topk_weights.first(cap * normal.top_k);
  input.top_k = normal.top_k;
  input.expert_mask = mori.expert_mask;
  input.num_local_tokens = mori.num_recv_tokens;
  input.output_dtype = mori.out_dtype;
  if (mori.expert_output.data != nullptr) input.output = mori.expert_output.Slice(0, cap);
}

const AiterRunnerInput& PrePermute(ExecContext& context, const DeepepNormalDispatchOutput& normal,
                                   const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                   RunningState& state) {
  CheckDeepepConfig(config, normal);
  const bool mori = normal.mori != nullptr;
  const bool expanded = !mori && normal.promises.row_kind == RowKind::kExpanded;
  DispatchPromises expected = mori ? kTokenRows : expanded ? kExpandedRows : kLocalTokenRows;
  if (IsRoutewise(normal.promises)) expected = Routewise(expected);
  RequirePromises(normal, expected, AiterRunnerInput::kRunner, config.layer_id);
  auto* input = context.arena.New<AiterRunnerInput>();
  input->promises = normal.promises;
  input->hidden_states = normal.hidden_states;
  input->quant_type = MakeAiterMoeQuantInfo(quant_info, config).quant_type;
  state.Emplace<AiterCombineState>(context.arena,
                                   mori ? normal.mori->origin_topk_ids : normal.topk_ids,
                                   mori ? normal.mori->origin_topk_weights : normal.topk_weights);
  if (mori) {
    FillMoriRows(context, normal, quant_info, config, *input);
  } else if (expanded) {
    FillExpandedRows(context, normal, quant_info.w1.num_experts(), config, *input);
  } else {
    FillTokenRoutes(context, normal, quant_info.w1.num_experts(), config, *input);
  }
  return *input;
}

const DeepepNormalCombineInput& PostPermute(ExecContext& context, const AiterRunnerOutput& output,
                                            const MoeQuantInfo&, const MoeRunnerConfig&,
                                            RunningState& state) {
  auto* combine =
      context.arena.New<DeepepNormalCombineInput>(output.hidden_states, output.promises);
  combine->topk_ids = state.Get<AiterCombineState>().topk_ids;
  combine->topk_weights = state.Get<AiterCombineState>().topk_weights;
  if (IsRoutewise(output.promises)) {
    combine->routewise = RoutewiseLayout::kExpanded;
    combine->row_of_slot = output.row_of_slot;
  }
  return *combine;
}

}  // namespace

extern constinit const PermuteEntry aiter_deepep_normal = MakePermutes<&PrePermute, &PostPermute>();

}  // namespace switchyard::moe::runners
