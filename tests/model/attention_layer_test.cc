// A layer's attention over the cache: against plain loops, and the same bits for any chunks and
// threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/attention/attention.h"
#include "model/attention.h"
#include "switchyard/core/memory.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard {
namespace {

constexpr size_t kTokens = 1100;  // five spans of keys, the last one begun

struct Case {
  size_t num_heads, num_kv_heads, head_dim, window;
  DType kv_dtype, act_dtype;
};
constexpr Case kCases[] = {
    {6, 2, 40, 0, DType::kF32, DType::kF32},     {4, 4, 24, 0, DType::kBF16, DType::kBF16},
    {16, 1, 64, 0, DType::kI8, DType::kBF16},    {6, 2, 40, 300, DType::kBF16, DType::kBF16},
    {3, 1, 33, 70, DType::kF8E4M3, DType::kF32}, {3, 1, 33, 0, DType::kF16, DType::kBF16},
};

// One layer whose cache holds kTokens random keys and values, and a query for each of them.
class Layer {
 public:
  explicit Layer(const Case& c) : case_(c) {
    config_.num_heads = c.num_heads;
    config_.num_kv_heads = c.num_kv_heads;
    config_.head_dim = c.head_dim;
    config_.layers.resize(1);
    config_.layers[0].window = c.window;
    const KvBlockLayout layout(config_, c.kv_dtype);
    // Blocks lie in the opposite order of their tokens.
    const size_t num_blocks = (kTokens + kKvBlockSize - 1) / kKvBlockSize;
    for (size_t b = num_blocks; b > 0; --b) blocks_.push_back(static_cast<uint32_t>(b - 1));
    memory_ = MappedMemory(num_blocks * layout.bytes(), "a test");
    view_ = {memory_.data(), layout.bytes(), 0};
    cache_ = {c.kv_dtype, {&view_, 1}};
    table_ = {0, blocks_};
    auto random = testing::MakeRandom(31);
    keys_ = testing::RandomFloats(random, kTokens * c.num_kv_heads * c.head_dim);
    values_ = testing::RandomFloats(random, keys_.size());
    q_ = testing::RandomFloats(random, kTokens * cols());
    ThreadPool pool(1);
    Arena arena;
    ExecContext context{pool, arena};
    const SequenceChunk all = Chunk(0, kTokens);
    StoreKeysAndValues(context, config_, {&all, 1}, cache_, 0, KvRows(keys_), KvRows(values_));
  }

  size_t cols() const { return case_.num_heads * case_.head_dim; }
  const Case& options() const { return case_; }

  // What the queries [begin, end) see, in chunks of this size.
  std::vector<float> Run(size_t begin, size_t end, size_t chunk_size, size_t num_threads) {
    std::vector<float> out((end - begin) * cols());
    ThreadPool pool(num_threads);
    Arena arena;
    ExecContext context{pool, arena};
    for (size_t at = begin; at < end; at += chunk_size) {
      const SequenceChunk chunk = Chunk(at, std::min(chunk_size, end - at));
      Attend(context, config_, {&chunk, 1}, cache_, 0, case_.act_dtype, Heads(),
             ConstRows(q_.data() + at * cols(), chunk.tokens.size(), cols()),
             Rows(out.data() + (at - begin) * cols(), chunk.tokens.size(), cols()));
    }
    return out;
  }

  // One query's head by plain loops over the numbers before they were rounded for the cache.
  std::vector<float> Reference(size_t query, size_t head) const {
    const size_t dim = case_.head_dim;
    const size_t kv_cols = case_.num_kv_heads * dim;
    const size_t kv_head = head / (case_.num_heads / case_.num_kv_heads);
    std::vector<float> keys, values;
    for (size_t j = 0; j < kTokens; ++j) {
      const size_t at = j * kv_cols + kv_head * dim;
      keys.insert(keys.end(), &keys_[at], &keys_[at] + dim);
      values.insert(values.end(), &values_[at], &values_[at] + dim);
    }
    const size_t window = case_.window;
    const size_t first = window != 0 && query + 1 > window ? query + 1 - window : 0;
    std::vector<float> out(dim);
    kernels::AttentionReference(
        {q_.data() + query * cols() + head * dim, keys.data(), values.data(), DType::kF32, dim, dim,
         dim, 1 / std::sqrt(static_cast<double>(dim))},
        first, query + 1, out.data());
    return out;
  }

