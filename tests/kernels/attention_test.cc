// Attention over spans against the scalar reference, on every instruction set.
#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/convert/convert.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

// Keys and values of one head in blocks, as the cache holds them.
struct Cache {
  Cache(DType dtype_in, size_t tokens_in, size_t head_dim_in, std::mt19937_64& random)
      : dtype(dtype_in), tokens(tokens_in), head_dim(head_dim_in) {
    for (std::vector<std::byte>* side : {&keys, &values}) {
      const std::vector<float> numbers = testing::RandomFloats(random, tokens * head_dim);
      side->resize(numbers.size() * DTypeBytes(dtype));
      ConvertFromF32(numbers.data(), numbers.size(), dtype, side->data());
    }
  }
  const void* Block(const std::vector<std::byte>& side, size_t block) const {
    return side.data() + block * kKvBlockTokens * head_dim * DTypeBytes(dtype);
  }
  DType dtype;
  size_t tokens, head_dim;
  std::vector<std::byte> keys, values;
};

// Full attention of some queries through spans. first/last are absolute positions.
std::vector<float> Attend(const Cache& cache, const std::vector<float>& q,
                          const std::vector<size_t>& first, const std::vector<size_t>& last,
                          float scale) {
  const size_t rows = first.size();
  const size_t dim = cache.head_dim;
  std::vector<const float*> q_rows;
  for (size_t r = 0; r < rows; ++r) q_rows.push_back(q.data() + r * dim);
  std::vector<float> scores(rows * kAttentionSpan, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> span_sums(rows * dim);
  std::vector<SoftmaxState> span_states(rows);
  std::vector<float> sums(rows * dim, 0.0f);
  std::vector<SoftmaxState> states(rows, {-std::numeric_limits<float>::infinity(), 0.0f});
  for (size_t start = 0; start < cache.tokens; start += kAttentionSpan) {
    std::vector<uint32_t> from(rows);
    std::vector<uint32_t> to(rows);
    for (size_t r = 0; r < rows; ++r) {
      const auto clip = [&](size_t x) {
        return static_cast<uint32_t>(std::min(kAttentionSpan, x > start ? x - start : 0));
      };
      from[r] = clip(first[r]);
      to[r] = clip(last[r]);
    }
    const void* k[kBlocksPerSpan];
    const void* v[kBlocksPerSpan];
    for (size_t b = 0; b < kBlocksPerSpan; ++b) {
      k[b] = cache.Block(cache.keys, start / kKvBlockTokens + b);
      v[b] = cache.Block(cache.values, start / kKvBlockTokens + b);
    }
    AttentionSpanArgs args;
    args.q = q_rows.data();
    args.num_rows = rows;
    args.first = from.data();
    args.last = to.data();
    args.k = k;
    args.v = v;
    args.kv_dtype = cache.dtype;
    args.key_dim = args.value_dim = args.value_stride = dim;
    args.scale = scale;
    args.scores = scores.data();
    args.sums = span_sums.data();
    args.states = span_states.data();
    AttendSpan(args);
    for (size_t r = 0; r < rows; ++r) {
      MergeSpan(span_states[r], span_sums.data() + r * dim, dim, states[r], sums.data() + r * dim);
    }
  }
  std::vector<float> out(rows * dim);
  for (size_t r = 0; r < rows; ++r)
    FinishAttention(states[r], sums.data() + r * dim, dim, out.data() + r * dim);
  return out;
}

TEST(Attention, MatchesTheReference) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(11);
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (size_t dim : {8u, 16u, 24u, 64u, 100u, 128u}) {
        for (size_t tokens : {1u, 5u, 63u, 64u, 65u, 256u, 257u, 700u}) {
          const Cache cache(dtype, tokens, dim, random);
          const size_t rows = 1 + random() % 9;
          const std::vector<float> q = testing::RandomFloats(random, rows * dim);
          std::vector<size_t> first(rows);
          std::vector<size_t> last(rows);
          for (size_t r = 0; r < rows; ++r) {
            last[r] = 1 + random() % tokens;
            first[r] = random() % 2 ? 0 : random() % last[r];
          }
          const float scale = 0.3f;
          const std::vector<float> out = Attend(cache, q, first, last, scale);
          for (size_t r = 0; r < rows; ++r) {
            std::vector<float> expected(dim);
            AttentionReference(q.data() + r * dim, cache.keys.data(), cache.values.data(), dtype,
                               dim, first[r], last[r], dim, scale, expected.data());
            for (size_t d = 0; d < dim; ++d) {
              ASSERT_NEAR(out[r * dim + d], expected[d], 2e-5)
                  << "dim " << dim << " tokens " << tokens << " row " << r << " keys " << first[r]
                  << ".." << last[r];
            }
          }
        }
      }
    }
  });
}

