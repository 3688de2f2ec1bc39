// Speed of attention over one head of each KV type on one thread: the queries that decode (1),
// grouped heads (8) and prefill (32) give a call, keys and values of 128 numbers. 32 MB of them as
// codes, so that one query reads from memory.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_codes.h"
#include "kernels/convert/convert.h"
#include "switchyard/core/memory.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kDim = 128;
constexpr size_t kKeys = 1 << 17;

bool IsCode(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8E4M3; }

// Random rows of a type, in big pages, with their scales.
struct Side {
  Side(DType dtype, uint32_t seed)
      : row_bytes(kDim * DTypeBytes(dtype)), rows(kKeys * row_bytes, "a benchmark"), scales(kKeys) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> row(kDim);
    for (size_t j = 0; j < kKeys; ++j) {
      for (float& value : row) value = normal(random);
      std::byte* to = rows.data() + j * row_bytes;
      if (IsCode(dtype)) {
        scales[j] = EncodeKvRow(row.data(), kDim, dtype, to);
      } else {
        ConvertFromF32(row.data(), kDim, dtype, to);
      }
      if (j == 0) first = row;
    }
  }
  size_t row_bytes;
  MappedMemory rows;
  std::vector<float> scales;
  std::vector<float> first;  // before it was rounded
};

// Calls of one span after another, as a context of kKeys gives them.
class Context {
 public:
  Context(DType dtype, size_t num_rows)
      : keys_(dtype, 1),
        values_(dtype, 2),
        q_(kDim, 0.05f),
        q_rows_(num_rows, q_.data()),
        first_(num_rows, 0),
        last_(num_rows, kAttentionSpan),
        scores_(num_rows * kAttentionSpan),
        sums_(num_rows * kDim),
        states_(num_rows) {
    args_.q = q_rows_.data();
    args_.num_rows = num_rows;
    args_.first = first_.data();
    args_.last = last_.data();
    args_.kv_dtype = dtype;
    args_.key_dim = args_.value_dim = args_.value_stride = args_.key_split = kDim;
    args_.scores = scores_.data();
    args_.sums = sums_.data();
    args_.states = states_.data();
  }

  // Whether a query that sees one key gets its value.
  bool IsRight() {
    last_.assign(last_.size(), 1);
    Run(0);
    last_.assign(last_.size(), kAttentionSpan);
    for (size_t d = 0; d < kDim; ++d) {
      if (!(std::abs(sums_[d] - values_.first[d]) < 0.1f)) return false;
    }
    return true;
  }

  void Run(size_t start) {
    const void* k[kBlocksPerSpan];
    const void* v[kBlocksPerSpan];
    const float* k_scales[kBlocksPerSpan];
    const float* v_scales[kBlocksPerSpan];
    for (size_t b = 0; b < kBlocksPerSpan; ++b) {
      const size_t at = start + b * kKvBlockTokens;
      k[b] = keys_.rows.data() + at * keys_.row_bytes;
      v[b] = values_.rows.data() + at * values_.row_bytes;
      k_scales[b] = keys_.scales.data() + at;
      v_scales[b] = values_.scales.data() + at;
    }
    args_.k = k;
    args_.v = v;
    args_.k_scales = k_scales;
    args_.v_scales = v_scales;
    AttendSpan(args_);
    benchmark::DoNotOptimize(sums_.data());
  }

 private:
  Side keys_, values_;
  std::vector<float> q_;
  std::vector<const float*> q_rows_;
  std::vector<uint32_t> first_, last_;
  std::vector<float> scores_, sums_;
  std::vector<SoftmaxState> states_;
  AttentionSpanArgs args_;
};

void RunAttention(benchmark::State& state, DType dtype) {
  Context context(dtype, static_cast<size_t>(state.range(0)));
  if (!context.IsRight()) {
    state.SkipWithError("the result is wrong");
    return;
  }
  size_t start = 0;
  for (auto _ : state) {
    context.Run(start);
    start = (start + kAttentionSpan) % kKeys;
  }
  const auto keys = static_cast<double>(state.iterations()) * static_cast<double>(kAttentionSpan);
  state.counters["keys/s"] = benchmark::Counter(keys, benchmark::Counter::kIsRate);
}
BENCHMARK_CAPTURE(RunAttention, f32, DType::kF32)->Arg(1)->Arg(8)->Arg(32);
BENCHMARK_CAPTURE(RunAttention, bf16, DType::kBF16)->Arg(1)->Arg(8)->Arg(32);
BENCHMARK_CAPTURE(RunAttention, f16, DType::kF16)->Arg(1)->Arg(8)->Arg(32);
BENCHMARK_CAPTURE(RunAttention, fp8, DType::kF8E4M3)->Arg(1)->Arg(8)->Arg(32);
BENCHMARK_CAPTURE(RunAttention, int8, DType::kI8)->Arg(1)->Arg(8)->Arg(32);

}  // namespace
}  // namespace switchyard::kernels

BENCHMARK_MAIN();