 private:
  ConstRows KvRows(const std::vector<float>& rows) const {
    return ConstRows(rows.data(), kTokens, case_.num_kv_heads * case_.head_dim);
  }
  QueryHeads Heads() const { return {0, case_.num_kv_heads, case_.num_heads / case_.num_kv_heads}; }
  SequenceChunk Chunk(size_t position, size_t count) const {
    SequenceChunk chunk;
    chunk.tokens = std::span(tokens_).first(count);
    chunk.position = position;
    chunk.tables = {&table_, 1};
    return chunk;
  }

  Case case_;
  ModelConfig config_;
  std::vector<int32_t> tokens_ = std::vector<int32_t>(kTokens);
  std::vector<uint32_t> blocks_;
  MappedMemory memory_;
  KvLayerView view_;
  KvView cache_;
  BlockTable table_;
  std::vector<float> keys_, values_, q_;
};

TEST(AttentionLayer, BitsDoNotDependOnChunksOrThreads) {
  for (const Case& options : kCases) {
    SCOPED_TRACE(::testing::Message()
                 << options.num_heads << " heads, cache of " << DTypeName(options.kv_dtype));
    Layer layer(options);
    const std::vector<float> expected = layer.Run(0, kTokens, kTokens, 1);
    for (size_t chunk_size : {37u, 64u, 300u}) {
      EXPECT_TRUE(layer.Run(0, kTokens, chunk_size, 3) == expected) << "chunks of " << chunk_size;
    }
    // Answers, whose spans are spread over the threads.
    const size_t begin = kTokens - 20;
    const std::vector<float> last(
        expected.begin() + static_cast<std::ptrdiff_t>(begin * layer.cols()), expected.end());
    for (size_t num_threads : {1u, 2u, 7u})
      EXPECT_TRUE(layer.Run(begin, kTokens, 1, num_threads) == last) << num_threads << " threads";
  }
}

// The spans of an answer, and the chunks of a prompt, on every instruction set.
TEST(AttentionLayer, ThreadsDoNotChangeBitsOnAnyTarget) {
  testing::ForEachTarget([] {
    for (const Case& options : kCases) {
      Layer layer(options);
      const size_t begin = kTokens - 3;
      const std::vector<float> expected = layer.Run(begin, kTokens, 3, 1);
      for (size_t num_threads : {1u, 2u, 3u}) {
        EXPECT_TRUE(layer.Run(begin, kTokens, 1, num_threads) == expected)
            << DTypeName(options.kv_dtype) << ", " << num_threads << " threads";
      }
    }
  });
}

TEST(AttentionLayer, MatchesTheReference) {
  for (const Case& options : kCases) {
    Layer layer(options);
    const std::vector<float> out = layer.Run(0, kTokens, kTokens, 2);
    // fp8 has steps of an eighth of a number and int8 of a 127th of the largest, which is below 5.
    const float bound = options.kv_dtype == DType::kF32 ? 1e-5f
                        : IsKvCode(options.kv_dtype)    ? 0.3f
                                                        : 0.03f;
    for (size_t query : {size_t{0}, size_t{63}, size_t{256}, kTokens - 1}) {
      for (size_t head = 0; head < options.num_heads; ++head) {
        const std::vector<float> expected = layer.Reference(query, head);
        for (size_t d = 0; d < options.head_dim; ++d) {
          ASSERT_NEAR(out[query * layer.cols() + head * options.head_dim + d], expected[d], bound)
              << DTypeName(options.kv_dtype) << " query " << query << " head " << head;
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
