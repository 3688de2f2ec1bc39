#include "moe/runners/reference/core.h"

#include <vector>

#include "kernels/reference.h"
#include "moe/runners/builtin.h"

namespace switchyard::moe::runners {
namespace {

// sum over k of matrix[row, k] * x[k]
double Dot(const ExpertMatrices& matrices, size_t expert, size_t row, const double* x) {
  const std::byte* data =
      matrices.data[expert] + row * matrices.stride * DTypeBytes(matrices.dtype);
  double sum = 0;
  for (size_t k = 0; k < matrices.cols; ++k)
    sum += kernels::ElementAt(data, matrices.dtype, k) * x[k];
  return sum;
}

}  // namespace

ReferenceRunnerCore::ReferenceRunnerCore(const MoeRunnerConfig& config) : config_(config) {}

const RunnerOutput& ReferenceRunnerCore::Run(ExecContext& context, const RunnerInput& base,
                                             const MoeQuantInfo& quant_info, RunningState&) const {
  const auto& input = static_cast<const ReferenceRunnerInput&>(base);
  const size_t num_tokens = input.hidden_states.rows;
  const size_t hidden_size = config_.hidden_size;
  const size_t intermediate_size = config_.intermediate_size_per_partition;
  const Activation& act = config_.formula;
  auto* output = context.arena.New<ReferenceRunnerOutput>();
  output->runner = "reference";
  output->hidden_states = context.arena.AllocateRows(num_tokens, hidden_size);
  context.pool.Run(num_tokens, [&](size_t t, size_t) {
    const std::span<const float> row = input.hidden_states.RowSpan(t);
    const std::vector<double> x(row.begin(), row.end());
    std::vector<double> hidden(intermediate_size);
    std::vector<double> sum(hidden_size, 0.0);
    for (size_t k = 0; k < input.topk_output.top_k; ++k) {
      const int32_t id = input.topk_output.Ids(t)[k];
      if (id < 0) continue;
      const auto expert = static_cast<size_t>(id);
      for (size_t i = 0; i < intermediate_size; ++i) {
        hidden[i] = act.entry.scalar(Dot(quant_info.w1, expert, i, x.data()),
                                     Dot(quant_info.w3, expert, i, x.data()), act.params);
      }
      const double weight = input.topk_output.Weights(t)[k];
      for (size_t h = 0; h < hidden_size; ++h)
        sum[h] += weight * Dot(quant_info.w2, expert, h, hidden.data());
    }
    for (size_t h = 0; h < hidden_size; ++h) {
      output->hidden_states.Row(t)[h] = static_cast<float>(sum[h] * config_.routed_scaling_factor);
    }
  });
  return *output;
}

extern constinit const RunnerEntry reference{
    "reference", "scalar loops in f64: the oracle",
    [](const MoeRunnerConfig& config) -> std::unique_ptr<MoeRunnerCore> {
      return std::make_unique<ReferenceRunnerCore>(config);
    }};

}  // namespace switchyard::moe::runners
