// Speed of every kernel that takes rows to rows, on one thread: norms, rotations, sums,
// conversions, activations, encoders of activations and of the KV cache, and the records that meet
// weights in panels. Rows of 2048 columns: 8 of them, which stay in the caches, as in a step of
// decoding or between two stages of a prompt; and 4096, which come from memory. Bytes are those
// that a kernel reads and those that it writes.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/activations/activations.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/kv_codes.h"
#include "kernels/convert/convert.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/panels/rows.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rope/rope.h"
#include "limits_counters.h"
#include "quant/act_quant.h"
#include "switchyard/core/memory.h"
#include "switchyard/core/small_floats.h"

namespace switchyard {
namespace {

constexpr size_t kCols = 2048;
constexpr size_t kHead = 128;      // columns of a head
constexpr size_t kSummands = 8;    // rows of a weighted sum
constexpr size_t kMaxRows = 4096;  // a multiple of kSummands
constexpr size_t kRowBytes = kCols * sizeof(float);
constexpr size_t kOutBytes = kRowBytes + 1024;  // the largest record fits

// One row: two inputs, and what is written, which is the second input before the first run.
struct Row {
  const float* x;
  const float* y;
  std::byte* out;

  float* floats() const { return reinterpret_cast<float*>(out); }
  template <typename T>
  T At(size_t i) const {
    T value;
    std::memcpy(&value, out + i * sizeof(T), sizeof(T));
    return value;
  }
};

struct RowKernel {
  std::string name;  // kernel/type
  size_t bytes;      // read and written, of a row
  std::function<void(const Row&)> run;
  std::function<bool(const Row&)> is_right;  // after one run
};

bool IsNear(double found, double expected) {
  return std::abs(found - expected) <= 1e-4 * (1 + std::abs(expected));
}

// Normal numbers, the same 64 rows again and again.
const float* RandomRows(size_t which) {
  static const MappedMemory memory = [] {
    MappedMemory all(2 * kMaxRows * kRowBytes, "a benchmark");
    constexpr size_t kDrawn = 64 * kCols;
    auto* values = reinterpret_cast<float*>(all.data());
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < 2 * kDrawn; ++i) values[i] = normal(random);
    std::memcpy(values + kMaxRows * kCols, values + kDrawn, kDrawn * sizeof(float));
    for (size_t part : {size_t{0}, kMaxRows * kCols}) {
      for (size_t i = kDrawn; i < kMaxRows * kCols; i += kDrawn)
        std::memcpy(values + part + i, values + part, kDrawn * sizeof(float));
    }
    return all;
  }();
  return reinterpret_cast<const float*>(memory.data()) + which * kMaxRows * kCols;
}

void RunRows(benchmark::State& state, const RowKernel& kernel) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  const float* x = RandomRows(0);
  const float* y = RandomRows(1);
  static const MappedMemory out(kMaxRows * kOutBytes, "a benchmark");
  for (size_t i = 0; i < num_rows; ++i)
    std::memcpy(out.data() + i * kOutBytes, y + i * kCols, kRowBytes);
  const auto row_at = [&](size_t i) {
    return Row{x + i * kCols, y + i * kCols, out.data() + i * kOutBytes};
  };
  kernel.run(row_at(0));
  if (!kernel.is_right(row_at(0))) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    for (size_t i = 0; i < num_rows; ++i) kernel.run(row_at(i));
    benchmark::ClobberMemory();
  }
  bench::ReportBytes(state, static_cast<double>(num_rows * kernel.bytes), 1);
}

// --- The kernels ---

namespace k = kernels;

// Cosine and sine of some angles, for the columns of half a head.
struct Angles {
  float cos[kHead / 2];
  float sin[kHead / 2];
};
const Angles& SomeAngles() {
  static const Angles angles = [] {
    Angles all;
    for (size_t i = 0; i < kHead / 2; ++i) {
      all.cos[i] = std::cos(static_cast<float>(i));
      all.sin[i] = std::sin(static_cast<float>(i));
    }
    return all;
  }();
  return angles;
}

void RotateAll(const Row& row, void (*rotate)(float*, const float*, const float*, size_t)) {
  for (size_t head = 0; head < kCols; head += kHead)
    rotate(row.floats() + head, SomeAngles().cos, SomeAngles().sin, kHead / 2);
}

