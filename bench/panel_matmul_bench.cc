// Speed of products with weights in panels, for the rows that decode (1), batched decode (4, 16)
// and prefill (64) give an expert: every format, every arithmetic, one thread and all. Random
// codes: matrices of 2048 inputs, 96 MB of them, so that few rows read from memory. Beside each
// result the share of the machine's limit, taken at the start: of the read bandwidth, and of the
// peak of the multiply units.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/panels/multiply.h"
#include "limits_counters.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/memory.h"
#include "switchyard/core/thread_pool.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kInputs = 2048;
constexpr size_t kWeightBytes = size_t{96} << 20;

struct Row {
  std::string name;
  MatrixFormat format;
};

MatrixFormat Grouped(DType dtype, DType scale, size_t rows, size_t cols, bool zero = false) {
  MatrixFormat format;
  format.dtype = dtype;
  format.scale_dtype = scale;
  format.scale_rows = rows;
  format.scale_cols = cols;
  format.has_zero = zero;
  return format;
}
MatrixFormat Plain(DType dtype) { return Grouped(dtype, DType::kF32, 0, 0); }

const std::vector<Row>& AllRows() {
  static const std::vector<Row> rows = {
      {"bf16", Plain(DType::kBF16)},
      {"f16", Plain(DType::kF16)},
      {"w8a8_int8", Grouped(DType::kI8, DType::kF32, 1, kInputs)},
      {"fp8_block", Grouped(DType::kF8E4M3, DType::kF32, 128, 128)},
      {"w4a16_g128", Grouped(DType::kI4, DType::kBF16, 1, 128)},
      {"awq_g128", Grouped(DType::kU4, DType::kF16, 1, 128, true)},
      {"mxfp4", Grouped(DType::kF4E2M1, DType::kF8E8M0, 1, 32)},
      {"Q8_0", Plain(DType::kGgmlQ80)},
      {"Q4_0", Plain(DType::kGgmlQ40)},
      {"Q4_1", Plain(DType::kGgmlQ41)},
      {"Q5_0", Plain(DType::kGgmlQ50)},
      {"Q2_K", Plain(DType::kGgmlQ2K)},
      {"Q3_K", Plain(DType::kGgmlQ3K)},
      {"Q4_K", Plain(DType::kGgmlQ4K)},
      {"Q5_K", Plain(DType::kGgmlQ5K)},
      {"Q6_K", Plain(DType::kGgmlQ6K)},
      {"IQ4_NL", Plain(DType::kGgmlIq4Nl)},
      {"IQ4_XS", Plain(DType::kGgmlIq4Xs)},
      {"MXFP4", Plain(DType::kGgmlMxFp4)},
      {"IQ3_S", Plain(DType::kGgmlIq3S)},
      {"IQ3_XXS", Plain(DType::kGgmlIq3Xxs)},
      {"IQ2_S", Plain(DType::kGgmlIq2S)},
      {"IQ2_XS", Plain(DType::kGgmlIq2Xs)},
      {"IQ2_XXS", Plain(DType::kGgmlIq2Xxs)},
      {"IQ1_S", Plain(DType::kGgmlIq1S)},
      {"IQ1_M", Plain(DType::kGgmlIq1M)},
      {"TQ1_0", Plain(DType::kGgmlTq10)},
      {"TQ2_0", Plain(DType::kGgmlTq20)}};
  return rows;
}

// Bytes that are good f16, bf16 and small integers wherever scales may lie, and never subnormal
// ones, which CPUs convert slowly.
MappedMemory RandomPanels(size_t bytes) {
  MappedMemory memory(bytes, "a benchmark");
  std::mt19937_64 random(1);
  auto* words = reinterpret_cast<uint64_t*>(memory.data());
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i)
    words[i] = (random() & 0x1b1b1b1b1b1b1b1bu) | 0x2020202020202020u;
  return memory;
}

