// The two products and what is between them. Contract 5.0.
#include "switchyard/core/macros.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe {
namespace {

Rows Multiply(ExecContext& context, const ExpertsForwardArgs& args,
              const ascend::GroupedMatmulArgs& product) {
  if (args.grouped_matmul != nullptr) return args.grouped_matmul->Run(context, product);
  return ascend::GroupedMatmul(args.layer_id).Run(context, product);
}

// gemm1 and the activation: rows of the groups only.
QuantRows Hidden(ExecContext& context, const ExpertsForwardArgs& args, size_t num_rows) {
  const AscendQuantInfo& info = *args.quant_info;
  const ExpertMatrices gate_up[] = {info.w1, info.w3};
  ascend::GroupedMatmulArgs gemm1;
  gemm1.x = args.hidden_states.Slice(0, num_rows);
  gemm1.group_list = args.group_list;
  gemm1.weights = std::span(gate_up).first(info.w3.num_experts() == 0 ? 1 : 2);
  gemm1.act = info.a13;
  gemm1.act_dtype = args.activation_dtype;
  gemm1.int_bias = info.int_bias13;
  if (args.activation == nullptr) {
    ascend::GroupedMatmulSwigluQuant::Options options;
    options.requant = info.a2;
    options.layer_id = args.layer_id;
    return ascend::GroupedMatmulSwigluQuant(options).Run(context, gemm1);
  }
  ascend::ActivationArgs activation;
  activation.x = Multiply(context, args, gemm1);
  if (args.activation->is_grouped()) activation.groups = args.group_list;
  if (!args.gather) return args.activation->Run(context, activation);
  return ascend::AllGatherActivationWrapper(*args.activation, args.gather, args.layer_id)
      .Run(context, activation);
}

}  // namespace

Rows ExpertsForward(ExecContext& context, const ExpertsForwardArgs& args) {
  SY_CHECK(args.quant_info != nullptr);
  const AscendQuantInfo& info = *args.quant_info;
  const ascend::GroupRanges groups = ascend::CheckGroups(
      context, args.group_list, info.w1.num_experts(), args.hidden_states.rows, args.layer_id);
  ascend::GroupedMatmulArgs gemm2;
  gemm2.x = Hidden(context, args, groups.num_rows());
  gemm2.group_list = args.group_list;
  gemm2.weights = {&info.w2, 1};
  gemm2.act = info.a2;
  gemm2.act_dtype = args.activation_dtype;
  gemm2.int_bias = info.int_bias2;
  gemm2.num_rows = args.hidden_states.rows;
  return Multiply(context, args, gemm2);
}

Rows ApplyWithoutRoutingWeights(ExecContext& context, const ExpertsForwardArgs& args) {
  return ExpertsForward(context, args);
}

}  // namespace switchyard::moe