std::vector<RowKernel> NormsAndSums() {
  std::vector<RowKernel> all;
  all.push_back({"RmsNorm/f32", 3 * kRowBytes,
                 [](const Row& r) { k::RmsNorm(r.x, r.y, kCols, 1e-6f, r.floats()); },
                 [](const Row& r) {
                   std::vector<float> expected(kCols);
                   k::RmsNormReference(r.x, r.y, kCols, 1e-6f, expected.data());
                   return IsNear(r.At<float>(kCols - 1), expected[kCols - 1]);
                 }});
  all.push_back({"RotateHalves/f32", 2 * kRowBytes,
                 [](const Row& r) { RotateAll(r, k::RotateHalves); },
                 [](const Row& r) {
                   const Angles& a = SomeAngles();
                   return IsNear(r.At<float>(1), r.y[1] * a.cos[1] - r.y[65] * a.sin[1]);
                 }});
  all.push_back({"RotatePairs/f32", 2 * kRowBytes,
                 [](const Row& r) { RotateAll(r, k::RotatePairs); },
                 [](const Row& r) {
                   const Angles& a = SomeAngles();
                   return IsNear(r.At<float>(2), r.y[2] * a.cos[1] - r.y[3] * a.sin[1]);
                 }});
  all.push_back({"AddTo/f32", 3 * kRowBytes, [](const Row& r) { k::AddTo(r.x, kCols, r.floats()); },
                 [](const Row& r) { return IsNear(r.At<float>(7), r.x[7] + r.y[7]); }});
  all.push_back({"ScaleAddTo/f32", 3 * kRowBytes,
                 [](const Row& r) { k::ScaleAddTo(r.x, 0.5f, kCols, r.floats()); },
                 [](const Row& r) { return IsNear(r.At<float>(7), 0.5f * r.x[7] + r.y[7]); }});
  all.push_back({"Scale/f32", 2 * kRowBytes,
                 [](const Row& r) { k::Scale(r.floats(), -1.0f, kCols); },
                 [](const Row& r) { return r.At<float>(7) == -r.y[7]; }});
  all.push_back({"Clamp/f32", 2 * kRowBytes,
                 [](const Row& r) { k::Clamp(r.floats(), 0.5f, kCols); },
                 [](const Row& r) { return std::abs(r.At<float>(7)) <= 0.5f; }});
  // One head of attention for each 128 columns: two spans of keys merged, then divided.
  all.push_back(
      {"MergeSpan/f32", 3 * kRowBytes,
       [](const Row& r) {
         for (size_t head = 0; head < kCols; head += kHead) {
           k::SoftmaxState state{1.0f, 2.0f};
           k::MergeSpan({0.5f, 3.0f}, r.x + head, kHead, state, r.floats() + head);
         }
       },
       [](const Row& r) { return IsNear(r.At<float>(7), r.y[7] + std::exp(-0.5) * r.x[7]); }});
  all.push_back({"FinishAttention/f32", 2 * kRowBytes,
                 [](const Row& r) {
                   for (size_t head = 0; head < kCols; head += kHead)
                     k::FinishAttention({0.0f, 2.0f}, r.x + head, kHead, r.floats() + head);
                 },
                 [](const Row& r) { return IsNear(r.At<float>(7), r.x[7] / 2); }});
  return all;
}

// The combine of a layer: a token's row from the rows of its experts, each read once.
RowKernel WeightedSumOf8() {
  const auto weight = [](size_t i) { return 0.1f * static_cast<float>(i + 1); };
  // Every eighth row of the result would be enough for all inputs; the rows go round.
  return {"WeightedSum/f32_of_8", (kSummands + 1) * kRowBytes,
          [=](const Row& r) {
            const float* rows[kSummands];
            float weights[kSummands];
            const auto first = static_cast<size_t>(r.x - RandomRows(0)) / kCols;
            for (size_t i = 0; i < kSummands; ++i) {
              rows[i] = RandomRows(0) + (first * kSummands + i) % kMaxRows * kCols;
              weights[i] = weight(i);
            }
            k::WeightedSum(rows, weights, kSummands, kCols, r.floats());
          },
          [=](const Row& r) {
            double sum = 0;
            for (size_t i = 0; i < kSummands; ++i) sum += weight(i) * r.x[i * kCols + 7];
            return IsNear(r.At<float>(7), sum);
          }};
}

