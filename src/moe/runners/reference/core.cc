// The oracle of moe/oracle as a runner: the quantisation-faithful form, or the dense one where no
// activation is quantised. Plain and slow; ignores MoeRunnerConfig::activation_dtype.
#include <fmt/format.h>

#include "moe/runners/builtin.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/oracle/oracle.h"
#include "switchyard/moe/runners/reference.h"

namespace switchyard::moe::runners {
namespace {

class ReferenceRunnerCore : public MoeRunnerCore {
 public:
  explicit ReferenceRunnerCore(const MoeRunnerConfig& config) : config_(config) {
    if (!config.apply_router_weight_on_input || config.top_k <= 1) return;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner reference: apply_router_weight_on_input needs top_k "
                            "1, found {}",
                            config.layer_id, config.top_k));
  }

  const RunnerOutput& Run(ExecContext& context, const RunnerInput& base,
                          const MoeQuantInfo& layer_info, RunningState&) const override {
    const auto& input = static_cast<const ReferenceRunnerInput&>(base);
    MoeQuantInfo quant_info = layer_info;
    if (input.were_codes) quant_info.a13 = {};
    const TopKOutput& topk = input.topk_output;
    const size_t num_tokens = input.hidden_states.rows;
    MoeRunnerConfig config = config_;
    auto* output = context.arena.New<ReferenceRunnerOutput>();
    output->promises = input.promises;
    if (IsRoutewise(input.promises)) {
      config.no_combine = true;
      output->row_of_slot = LocalSlots(context, topk, quant_info.expert_mask);
    }
    const size_t rows_per_token = config.no_combine ? topk.top_k : 1;
    output->hidden_states =
        context.arena.AllocateRows(num_tokens * rows_per_token, quant_info.w2.rows);
    if (DependsOnBatch(quant_info)) {
      Store(quant_info, config, {input.hidden_states, topk.ids, topk.weights, topk.top_k},
            output->hidden_states);
      return *output;
    }
    context.pool.Run(num_tokens, [&](size_t t, size_t) {
      Store(quant_info, config,
            {input.hidden_states.Slice(t, 1), topk.Ids(t), topk.Weights(t), topk.top_k, t},
            output->hidden_states.Slice(t * rows_per_token, rows_per_token));
    });
    return *output;
  }

 private:
  // A scale over all rows needs all rows at once.
  static bool DependsOnBatch(const MoeQuantInfo& info) {
    return info.a13.kind == ActQuantKind::kFp8Tensor || info.a2.kind == ActQuantKind::kFp8Tensor;
  }

  // Row t * K + k of each slot that is computed here.
  static std::span<const int32_t> LocalSlots(ExecContext& context, const TopKOutput& topk,
                                             std::span<const int32_t> mask) {
    const std::span<int32_t> rows = context.arena.AllocateSpan<int32_t>(topk.ids.size());
    for (size_t slot = 0; slot < rows.size(); ++slot) {
      const int32_t id = topk.ids[slot];
      const bool local = id >= 0 && (mask.empty() || mask[static_cast<size_t>(id)] != 0);
      rows[slot] = local ? static_cast<int32_t>(slot) : -1;
    }
    return rows;
  }

  static void Store(const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                    const OracleTokens& tokens, Rows out) {
    const OracleRows rows = RunOracle(OracleKind::kFaithful, quant_info, config, tokens);
    for (size_t i = 0; i < rows.values.size(); ++i)
      out.Row(i / rows.cols)[i % rows.cols] = static_cast<float>(rows.values[i]);
  }

  MoeRunnerConfig config_;
};

}  // namespace

extern constinit const RunnerEntry reference{
    "reference", "scalar loops in f64: the oracle",
    [](const MoeRunnerConfig& config) -> std::unique_ptr<MoeRunnerCore> {
      return std::make_unique<ReferenceRunnerCore>(config);
    }};

}  // namespace switchyard::moe::runners
