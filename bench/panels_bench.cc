// Speed of packing weights into panels on one thread. Matrices of 2048 inputs and 64 MB, so that
// both sides are in memory. Bytes are those of the source: as many are written.
#include <benchmark/benchmark.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/panels/pack.h"
#include "kernels/panels/panel.h"
#include "limits_counters.h"
#include "switchyard/core/memory.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kInputs = 2048;
constexpr size_t kSourceBytes = size_t{64} << 20;

std::vector<MatrixFormat> PackedFormats() {
  std::vector<MatrixFormat> all;
  for (DType dtype :
       {DType::kBF16, DType::kGgmlQ40, DType::kGgmlQ41, DType::kGgmlQ50, DType::kGgmlQ51,
        DType::kGgmlQ80, DType::kGgmlIq4Nl, DType::kGgmlMxFp4, DType::kGgmlQ2K, DType::kGgmlQ3K,
        DType::kGgmlQ4K, DType::kGgmlQ5K, DType::kGgmlQ6K, DType::kGgmlIq4Xs})
    all.push_back({.dtype = dtype});
  all.push_back({DType::kI8, DType::kF32, 1, kInputs});
  all.push_back({DType::kF8E4M3, DType::kF32, 128, 128});
  all.push_back({DType::kI4, DType::kF16, 1, 32});
  all.push_back({DType::kU4, DType::kF16, 1, 128, true});
  all.push_back({DType::kF4E2M1, DType::kF8E8M0, 1, 32});
  all.push_back({DType::kF4E2M1, DType::kF8E4M3, 1, 16, false, true});
  return all;
}

std::string NameOf(const MatrixFormat& format) {
  std::string name = "Pack/" + std::string(DTypeName(format.dtype));
  if (!format.is_quantized()) return name;
  name += "_" + std::string(DTypeName(format.scale_dtype)) + "_" +
          std::to_string(format.scale_rows) + "x" + std::to_string(format.scale_cols);
  return format.has_zero ? name + "_zero" : name;
}

// Row i of a matrix whose codes are at `codes` and whose scales are all the same.
CodeRow RowAt(const MatrixFormat& format, const std::byte* codes, const uint8_t* scales, size_t i) {
  CodeRow row;
  row.dtype = format.dtype;
  row.q = codes + i * BytesOf(format.dtype, kInputs);
  row.n = kInputs;
  if (!format.is_quantized()) return row;
  row.scale_dtype = format.scale_dtype;
  row.scale = scales;
  row.group = format.scale_cols;
  row.zero = format.has_zero ? scales : nullptr;
  return row;
}

bool IsRight(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
             size_t row, const CodeRow& packed) {
  std::vector<float> expected(packed.n);
  std::vector<float> out(packed.n);
  DecodeRow(packed, expected.data());
  DecodePanelRow(format, layout, panel, row, packed.n, out.data());
  return std::memcmp(out.data(), expected.data(), packed.n * sizeof(float)) == 0;
}

void RunPack(benchmark::State& state, const MatrixFormat& matrix_format) {
  const size_t row_bytes = BytesOf(matrix_format.dtype, kInputs);
  const size_t rows = kSourceBytes / row_bytes / kPanelRows * kPanelRows;
  const PanelFormat format = *FindPanelFormat(matrix_format, kInputs);
  const PanelLayout layout = LayoutOf(format, kInputs);
  MappedMemory source(rows * row_bytes, "a benchmark");
  MappedMemory panels(PanelMatrixBytes(format, rows, kInputs), "a benchmark");
  std::mt19937 random(1);
  for (size_t i = 0; i < source.size(); i += sizeof(uint32_t)) {
    const uint32_t bits = random() & 0x37373737u;  // no number is infinite
    std::memcpy(source.data() + i, &bits, sizeof(bits));
  }
  const std::vector<uint8_t> scales(kInputs * sizeof(float), 0x30);
  std::vector<CodeRow> matrix(rows);
  for (size_t r = 0; r < rows; ++r)
    matrix[r] = RowAt(matrix_format, source.data(), scales.data(), r);
  const auto pack = [&] {
    for (size_t panel = 0; panel < rows / kPanelRows; ++panel) {
      PackPanel(format, layout, std::span(matrix).subspan(panel * kPanelRows, kPanelRows),
                panels.data() + panel * layout.panel_bytes);
    }
  };
  pack();
  const std::byte* last = panels.data() + (rows / kPanelRows - 1) * layout.panel_bytes;
  if (!IsRight(format, layout, last, 31, matrix[rows - 1])) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    pack();
    benchmark::ClobberMemory();
  }
  bench::ReportBytes(state, static_cast<double>(source.size()), 1);
}

void RegisterAll() {
  for (const MatrixFormat& format : PackedFormats()) {
    benchmark::RegisterBenchmark(NameOf(format).c_str(), [format](benchmark::State& state) {
      RunPack(state, format);
    })->Unit(benchmark::kMillisecond);
  }
}

}  // namespace
}  // namespace switchyard::kernels

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::kernels::RegisterAll);
}