std::vector<RowKernel> Conversions() {
  std::vector<RowKernel> all;
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const size_t bytes = kRowBytes + kCols * DTypeBytes(dtype);
    const std::string name(DTypeName(dtype));
    all.push_back({"ConvertFromF32/" + name, bytes,
                   [=](const Row& r) { k::ConvertFromF32(r.x, kCols, dtype, r.out); },
                   [=](const Row& r) {
                     float back = 0;
                     k::ConvertToF32(r.out + 7 * DTypeBytes(dtype), dtype, 1, &back);
                     return std::abs(back - r.x[7]) <= 0.004f * std::abs(r.x[7]);
                   }});
    // Any bits of f32 are two numbers of the narrow type.
    all.push_back({"ConvertToF32/" + name, bytes,
                   [=](const Row& r) { k::ConvertToF32(r.x, dtype, kCols, r.floats()); },
                   [=](const Row& r) {
                     uint16_t bits = 0;
                     std::memcpy(&bits, reinterpret_cast<const std::byte*>(r.x) + 14, 2);
                     const float expected =
                         dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
                     return std::isnan(expected) || r.At<float>(7) == expected;
                   }});
  }
  return all;
}

std::vector<RowKernel> Activations() {
  std::vector<RowKernel> all;
  for (const ActivationEntry& entry : k::AllActivations()) {
    const ActivationParams params{.alpha = 1.7f, .clamp_limit = 7.0f, .swiglu_limit = 7.0f};
    all.push_back({"Activation/" + std::string(entry.name), (entry.is_gated ? 3 : 2) * kRowBytes,
                   [=](const Row& r) { entry.f32(r.x, r.y, kCols, params, r.floats()); },
                   [=](const Row& r) {
                     const double expected = entry.scalar(double{r.x[7]}, double{r.y[7]}, params);
                     return std::abs(r.At<float>(7) - expected) <= 0.01 * std::abs(expected) + 1e-5;
                   }});
  }
  return all;
}

std::vector<RowKernel> Encoders() {
  std::vector<RowKernel> all;
  all.push_back({"MaxMagnitude/f32", kRowBytes,
                 [](const Row& r) { *r.floats() = k::MaxMagnitude(r.x, kCols); },
                 [](const Row& r) {
                   float most = 0;
                   for (size_t i = 0; i < kCols; ++i) most = std::max(most, std::abs(r.x[i]));
                   return r.At<float>(0) == most;
                 }});
  all.push_back({"Encode/int8", kRowBytes + kCols,
                 [](const Row& r) {
                   k::EncodeInt8(r.x, kCols, {.factor = 20.0f}, reinterpret_cast<int8_t*>(r.out));
                 },
                 [](const Row& r) {
                   return r.At<int8_t>(7) == static_cast<int>(std::nearbyint(20.0f * r.x[7]));
                 }});
  all.push_back(
      {"Encode/e4m3", kRowBytes + kCols,
       [](const Row& r) { k::EncodeE4M3Row(r.x, kCols, 0.01f, reinterpret_cast<uint8_t*>(r.out)); },
       [](const Row& r) { return r.At<uint8_t>(7) == EncodeE4M3(r.x[7] / 0.01f); }});
  all.push_back({"Encode/e2m1", kRowBytes + kCols / 2,
                 [](const Row& r) {
                   k::EncodeE2M1Row(r.x, kCols, 0.5f, MxRounding::kHalfToEven,
                                    reinterpret_cast<uint8_t*>(r.out));
                 },
                 [](const Row& r) {
                   return r.At<uint8_t>(3) >> 4 ==
                          EncodeE2M1(r.x[7] / 0.5f, MxRounding::kHalfToEven);
                 }});
  for (DType dtype : {DType::kI8, DType::kF8E4M3}) {
    all.push_back({"EncodeKvRow/" + std::string(DTypeName(dtype)), kRowBytes + kCols,
                   [=](const Row& r) {
                     for (size_t head = 0; head < kCols; head += kHead)
                       k::EncodeKvRow(r.x + head, kHead, dtype, r.out + head);
                   },
                   [=](const Row& r) {
                     std::byte codes[kHead];
                     k::EncodeKvRow(r.x, kHead, dtype, codes);
                     return std::memcmp(codes, r.out, kHead) == 0;
                   }});
  }
  return all;
}