TEST(Attention, BitsDoNotDependOnWhichQueriesShareACall) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(12);
    const size_t dim = 72;
    const Cache cache(DType::kBF16, 600, dim, random);
    const size_t rows = 13;
    const std::vector<float> q = testing::RandomFloats(random, rows * dim);
    std::vector<size_t> first(rows);
    std::vector<size_t> last(rows);
    for (size_t r = 0; r < rows; ++r) {
      last[r] = 580 + r;
      first[r] = r % 3 == 0 ? 0 : last[r] - 100;
    }
    const std::vector<float> together = Attend(cache, q, first, last, 0.1f);
    for (size_t r = 0; r < rows; ++r) {
      const std::vector<float> one(q.begin() + static_cast<std::ptrdiff_t>(r * dim),
                                   q.begin() + static_cast<std::ptrdiff_t>((r + 1) * dim));
      const std::vector<float> alone = Attend(cache, one, {first[r]}, {last[r]}, 0.1f);
      ASSERT_EQ(std::memcmp(alone.data(), together.data() + r * dim, dim * sizeof(float)), 0)
          << "row " << r;
    }
  });
}

// Latent attention: values are the beginning of the keys, and stay with them in memory.
TEST(Attention, ValuesMayBeTheBeginningOfTheKeys) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(14);
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (size_t value_dim : {1u, 16u, 20u, 39u, 40u}) {
        const size_t dim = 40, tokens = 150, rows = 6;
        Cache cache(dtype, tokens, dim, random);
        const std::vector<float> q = testing::RandomFloats(random, rows * dim);
        std::vector<const float*> q_rows;
        for (size_t r = 0; r < rows; ++r) q_rows.push_back(q.data() + r * dim);
        const std::vector<uint32_t> first = {0, 0, 3, 7, 149, 5};
        const std::vector<uint32_t> last = {1, 150, 150, 80, 150, 5};
        const void* blocks[kBlocksPerSpan];
        for (size_t b = 0; b < kBlocksPerSpan; ++b) blocks[b] = cache.Block(cache.keys, b);
        std::vector<float> scores(rows * kAttentionSpan), sums(rows * value_dim);
        std::vector<SoftmaxState> states(rows);
        AttentionSpanArgs args;
        args.q = q_rows.data();
        args.num_rows = rows;
        args.first = first.data();
        args.last = last.data();
        args.k = args.v = blocks;
        args.kv_dtype = dtype;
        args.key_dim = args.value_stride = dim;
        args.value_dim = value_dim;
        args.scale = 0.2f;
        args.scores = scores.data();
        args.sums = sums.data();
        args.states = states.data();
        AttendSpan(args);
        for (size_t r = 0; r < rows; ++r) {
          if (first[r] >= last[r]) {
            ASSERT_EQ(states[r].denominator, 0.0f);
            continue;
          }
          std::vector<float> expected(dim), found(value_dim);
          AttentionReference(q_rows[r], cache.keys.data(), cache.keys.data(), dtype, dim, first[r],
                             last[r], dim, 0.2, expected.data());
          FinishAttention(states[r], sums.data() + r * value_dim, value_dim, found.data());
          for (size_t d = 0; d < value_dim; ++d)
            ASSERT_NEAR(found[d], expected[d], 2e-5) << "row " << r << " value " << d;
        }
      }
    }
  });
}

