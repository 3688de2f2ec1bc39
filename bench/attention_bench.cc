// Speed of a layer's attention over the cache on all CPUs, beside the limits of the same run: the
// arithmetic peak for prompts, the read bandwidth for answers.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/attention/attention.h"
#include "limits_counters.h"
#include "model/attention.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/memory.h"

namespace switchyard {
namespace {

struct Heads {
  size_t queries;
  size_t keys;
};
constexpr Heads kOlmoe{16, 16};
constexpr Heads kQwen3{32, 4};
constexpr size_t kDim = 128;

size_t Threads() { return AvailableCpus(); }

ModelConfig ConfigOf(const Heads& heads, size_t num_layers) {
  ModelConfig config;
  config.num_heads = heads.queries;
  config.num_kv_heads = heads.keys;
  config.head_dim = kDim;
  config.layers.resize(num_layers);
  return config;
}

// Some layers' caches full of random keys and values of one sequence, and its last queries.
class Sequence {
 public:
  Sequence(const Heads& heads, DType kv_dtype, DType act_dtype, size_t num_keys, size_t num_queries,
           size_t num_layers)
      : config_(ConfigOf(heads, num_layers)),
        act_dtype_(act_dtype),
        layout_(config_, kv_dtype),
        layer_bytes_((num_keys + kKvBlockSize - 1) / kKvBlockSize * layout_.bytes()),
        memory_(num_layers * layer_bytes_, "a benchmark"),
        heads_{0, heads.keys, heads.queries / heads.keys},
        tokens_(num_keys) {
    for (size_t i = 0; i < num_layers; ++i)
      layers_.push_back({memory_.data() + i * layer_bytes_, layout_.bytes(), 0});
    cache_ = {kv_dtype, layers_};
    for (uint32_t block = 0; block * kKvBlockSize < num_keys; ++block) blocks_.push_back(block);
    table_ = {0, blocks_};
    Fill(num_keys);
    q_ = RandomRows(num_queries, heads.queries * kDim);
    out_.resize(q_.size());
    chunk_.tokens = std::span(tokens_).first(num_queries);
    chunk_.position = num_keys - num_queries;
    chunk_.tables = {&table_, 1};
  }

  void Run(size_t layer) {
    const size_t rows = chunk_.tokens.size();
    const size_t cols = config_.num_heads * kDim;
    Attend(context_, config_, {&chunk_, 1}, cache_, layer, act_dtype_, heads_,
           ConstRows(q_.data(), rows, cols), Rows(out_.data(), rows, cols));
  }

  // Whether the last query's first head is right, by f64.
  bool IsRight() {
    Run(0);
    const size_t last = chunk_.tokens.size() - 1;
    const size_t stride = config_.num_heads * kDim;
    std::vector<float> expected(kDim);
    kernels::AttentionReference(
        {q_.data() + last * stride, first_keys_.data(), first_values_.data(), DType::kF32, kDim,
         kDim, kDim, 1 / std::sqrt(double{kDim})},
        0, tokens_.size(), expected.data());
    for (size_t d = 0; d < kDim; ++d) {
      if (!(std::abs(out_[last * stride + d] - expected[d]) < 0.02f)) return false;
    }
    return true;
  }

  size_t layer_bytes() const { return layer_bytes_; }
  size_t num_layers() const { return layers_.size(); }
  // A multiply-add of each query and each key that it sees, for scores and again for sums.
  double Operations() const {
    const auto queries = static_cast<double>(chunk_.tokens.size());
    const double keys = static_cast<double>(chunk_.position) + (queries + 1) / 2;
    return 4 * queries * keys * static_cast<double>(config_.num_heads * kDim);
  }

 private:
  std::vector<float> RandomRows(size_t rows, size_t cols) {
    std::normal_distribution<float> normal;
    std::vector<float> values(rows * cols);
    for (float& value : values) value = normal(random_);
    return values;
  }