double PeakOf(const MachineLimits& limits, PanelPath path) {
  switch (path) {
    case PanelPath::kInt8: return 2 * limits.bf16_gops;
    case PanelPath::kBF16: return limits.bf16_gops;
    case PanelPath::kF32: return limits.f32_gops;
  }
  return 0;
}

void RunPanels(benchmark::State& state, const Row& row, PanelPath path, ThreadPool& pool) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  const PanelFormat format = *FindPanelFormat(row.format, kInputs);
  const PanelLayout layout = LayoutOf(format, kInputs);
  const bool is_grouped = path == PanelPath::kInt8 && format.scales != PanelScales::kRow;
  const PanelRowLayout rows_layout =
      RowLayoutOf(format, kInputs, path, is_grouped ? FastGroupOf(format) : 0);
  const size_t panels = kWeightBytes / layout.panel_bytes;
  const MappedMemory w = RandomPanels(panels * layout.panel_bytes);
  const MappedMemory a(num_rows * rows_layout.bytes, "a benchmark");
  std::vector<float> x(kInputs);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<const std::byte*> rows;
  for (size_t m = 0; m < num_rows; ++m) {
    for (float& value : x) value = normal(random);
    std::byte* record = a.data() + m * rows_layout.bytes;
    if (is_grouped) {
      PackFastRow(rows_layout, x.data(), record);
    } else if (path == PanelPath::kInt8) {
      std::vector<int8_t> codes(kInputs, 3);
      PackInt8Row(rows_layout, codes.data(), record);
    } else {
      PackFloatRow(rows_layout, x.data(), record);
    }
    rows.push_back(record);
  }
  const size_t scratch_bytes = PanelScratchBytes(format, layout, path, num_rows);
  const MappedMemory scratch(pool.num_threads() * scratch_bytes, "a benchmark");
  std::vector<float> out(panels * kPanelRows * num_rows);
  constexpr size_t kPanelsPerTask = 8;
  const size_t tasks = (panels + kPanelsPerTask - 1) / kPanelsPerTask;
  for (auto _ : state) {
    pool.Run(tasks, [&](size_t task, size_t worker) {
      for (size_t p = task * kPanelsPerTask; p < std::min(panels, (task + 1) * kPanelsPerTask);
           ++p) {
        PanelProduct product;
        product.format = &format;
        product.layout = &layout;
        product.rows_layout = &rows_layout;
        product.rows = rows.data();
        product.num_rows = num_rows;
        product.panel = w.data() + p * layout.panel_bytes;
        product.scratch = scratch.data() + worker * scratch_bytes;
        product.out = out.data() + p * kPanelRows * num_rows;
        product.out_stride = kPanelRows;
        MultiplyPanel(product);
      }
    });
    benchmark::DoNotOptimize(out.data());
  }
  bench::ReportBytes(state, static_cast<double>(w.size()), pool.num_threads());
  bench::ReportOps(state, 2.0 * static_cast<double>(num_rows * panels * kPanelRows * kInputs),
                   PeakOf(bench::Limits(pool.num_threads()), path));
}

void RegisterAll() {
  const struct {
    const char* name;
    PanelPath path;
  } kPaths[] = {{"int8", PanelPath::kInt8}, {"bf16", PanelPath::kBF16}, {"f32", PanelPath::kF32}};
  for (const Row& row : AllRows()) {
    const PanelFormat format = *FindPanelFormat(row.format, kInputs);
    for (const auto& path : kPaths) {
      if (!TakesPath(format, path.path)) continue;
      for (ThreadPool* pool : {&bench::Pool(1), &bench::Pool(AvailableCpus())}) {
        const std::string name =
            fmt::format("{}/{}/threads:{}", row.name, path.name, pool->num_threads());
        benchmark::RegisterBenchmark(name.c_str(),
                                     [&row, path, pool](benchmark::State& state) {
                                       RunPanels(state, row, path.path, *pool);
                                     })
            ->Arg(1)
            ->Arg(4)
            ->Arg(16)
            ->Arg(64)
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::kernels

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::kernels::RegisterAll);
}
