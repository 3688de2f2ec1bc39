// The compatibility call of contract 6.1.
#include <fmt/format.h>

#include <atomic>

#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe {
namespace {

void WarnOnce() {
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    Log(LogLevel::kWarning, "fused_moe_npu is deprecated: build a MoeLayer with runner ascend");
}

void CheckCall(ConstRows x, const ExpertMatrices& w1, const ExpertMatrices& w2,
               const TopKOutput& topk, const MoeRunnerConfig& config) {
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("layer {}: fused_moe_npu: {}", config.layer_id, what));
  };
  const auto unsupported = [&](const std::string& what) { refuse(ErrorCode::kUnsupported, what); };
  const auto mismatch = [&](const std::string& what) { refuse(ErrorCode::kInvalidArgument, what); };
  if (w1.format.is_quantized() || w2.format.is_quantized()) unsupported("quantised weights");
  if (!w1.bias.empty() || !w2.bias.empty()) unsupported("biases");
  if (!config.is_gated) unsupported("layers that are not gated (is_gated)");
  if (config.gemm1_alpha || config.gemm1_clamp_limit || config.swiglu_limit)
    unsupported("gemm1_alpha, gemm1_clamp_limit and swiglu_limit");
  if (config.gate_up_interleaved) unsupported("gate_up_interleaved");
  if (config.routed_scaling_factor != 1.0) unsupported("routed_scaling_factor");
  if (config.apply_router_weight_on_input) unsupported("apply_router_weight_on_input");
  if (config.no_combine) unsupported("no_combine");
  if (config.activation != "silu" && config.activation != "gelu" &&
      config.activation != "gelu_tanh")
    unsupported(fmt::format("activation \"{}\"; there are silu and gelu", config.activation));
  if (w1.num_experts() != w2.num_experts() || w1.rows != 2 * w2.cols || w1.cols != x.cols ||
      w2.rows != x.cols)
    mismatch(fmt::format("x [{}, {}], w1 [{}, {}, {}], w2 [{}, {}, {}] contradict each other",
                         x.rows, x.cols, w1.num_experts(), w1.rows, w1.cols, w2.num_experts(),
                         w2.rows, w2.cols));
  if (topk.num_tokens != x.rows || topk.weights.size() != topk.ids.size())
    mismatch(fmt::format("{} rows, routing of {} tokens with {} ids and {} weights", x.rows,
                         topk.num_tokens, topk.ids.size(), topk.weights.size()));
}

}  // namespace

Rows fused_moe_npu(ExecContext& context, ConstRows x, const ExpertMatrices& w1,
                   const ExpertMatrices& w2, const TopKOutput& topk,
                   const MoeRunnerConfig& config) {
  WarnOnce();
  CheckCall(x, w1, w2, topk, config);
  const size_t layer_id = config.layer_id;
  ascend::InitRoutingArgs routing;
  routing.x = x;
  routing.expert_ids = topk.ids;
  routing.top_k = topk.top_k;
  routing.expert_num = w1.num_experts();
  routing.row_idx = ascend::ColumnMajorRowIndex(context, x.rows, topk.top_k);
  routing.active_num = x.rows;
  const ascend::InitRoutingResult routed = ascend::InitRoutingV1(layer_id).Run(context, routing);

  ascend::GroupedMatmulArgs gemm1;
  gemm1.x = routed.expanded_x;
  gemm1.group_list = routed.groups();
  gemm1.weights = {&w1, 1};
  gemm1.act_dtype = config.activation_dtype;
  ascend::ActivationArgs activation;
  activation.x = ascend::GroupedMatmul(layer_id).Run(context, gemm1);
  ascend::GroupedMatmulArgs gemm2 = gemm1;
  gemm2.x = (config.activation == "silu" ? ascend::Swiglu(layer_id) : ascend::GeluAndMul(layer_id))
                .Run(context, activation);
  gemm2.weights = {&w2, 1};

  ascend::FinalizeRoutingArgs finalize;
  finalize.expanded_rows = ascend::GroupedMatmul(layer_id).Run(context, gemm2);
  finalize.expanded_row_idx = routed.expanded_row_idx;
  finalize.num_tokens = x.rows;
  finalize.top_k = topk.top_k;
  finalize.scales = topk.weights;
  finalize.mode = ascend::DropPadMode::kColumnMajor;
  return ascend::FinalizeRouting(layer_id).Run(context, finalize);
}

}  // namespace switchyard::moe
