// What a MoE layer costs outside its products. Contract: routing, permutation and combine of 4096
// tokens, 128 experts, top-8, hidden 2048 stay under 5 % of the products' time; a decode call
// spends under 2 us outside kernels.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "kernels/convert/convert.h"
#include "limits_counters.h"
#include "moe/runners/aiter/epilogue.h"
#include "moe/runners/aiter/sorted_slots.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/memory.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

std::vector<float> RandomFloats(size_t count, float scale) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// A bf16 layer with random weights and tokens.
class Bench {
 public:
  Bench(size_t tokens, size_t experts, size_t top_k, size_t hidden, size_t inner, size_t threads)
      : pool_(threads),
        hidden_(RandomFloats(tokens * hidden, 1.0f)),
        logits_(RandomFloats(tokens * experts, 1.0f)),
        memory_(3 * experts * hidden * inner * sizeof(BF16), "a benchmark"),
        x_(hidden_.data(), tokens, hidden),
        router_logits_(logits_.data(), tokens, experts) {
    FillWeights(hidden * inner);
    MoeLayerConfig config;
    config.topk.num_experts = experts;
    config.topk.top_k = top_k;
    topk_config_ = config.topk;
    const size_t bytes = hidden * inner * sizeof(BF16);
    ExpertWeights weights;
    weights.hidden_size = hidden;
    weights.intermediate_size = inner;
    weights.w1 = Bank(0, 3 * bytes, experts, inner, hidden);
    weights.w3 = Bank(bytes, 3 * bytes, experts, inner, hidden);
    weights.w2 = Bank(2 * bytes, 3 * bytes, experts, hidden, inner);
    layer_ = std::make_unique<MoeLayer>(BuiltinRegistry(), config,
                                        MoeLayerOptions{.runner = "aiter"}, std::move(weights));
  }

  TopKOutput Route() { return SelectExperts(context_, topk_config_, router_logits_, x_.rows); }
  Rows Run(const TopKOutput& topk) { return layer_->ForwardRouted(context_, x_, topk); }
  // What the fused runner does before and after its products.
  Rows SortAndSum(const TopKOutput& topk, const std::vector<float>& rows) {
    AiterRunnerInput input;
    input.topk_ids = topk.ids;
    input.topk_weights = topk.weights;
    input.top_k = topk.top_k;
    const runners::SortedSlots sorted = runners::SortByExpert(
        context_, input, topk.ids.size(), topk_config_.num_experts, /*layer_id=*/0);
    const Rows out = arena_.AllocateRows(x_.rows, x_.cols);
    runners::Epilogue{}.Run(context_, sorted, input,
                            ConstRows(rows.data(), sorted.num_rows(), x_.cols), out);
    return out;
  }
  Arena& arena() { return arena_; }

 private:
  void FillWeights(size_t row) {
    const std::vector<float> values = RandomFloats(row, 0.05f);
    for (size_t at = 0; at < memory_.size(); at += row * sizeof(BF16))
      kernels::ConvertFromF32(values.data(), row, DType::kBF16, memory_.data() + at);
  }

  ExpertBank Bank(size_t first, size_t step, size_t experts, size_t rows, size_t cols) {
    ExpertBank bank;
    bank.format.dtype = DType::kBF16;
    bank.rows = rows;
    bank.cols = cols;
    for (size_t e = 0; e < experts; ++e) bank.data.push_back(memory_.data() + first + e * step);
    return bank;
  }

  ThreadPool pool_;
  Arena arena_;
  ExecContext context_{pool_, arena_};
  std::vector<float> hidden_, logits_;
  MappedMemory memory_;
  ConstRows x_, router_logits_;
  TopKConfig topk_config_;
  std::unique_ptr<MoeLayer> layer_;
};

// Prefill with the whole inner size: the products and all the rest.
void PrefillLayer(benchmark::State& state) {
  Bench bench(4096, 128, 8, 2048, static_cast<size_t>(state.range(0)), AvailableCpus());
  for (auto _ : state) {
    bench.arena().Reset();
    const TopKOutput topk = bench.Route();
    benchmark::DoNotOptimize(bench.Run(topk).data);
  }
  const double flops = 6.0 * 4096 * 8 * 2048 * static_cast<double>(state.range(0));
  const kernels::MachineLimits& limits = bench::Limits(AvailableCpus());
  bench::ReportOps(state, flops, limits.bf16_gops > 0 ? limits.bf16_gops : limits.f32_gops);
}
BENCHMARK(PrefillLayer)->Arg(768)->Unit(benchmark::kMillisecond)->UseRealTime();

// Everything of it that is no product: routing, the sort, and the weighted sum of 32,768 rows.
void PrefillOverhead(benchmark::State& state) {
  Bench bench(4096, 128, 8, 2048, 1, AvailableCpus());
  const std::vector<float> rows = RandomFloats(4096 * 8 * 2048, 1.0f);
  for (auto _ : state) {
    bench.arena().Reset();
    const TopKOutput topk = bench.Route();
    benchmark::DoNotOptimize(bench.SortAndSum(topk, rows).data);
  }
  // Logits, rows and sums; the sums take most of the time, as the rows come from memory.
  bench::ReportBytes(state, 4.0 * 4096 * (128 + (8 + 1) * 2048), AvailableCpus());
}
BENCHMARK(PrefillOverhead)->Unit(benchmark::kMillisecond)->UseRealTime();

// One token through a layer whose products are nothing: dispatch, permutes, sort, checks, combine.
void DecodeCall(benchmark::State& state) {
  Bench bench(1, 128, 8, 8, 1, 1);
  const TopKOutput topk = bench.Route();
  const Arena::Mark mark = bench.arena().Now();
  for (auto _ : state) {
    bench.arena().RewindTo(mark);
    benchmark::DoNotOptimize(bench.Run(topk).data);
  }
}
BENCHMARK(DecodeCall)->Unit(benchmark::kNanosecond)->UseRealTime();

void DecodeRouting(benchmark::State& state) {
  Bench bench(1, 128, 8, 8, 1, 1);
  for (auto _ : state) {
    bench.arena().Reset();
    benchmark::DoNotOptimize(bench.Route().ids.data());
  }
}
BENCHMARK(DecodeRouting)->Unit(benchmark::kNanosecond)->UseRealTime();

}  // namespace
}  // namespace switchyard::moe

BENCHMARK_MAIN();
