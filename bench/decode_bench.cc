// Speed of decoding weights to f32 on one thread, which products do where they have no kernel for
// the codes themselves: every type, rows of 2048 columns, 16 MB of codes, so that they come from
// memory and the numbers stay in the caches. Bytes are those of the codes and scales: 100 % of the
// read bandwidth keeps up with memory.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/ggml/ggml.h"
#include "limits_counters.h"
#include "switchyard/core/memory.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kCols = 2048;
constexpr size_t kCodeBytes = size_t{16} << 20;

struct Format {
  std::string name;
  DType dtype;
  size_t group = 0;  // columns of a scale; 0 = there are none
  DType scale_dtype = DType::kF32;
  bool has_zero = false;
};

std::vector<Format> AllFormats() {
  std::vector<Format> all = {
      {"F16", DType::kF16},
      {"BF16", DType::kBF16},
      {"I8", DType::kI8, kCols},
      {"U8_zero_g128", DType::kU8, 128, DType::kF16, true},
      {"I4_g32", DType::kI4, 32, DType::kBF16},
      {"U4_zero_g128", DType::kU4, 128, DType::kF16, true},
      {"F8_E4M3_g128", DType::kF8E4M3, 128},
      {"F4_E2M1_g32", DType::kF4E2M1, 32, DType::kF8E8M0},
      {"F4_E2M1_g16", DType::kF4E2M1, 16, DType::kF8E4M3},
  };
  for (int i = static_cast<int>(kFirstGgmlBlock); i <= static_cast<int>(kLastGgmlBlock); ++i) {
    const auto dtype = static_cast<DType>(i);
    all.push_back({std::string(DTypeName(dtype)), dtype});
  }
  return all;
}

// Bytes that are good numbers of every type, and never subnormal ones, which CPUs convert slowly.
const std::byte* RandomCodes() {
  static const MappedMemory memory = [] {
    MappedMemory all(kCodeBytes, "a benchmark");
    std::mt19937_64 random(1);
    for (size_t i = 0; i < kCodeBytes; i += sizeof(uint64_t)) {
      const uint64_t bits = (random() & 0x1b1b1b1b1b1b1b1bu) | 0x2020202020202020u;
      std::memcpy(all.data() + i, &bits, sizeof(bits));
    }
    return all;
  }();
  return memory.data();
}

void RunDecode(benchmark::State& state, const Format& format) {
  const size_t row_bytes = BytesOf(format.dtype, kCols);
  const size_t rows = kCodeBytes / row_bytes;
  const size_t groups = format.group == 0 ? 0 : kCols / format.group;
  const std::vector<uint8_t> scales(std::max<size_t>(groups, 1) * sizeof(float), 0x38);
  CodeRow row;
  row.dtype = format.dtype;
  row.n = kCols;
  row.scale_dtype = format.scale_dtype;
  if (format.group != 0) row.scale = scales.data();
  if (format.has_zero) row.zero = scales.data();
  if (format.group != 0) row.group = format.group;
  std::vector<float> out(kCols);
  std::vector<float> expected(kCols);
  row.q = RandomCodes() + row_bytes;
  DecodeRow(row, out.data());
  DecodeRowReference(row, expected.data());
  if (out != expected) {  // the sign of a zero may differ
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    for (size_t i = 0; i < rows; ++i) {
      row.q = RandomCodes() + i * row_bytes;
      DecodeRow(row, out.data());
      benchmark::DoNotOptimize(out.data());
    }
  }
  const size_t scale_bytes = groups * ((format.group == 0 ? 0 : DTypeBytes(format.scale_dtype)) +
                                       (format.has_zero ? 1 : 0));
  bench::ReportBytes(state, static_cast<double>(rows * (row_bytes + scale_bytes)), 1);
  state.counters["Gvalues/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * static_cast<double>(rows * kCols) / 1e9,
      benchmark::Counter::kIsRate);
}

void RunDecodeToInt8(benchmark::State& state, DType dtype) {
  const size_t row_bytes = BytesOf(dtype, kCols);
  const size_t rows = kCodeBytes / row_bytes;
  std::vector<int8_t> out(kCols);
  DecodeToInt8(dtype, RandomCodes(), kCols, out.data());
  if (int{out[7]} != CodeAt(dtype, RandomCodes(), 7)) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    for (size_t i = 0; i < rows; ++i) {
      DecodeToInt8(dtype, RandomCodes() + i * row_bytes, kCols, out.data());
      benchmark::DoNotOptimize(out.data());
    }
  }
  bench::ReportBytes(state, static_cast<double>(rows * row_bytes), 1);
}

void RegisterAll() {
  const std::string size = "/" + std::to_string(kCols);
  for (const Format& format : AllFormats()) {
    benchmark::RegisterBenchmark(("DecodeRow/" + format.name + size).c_str(),
                                 [=](benchmark::State& state) { RunDecode(state, format); })
        ->Unit(benchmark::kMicrosecond);
  }
  for (DType dtype : {DType::kI8, DType::kI4}) {
    const std::string name = "DecodeToInt8/" + std::string(DTypeName(dtype)) + size;
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
      RunDecodeToInt8(state, dtype);
    })->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace
}  // namespace switchyard::kernels

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::kernels::RegisterAll);
}
