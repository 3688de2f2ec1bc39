// What the benchmarks share: pools of threads, what the machine can do at most with them, and the
// rates of a benchmark beside it.
#pragma once

#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "kernels/limits/limits.h"
#include "switchyard/core/thread_pool.h"

namespace switchyard::bench {

// The pool of that many threads, and its limits, measured when they are first asked for.
inline ThreadPool& Pool(size_t threads) {
  static std::vector<std::unique_ptr<ThreadPool>> pools(kMaxThreads + 1);
  if (pools[threads] == nullptr) pools[threads] = std::make_unique<ThreadPool>(threads);
  return *pools[threads];
}
inline const kernels::MachineLimits& Limits(size_t threads) {
  static std::vector<kernels::MachineLimits> limits(kMaxThreads + 1);
  kernels::MachineLimits& mine = limits[threads];
  if (mine.read_gbps == 0) mine = kernels::MeasureLimits(Pool(threads));
  return mine;
}

// Counters of all iterations. "GB/s" and "%read": bytes, and their share of the bandwidth of reads
// from memory. What is in a cache may be above 100 %: then memory would hold the kernel up, not the
// kernel memory. Below it, the kernel is slower than memory wherever its rows are.
inline void ReportBytes(benchmark::State& state, double bytes_per_iteration, size_t threads) {
  const double bytes = bytes_per_iteration * static_cast<double>(state.iterations());
  const auto rate = benchmark::Counter::kIsRate;
  state.counters["GB/s"] = benchmark::Counter(bytes / 1e9, rate);
  state.counters["%read"] = benchmark::Counter(bytes / 1e7 / Limits(threads).read_gbps, rate);
}

// "Gop/s" and "%peak": operations, a multiply-add being two, and their share of `peak_gops` (of
// Limits; 0 = the CPU has no such unit, and there is no share).
inline void ReportOps(benchmark::State& state, double ops_per_iteration, double peak_gops) {
  const double ops = ops_per_iteration * static_cast<double>(state.iterations());
  const auto rate = benchmark::Counter::kIsRate;
  state.counters["Gop/s"] = benchmark::Counter(ops / 1e9, rate);
  if (peak_gops > 0) state.counters["%peak"] = benchmark::Counter(ops / 1e7 / peak_gops, rate);
}

// The main function of a program whose benchmarks are tables.
inline int RunTables(int argc, char** argv, void (*register_all)()) {
  register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace switchyard::bench
