// Speed of every matrix product of kernels.def on one thread, for the rows that decode (1), batched
// decode (4, 16) and prefill (64) give an expert. Weights of 2048 inputs; 16 MB of them, so that
// few rows read from memory.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/convert/convert.h"
#include "kernels/matmul/matmul.h"
#include "switchyard/core/memory.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kInputs = 2048;
constexpr size_t kOutputs = 4096;

// Random numbers of a dtype, in big pages.
MappedMemory RandomMatrix(DType dtype, size_t count) {
  MappedMemory memory(count * DTypeBytes(dtype), "a benchmark");
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(kInputs);
  for (size_t at = 0; at < count; at += kInputs) {
    for (float& value : values) value = normal(random);
    ConvertFromF32(values.data(), kInputs, dtype, memory.data() + at * DTypeBytes(dtype));
  }
  return memory;
}

void RunMatmul(benchmark::State& state, const MatmulKernel& kernel) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  const MappedMemory w = RandomMatrix(kernel.w_dtype, kOutputs * kInputs);
  const MappedMemory a = RandomMatrix(kernel.a_dtype, num_rows * kInputs);
  std::vector<const void*> rows(num_rows);
  for (size_t m = 0; m < num_rows; ++m) {
    rows[m] = a.data() + m * kInputs * DTypeBytes(kernel.a_dtype);
  }
  std::vector<float> out(num_rows * kOutputs);
  MatmulArgs args{rows.data(), num_rows, w.data(),   kInputs,
                  kOutputs,    kInputs,  out.data(), kOutputs};
  kernel.run(args);
  float expected = 0;
  MatmulReference({rows.data() + num_rows - 1, 1, w.data(), kInputs, 1, kInputs, &expected, 1},
                  kernel.a_dtype, kernel.w_dtype);
  if (std::abs(out[(num_rows - 1) * kOutputs] - expected) > 1e-2f) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    kernel.run(args);
    benchmark::DoNotOptimize(out.data());
  }
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["weight_bytes/s"] =
      benchmark::Counter(iterations * static_cast<double>(w.size()), benchmark::Counter::kIsRate);
  state.counters["op/s"] =
      benchmark::Counter(iterations * 2.0 * static_cast<double>(num_rows * kOutputs * kInputs),
                         benchmark::Counter::kIsRate);
}

}  // namespace
}  // namespace switchyard::kernels

int main(int argc, char** argv) {
  for (const auto& kernel : switchyard::kernels::AllMatmulKernels()) {
    benchmark::RegisterBenchmark(
        std::string(kernel.name).c_str(),
        [&kernel](benchmark::State& state) { switchyard::kernels::RunMatmul(state, kernel); })
        ->Arg(1)
        ->Arg(4)
        ->Arg(16)
        ->Arg(64);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
