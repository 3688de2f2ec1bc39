// Speed of every matrix product of kernels.def, and of the one of int8 codes, on one thread, for
// the rows that decode (1), batched decode (4, 16) and prefill (64) give an expert. Weights of 2048
// inputs and 4096 outputs, so that few rows read from memory. Peaks are those of f32 multiply-adds,
// of bf16 pairs and of dots of bytes.
#include <benchmark/benchmark.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/convert/convert.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/matmul_i8.h"
#include "limits_counters.h"
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

void Report(benchmark::State& state, size_t weight_bytes, double peak_gops) {
  bench::ReportBytes(state, static_cast<double>(weight_bytes), 1);
  bench::ReportOps(state, 2.0 * static_cast<double>(state.range(0)) * kOutputs * kInputs,
                   peak_gops);
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
  const bool pairs = kernel.a_dtype == DType::kBF16 && bench::Limits(1).bf16_gops > 0;
  Report(state, w.size(), pairs ? bench::Limits(1).bf16_gops : bench::Limits(1).f32_gops);
}

void RunMatmulI8(benchmark::State& state) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  const MappedMemory w(kOutputs * kInputs, "a benchmark");
  const MappedMemory a(num_rows * kInputs, "a benchmark");
  std::mt19937 random(1);
  for (size_t i = 0; i < w.size(); ++i) w.data()[i] = static_cast<std::byte>(random());
  for (size_t i = 0; i < num_rows * kInputs; ++i) a.data()[i] = static_cast<std::byte>(random());
  std::vector<const int8_t*> rows(num_rows);
  for (size_t m = 0; m < num_rows; ++m)
    rows[m] = reinterpret_cast<const int8_t*>(a.data()) + m * kInputs;
  const std::vector<float> a_scale(num_rows, 0.5f);
  const std::vector<float> w_scale(kOutputs, 0.25f);
  std::vector<float> out(num_rows * kOutputs);
  const MatmulI8Args args{rows.data(), num_rows, reinterpret_cast<const int8_t*>(w.data()),
                          kInputs,     kOutputs, kInputs,
                          kOutputs};
  MatmulI8I8Scaled(args, a_scale.data(), w_scale.data(), out.data());
  int32_t expected = 0;
  MatmulI8I8Reference({rows.data() + num_rows - 1, 1, args.w, kInputs, 1, kInputs, 1}, &expected);
  if (out[(num_rows - 1) * kOutputs] != static_cast<float>(expected) * 0.125f) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    MatmulI8I8Scaled(args, a_scale.data(), w_scale.data(), out.data());
    benchmark::DoNotOptimize(out.data());
  }
  Report(state, kOutputs * kInputs, bench::Limits(1).int8_gops);
}

void Register(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->Arg(1)->Arg(4)->Arg(16)->Arg(64);
}

void RegisterAll() {
  for (const MatmulKernel& kernel : AllMatmulKernels()) {
    Register(std::string(kernel.name),
             [&kernel](benchmark::State& state) { RunMatmul(state, kernel); });
  }
  Register("MatmulI8I8", RunMatmulI8);
}

}  // namespace
}  // namespace switchyard::kernels

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::kernels::RegisterAll);
}