// Records for weights without offsets, and for weights with them, which want sums.
std::vector<RowKernel> Records() {
  std::vector<RowKernel> all;
  const auto add = [&](const std::string& name, DType weights, k::PanelPath path, size_t group,
                       const auto& pack) {
    const k::PanelFormat format = *k::FindPanelFormat({.dtype = weights}, kCols);
    if (!k::TakesPath(format, path)) return;
    const k::PanelRowLayout layout = k::RowLayoutOf(format, kCols, path, group);
    const std::string suffix = layout.has_sums ? "_with_sums" : "";
    all.push_back({name + suffix, kRowBytes + layout.bytes, [=](const Row& r) { pack(layout, r); },
                   [=](const Row& r) {
                     std::vector<std::byte> again(layout.bytes);
                     pack(layout, Row{r.x, r.y, again.data()});
                     return layout.bytes <= kOutBytes &&
                            std::memcmp(again.data(), r.out, layout.segment) == 0;
                   }});
  };
  const auto pack_floats = [](const auto& layout, const Row& r) {
    k::PackFloatRow(layout, r.x, r.out);
  };
  const auto pack_fast = [](const auto& layout, const Row& r) {
    k::PackFastRow(layout, r.x, r.out);
  };
  const auto pack_scaled = [](const auto& layout, const Row& r) {
    k::PackScaledRow(layout, r.x, r.y, k::kFastGroup, r.out);
  };
  const auto pack_int8 = [](const auto& layout, const Row& r) {
    k::PackInt8Row(layout, reinterpret_cast<const int8_t*>(r.x), r.out);
  };
  for (DType weights : {DType::kGgmlQ40, DType::kGgmlQ4K}) {
    add("PackFastRow/int8", weights, k::PanelPath::kInt8, k::kFastGroup, pack_fast);
    add("PackInt8Row/int8", weights, k::PanelPath::kInt8, 0, pack_int8);
    add("PackFloatRow/bf16", weights, k::PanelPath::kBF16, 0, pack_floats);
    add("PackFloatRow/f32", weights, k::PanelPath::kF32, 0, pack_floats);
    add("PackScaledRow/bf16", weights, k::PanelPath::kBF16, k::kFastGroup, pack_scaled);
  }
  return all;
}

// --- Quantisers of all rows of a layer ---

void RunActQuant(benchmark::State& state, const ActQuant& how) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  const ConstRows x(RandomRows(0), num_rows, kCols);
  Arena arena;
  ExecContext context{bench::Pool(1), arena};
  const QuantRows codes = quant::QuantizeRows(context, x, how);
  std::vector<float> back(kCols);
  quant::DequantizeRow(codes, num_rows - 1, back.data());
  double error = 0;
  for (size_t i = 0; i < kCols; ++i)
    error += std::pow(double{back[i]} - double{x.Row(num_rows - 1)[i]}, 2);
  if (!(error / kCols < 0.05)) {
    state.SkipWithError("the result is wrong");
    return;
  }
  const size_t bytes = kRowBytes + BytesOf(codes.dtype, kCols) + codes.ScaleRowBytes();
  for (auto _ : state) {
    arena.Reset();
    benchmark::DoNotOptimize(quant::QuantizeRows(context, x, how).data);
  }
  bench::ReportBytes(state, static_cast<double>(num_rows * bytes), 1);
}

void RunDequantize(benchmark::State& state, const ActQuant& how) {
  const auto num_rows = static_cast<size_t>(state.range(0));
  Arena arena;
  ExecContext context{bench::Pool(1), arena};
  const ConstRows x(RandomRows(0), num_rows, kCols);
  const QuantRows codes = quant::QuantizeRows(context, x, how);
  const Rows out = arena.AllocateRows(num_rows, kCols);
  quant::DequantizeRows(context, codes, out);
  if (!(std::abs(out.Row(0)[7] - x.Row(0)[7]) < 0.5f)) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    quant::DequantizeRows(context, codes, out);
    benchmark::ClobberMemory();
  }
  const size_t bytes = kRowBytes + BytesOf(codes.dtype, kCols) + codes.ScaleRowBytes();
  bench::ReportBytes(state, static_cast<double>(num_rows * bytes), 1);
}

void Register(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(fmt::format("{}/{}", name, kCols).c_str(), run)
      ->ArgName("rows")
      ->Arg(8)
      ->Arg(kMaxRows)
      ->Unit(benchmark::kMicrosecond);
}

void RegisterAll() {
  std::vector<RowKernel> all = NormsAndSums();
  all.push_back(WeightedSumOf8());
  for (const auto& more : {Conversions(), Activations(), Encoders(), Records()})
    all.insert(all.end(), more.begin(), more.end());
  for (const RowKernel& kernel : all)
    Register(kernel.name, [kernel](benchmark::State& state) { RunRows(state, kernel); });
  for (int kind = 1; kind <= static_cast<int>(ActQuantKind::kMxFp4); ++kind) {
    const ActQuant how{.kind = static_cast<ActQuantKind>(kind), .scale = 0.03f};
    const std::string name(ActQuantKindName(how.kind));
    Register("QuantizeRows/" + name, [=](benchmark::State& state) { RunActQuant(state, how); });
    Register("DequantizeRows/" + name, [=](benchmark::State& state) { RunDequantize(state, how); });
  }
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::RegisterAll);
}