  // Every layer has the same keys and values, in memory of its own.
  void Fill(size_t num_keys) {
    SequenceChunk all;
    all.tokens = tokens_;
    all.tables = {&table_, 1};
    const size_t cols = config_.num_kv_heads * kDim;
    const std::vector<float> keys = RandomRows(num_keys, cols);
    const std::vector<float> values = RandomRows(num_keys, cols);
    for (size_t i = 0; i < layers_.size(); ++i) {
      StoreKeysAndValues(context_, config_, {&all, 1}, cache_, i,
                         ConstRows(keys.data(), num_keys, cols),
                         ConstRows(values.data(), num_keys, cols));
    }
    for (size_t j = 0; j < num_keys; ++j) {
      first_keys_.insert(first_keys_.end(), &keys[j * cols], &keys[j * cols] + kDim);
      first_values_.insert(first_values_.end(), &values[j * cols], &values[j * cols] + kDim);
    }
  }

  std::mt19937 random_{1};
  Arena arena_;
  ExecContext context_{bench::Pool(Threads()), arena_};
  ModelConfig config_;
  DType act_dtype_;
  KvBlockLayout layout_;
  size_t layer_bytes_;
  MappedMemory memory_;
  QueryHeads heads_;
  std::vector<int32_t> tokens_;
  std::vector<KvLayerView> layers_;
  KvView cache_;
  std::vector<uint32_t> blocks_;
  BlockTable table_;
  SequenceChunk chunk_;
  std::vector<float> q_, out_, first_keys_, first_values_;
};

void RunAll(benchmark::State& state, Sequence& sequence) {
  if (!sequence.IsRight()) {
    state.SkipWithError("the result is wrong");
    return;
  }
  size_t layer = 0;
  for (auto _ : state) {
    sequence.Run(layer);
    layer = (layer + 1) % sequence.num_layers();
  }
}

// The last 512 queries of a prompt. Argument: its length.
void Prefill(benchmark::State& state, const Heads& heads, DType kv_dtype, DType act_dtype) {
  Sequence sequence(heads, kv_dtype, act_dtype, static_cast<size_t>(state.range(0)), 512, 1);
  RunAll(state, sequence);
  const kernels::MachineLimits& limits = bench::Limits(Threads());
  const bool pairs = act_dtype == DType::kBF16 && limits.bf16_gops > 0;
  bench::ReportOps(state, sequence.Operations(), pairs ? limits.bf16_gops : limits.f32_gops);
}

// One token after as many keys as the argument says, in turn in more layers than caches hold.
void Decode(benchmark::State& state, const Heads& heads, DType kv_dtype, DType act_dtype) {
  constexpr size_t kBytes = size_t{256} << 20;
  const auto keys = static_cast<size_t>(state.range(0));
  const size_t layer_bytes =
      keys / kKvBlockSize * KvBlockLayout(ConfigOf(heads, 1), kv_dtype).bytes();
  Sequence sequence(heads, kv_dtype, act_dtype, keys, 1, kBytes / layer_bytes);
  RunAll(state, sequence);
  bench::ReportBytes(state, static_cast<double>(layer_bytes), Threads());
}

#define ATTENTION_BENCH(model, heads, kv, act)                                             \
  BENCHMARK_CAPTURE(Prefill, model##_##kv##_act_##act, heads, DType::k##kv, DType::k##act) \
      ->Arg(512)                                                                           \
      ->Arg(8192)                                                                          \
      ->UseRealTime();                                                                     \
  BENCHMARK_CAPTURE(Decode, model##_##kv##_act_##act, heads, DType::k##kv, DType::k##act)  \
      ->Arg(8192)                                                                          \
      ->UseRealTime()
ATTENTION_BENCH(olmoe, kOlmoe, F32, F32);
ATTENTION_BENCH(olmoe, kOlmoe, BF16, F32);
ATTENTION_BENCH(olmoe, kOlmoe, BF16, BF16);
ATTENTION_BENCH(qwen3, kQwen3, F32, F32);
ATTENTION_BENCH(qwen3, kQwen3, BF16, F32);
ATTENTION_BENCH(qwen3, kQwen3, BF16, BF16);
ATTENTION_BENCH(qwen3, kQwen3, F16, F32);
ATTENTION_BENCH(qwen3, kQwen3, F8E4M3, BF16);
ATTENTION_BENCH(qwen3, kQwen3, I8, BF16);

}  // namespace
}  // namespace switchyard

BENCHMARK_MAIN();