// A sink is a key without a value: it takes its share of the softmax, whether it is the largest
// score or not.
TEST(Attention, ASinkTakesItsShare) {
  for (float sink : {-3.0f, 0.5f, 40.0f}) {
    SoftmaxState state{0.5f, 3.0f};
    std::vector<float> sums = {1.0f, -6.0f};
    MergeSink(sink, 2, state, sums.data());
    std::vector<float> found(2);
    FinishAttention(state, sums.data(), 2, found.data());
    const double share = 3.0 / (3.0 + std::exp(double{sink} - 0.5));
    EXPECT_NEAR(found[0], 1.0 / 3.0 * share, 1e-6) << sink;
    EXPECT_NEAR(found[1], -6.0 / 3.0 * share, 1e-6) << sink;
  }
}

// Bug-log 66: a window of W sees keys i-W+1 .. i and nothing else.
TEST(Attention, KeysOutsideTheWindowHaveNoEffect) {
  auto random = testing::MakeRandom(13);
  const size_t dim = 16;
  const size_t window = 4;
  Cache cache(DType::kF32, 24, dim, random);
  for (size_t i = 0; i < 24; ++i) {
    const std::vector<float> q = testing::RandomFloats(random, dim);
    const std::vector<size_t> first = {i + 1 > window ? i + 1 - window : 0};
    const std::vector<float> before = Attend(cache, q, first, {i + 1}, 0.5f);
    for (size_t j = 0; j < 24; ++j) {
      Cache changed = cache;
      reinterpret_cast<float*>(changed.keys.data())[j * dim] += 1.0f;
      reinterpret_cast<float*>(changed.values.data())[j * dim + 1] += 1.0f;
      const bool differs = Attend(changed, q, first, {i + 1}, 0.5f) != before;
      EXPECT_EQ(differs, j <= i && j + window > i) << "query " << i << " key " << j;
    }
  }
}

// A value that is infinite or NaN reaches the queries that see it and no others.
TEST(Attention, BadValuesStayWithTheQueriesThatSeeThem) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(15);
    const size_t dim = 24;
    Cache cache(DType::kF32, 12, dim, random);
    reinterpret_cast<float*>(cache.values.data())[9 * dim + 3] =
        std::numeric_limits<float>::infinity();
    reinterpret_cast<float*>(cache.values.data())[2 * dim + 5] =
        std::numeric_limits<float>::quiet_NaN();
    const size_t rows = 9;
    const std::vector<float> q = testing::RandomFloats(random, rows * dim);
    std::vector<size_t> first(rows);
    std::vector<size_t> last(rows);
    for (size_t r = 0; r < rows; ++r) {
      first[r] = r % 2 == 0 ? 3 : 0;
      last[r] = r + 4;
    }
    const std::vector<float> out = Attend(cache, q, first, last, 1.0f);
    for (size_t r = 0; r < rows; ++r) {
      EXPECT_EQ(std::isfinite(out[r * dim + 3]), last[r] <= 9) << r;
      EXPECT_EQ(std::isfinite(out[r * dim + 5]), first[r] == 3) << r;
      EXPECT_TRUE(std::isfinite(out[r * dim])) << r;
    }
  });
}

TEST(Attention, ARowWithoutKeysIsEmptyAndHarmless) {
  auto random = testing::MakeRandom(14);
  const Cache cache(DType::kF32, 10, 8, random);
  const std::vector<float> q = testing::RandomFloats(random, 16);
  const std::vector<float> both = Attend(cache, q, {0, 5}, {10, 5}, 1.0f);
  const std::vector<float> alone = Attend(cache, {q.begin(), q.begin() + 8}, {0}, {10}, 1.0f);
  EXPECT_EQ(std::memcmp(both.data(), alone.data(), 8 * sizeof(float)), 0);
}

}  // namespace
}  // namespace switchyard::kernels
