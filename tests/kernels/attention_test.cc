// Attention over spans against the scalar reference, on every instruction set.
#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/attention/kv_codes.h"
#include "kernels/convert/convert.h"
#include "kernels/e4m3_code.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

// What a cache holds, and whether its products are to be of bf16.
struct Kind {
  DType dtype;
  bool bf16_products = false;
};
constexpr Kind kKinds[] = {{DType::kF32},      {DType::kBF16},        {DType::kF16},
                           {DType::kI8},       {DType::kF8E4M3},      {DType::kBF16, true},
                           {DType::kI8, true}, {DType::kF8E4M3, true}};

std::string NameOf(const Kind& kind) {
  return std::string(DTypeName(kind.dtype)) + (kind.bf16_products ? ", bf16 products" : "");
}

bool IsCode(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8E4M3; }

// A code as the standard of its type says, one at a time.
float ValueOfCode(DType dtype, const std::byte* code) {
  return dtype == DType::kI8 ? static_cast<float>(static_cast<int8_t>(*code))
                             : DecodeE4M3(static_cast<uint8_t>(*code));
}

struct Shape {
  size_t key_dim = 0;
  size_t value_dim = 0;
  size_t key_split = 0;    // of codes; 0 = key_dim
  bool is_latent = false;  // values are the beginning of the keys
};

// Keys or values of one head in blocks, as the cache holds them, and the numbers that they stand
// for, one row after another.
struct Side {
  Side(DType dtype_in, size_t dim_in, size_t split_in, const std::vector<float>& numbers)
      : dtype(dtype_in), dim(dim_in), split(split_in), tokens(numbers.size() / dim) {
    rows.resize(numbers.size() * DTypeBytes(dtype));
    scales.resize((tokens / kKvBlockTokens + 1) * 2 * kKvBlockTokens);
    exact.resize(numbers.size());
    for (size_t j = 0; j < tokens; ++j) Store(j, numbers.data() + j * dim);
  }

  void Store(size_t j, const float* row) {
    std::byte* to = rows.data() + j * dim * DTypeBytes(dtype);
    float* values = exact.data() + j * dim;
    if (!IsCode(dtype)) {
      ConvertFromF32(row, dim, dtype, to);
      ConvertToF32(to, dtype, dim, values);
      return;
    }
    for (size_t part = 0; part < (split < dim ? 2u : 1u); ++part) {
      const size_t begin = part * split;
      const size_t end = part == 0 ? split : dim;
      const float scale = EncodeKvRow(row + begin, end - begin, dtype, to + begin);
      scales[(j / kKvBlockTokens * 2 + part) * kKvBlockTokens + j % kKvBlockTokens] = scale;
      for (size_t d = begin; d < end; ++d) values[d] = ValueOfCode(dtype, to + d) * scale;
    }
  }

  const void* Block(size_t block) const {
    return rows.data() + block * kKvBlockTokens * dim * DTypeBytes(dtype);
  }
  const float* Scales(size_t block) const { return scales.data() + block * 2 * kKvBlockTokens; }

  DType dtype;
  size_t dim, split, tokens;
  std::vector<std::byte> rows;
  std::vector<float> scales;  // [blocks, 2, kKvBlockTokens]
  std::vector<float> exact;   // [tokens, dim]
};

struct Cache {
  Cache(const Kind& kind, size_t tokens_in, const Shape& shape_in, std::mt19937_64& random)
      : dtype(kind.dtype),
        bf16_products(kind.bf16_products),
        tokens(tokens_in),
        shape(shape_in),
        keys(dtype, shape.key_dim, shape.key_split == 0 ? shape.key_dim : shape.key_split,
             testing::RandomFloats(random, tokens * shape.key_dim)),
        own_values(dtype, shape.value_dim, shape.value_dim,
                   testing::RandomFloats(random, shape.is_latent ? 0 : tokens * shape.value_dim)) {}
  Cache(const Kind& kind, size_t tokens_in, size_t head_dim, std::mt19937_64& random)
      : Cache(kind, tokens_in, Shape{head_dim, head_dim}, random) {}

  const Side& values() const { return shape.is_latent ? keys : own_values; }

  DType dtype;
  bool bf16_products;
  size_t tokens;
  Shape shape;
  Side keys, own_values;
};

// Full attention of some queries through spans. first/last are absolute positions.
std::vector<float> Attend(const Cache& cache, const std::vector<float>& q,
                          const std::vector<size_t>& first, const std::vector<size_t>& last,
                          float scale) {
  const size_t rows = first.size();
  const size_t dim = cache.shape.value_dim;
  std::vector<const float*> q_rows;
  for (size_t r = 0; r < rows; ++r) q_rows.push_back(q.data() + r * cache.shape.key_dim);
  std::vector<float> scratch(AttentionScratch(rows, cache.shape.key_dim, dim).floats,
                             std::numeric_limits<float>::quiet_NaN());
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
    const void* k[kBlocksPerSpan] = {};
    const void* v[kBlocksPerSpan] = {};
    const float* k_scales[kBlocksPerSpan] = {};
    const float* v_scales[kBlocksPerSpan] = {};
    for (size_t b = 0; b < kBlocksPerSpan; ++b) {
      const size_t block = start / kKvBlockTokens + b;
      if (block * kKvBlockTokens >= cache.tokens) break;
      k[b] = cache.keys.Block(block);
      v[b] = cache.values().Block(block);
      k_scales[b] = cache.keys.Scales(block);
      v_scales[b] = cache.values().Scales(block);
    }
    AttentionSpanArgs args;
    args.q = q_rows.data();
    args.num_rows = rows;
    args.first = from.data();
    args.last = to.data();
    args.k = k;
    args.v = v;
    args.kv_dtype = cache.dtype;
    args.key_dim = cache.shape.key_dim;
    args.value_dim = dim;
    args.value_stride = cache.values().dim;
    if (IsCode(cache.dtype)) {
      args.k_scales = k_scales;
      args.v_scales = v_scales;
      args.key_split = cache.keys.split;
    }
    args.scale = scale;
    args.bf16_products = cache.bf16_products;
    args.scratch = scratch.data();
    args.sums = span_sums.data();
    args.states = span_states.data();
    if (start == 0) LayOutQueries(args);
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

// Some rows with windows of their own, against plain loops over the numbers of the cache. The
// queries are bf16 numbers, so that products of bf16 round the weights alone: each by 2^-9 of it at
// most.
void ExpectTheReference(const Cache& cache, size_t rows, std::mt19937_64& random) {
  const Shape& shape = cache.shape;
  std::vector<float> q = testing::RandomFloats(random, rows * shape.key_dim);
  std::vector<std::byte> rounded(q.size() * sizeof(BF16));
  ConvertFromF32(q.data(), q.size(), DType::kBF16, rounded.data());
  ConvertToF32(rounded.data(), DType::kBF16, q.size(), q.data());
  float largest = 0;
  for (float value : cache.values().exact) largest = std::max(largest, std::fabs(value));
  const float bound = 2e-5f + (cache.bf16_products ? 0x1p-8f * largest : 0.0f);
  std::vector<size_t> first(rows);
  std::vector<size_t> last(rows);
  for (size_t r = 0; r < rows; ++r) {
    last[r] = 1 + random() % cache.tokens;
    first[r] = random() % 2 ? 0 : random() % last[r];
  }
  const float scale = 0.3f;
  const std::vector<float> out = Attend(cache, q, first, last, scale);
  for (size_t r = 0; r < rows; ++r) {
    std::vector<float> expected(shape.value_dim);
    AttentionReference(
        {q.data() + r * shape.key_dim, cache.keys.exact.data(), cache.values().exact.data(),
         DType::kF32, shape.key_dim, shape.value_dim, cache.values().dim, scale},
        first[r], last[r], expected.data());
    for (size_t d = 0; d < shape.value_dim; ++d) {
      ASSERT_NEAR(out[r * shape.value_dim + d], expected[d], bound)
          << DTypeName(cache.dtype) << " dims " << shape.key_dim << ", " << shape.value_dim
          << " tokens " << cache.tokens << " row " << r << " keys " << first[r] << ".." << last[r]
          << " value " << d;
    }
  }
}

TEST(Attention, MatchesTheReference) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(11);
    for (const Kind& kind : kKinds) {
      for (const Shape& shape :
           {Shape{1, 1}, Shape{8, 8}, Shape{16, 24}, Shape{24, 5}, Shape{64, 64}, Shape{80, 80},
            Shape{100, 100}, Shape{128, 128}, Shape{192, 128}, Shape{24, 257}}) {
        for (size_t tokens : {1u, 5u, 63u, 64u, 65u, 256u, 257u, 700u}) {
          ExpectTheReference(Cache(kind, tokens, shape, random), 1 + random() % 9, random);
        }
      }
    }
  });
}

// As with 128 heads over one latent row.
TEST(Attention, ManyQueriesShareABlock) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(16);
    for (const Kind& kind : kKinds) {
      for (size_t rows : {31u, 32u, 33u, 130u})
        ExpectTheReference(Cache(kind, 100, Shape{72, 64, 64, true}, random), rows, random);
    }
  });
}

TEST(Attention, BitsDoNotDependOnWhichQueriesShareACall) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(12);
    for (const Kind& kind : kKinds) {
      const size_t dim = 72;
      const size_t value_dim = 56;
      const Cache cache(kind, 660, Shape{dim, value_dim, 40}, random);
      const size_t rows = 43;
      const std::vector<float> q = testing::RandomFloats(random, rows * dim);
      std::vector<size_t> first(rows);
      std::vector<size_t> last(rows);
      for (size_t r = 0; r < rows; ++r) {
        last[r] = 600 + r;
        first[r] = r % 3 == 0 ? 0 : last[r] - 100;
      }
      const std::vector<float> together = Attend(cache, q, first, last, 0.1f);
      for (size_t r = 0; r < rows; ++r) {
        const std::vector<float> one(q.begin() + static_cast<std::ptrdiff_t>(r * dim),
                                     q.begin() + static_cast<std::ptrdiff_t>((r + 1) * dim));
        const std::vector<float> alone = Attend(cache, one, {first[r]}, {last[r]}, 0.1f);
        ASSERT_EQ(
            std::memcmp(alone.data(), together.data() + r * value_dim, value_dim * sizeof(float)),
            0)
            << NameOf(kind) << " row " << r;
      }
    }
  });
}

// Latent attention: values are the beginning of the keys, and stay with them in memory.
TEST(Attention, ValuesMayBeTheBeginningOfTheKeys) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(14);
    for (const Kind& kind : kKinds) {
      for (size_t value_dim : {1u, 16u, 20u, 39u, 40u}) {
        const Shape shape{40, value_dim, value_dim, true};
        for (size_t tokens : {1u, 150u, 300u})
          ExpectTheReference(Cache(kind, tokens, shape, random), 6, random);
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
  for (const Kind& kind : kKinds) {
    Cache cache(kind, 24, dim, random);
    for (size_t i = 0; i < 24; ++i) {
      const std::vector<float> q = testing::RandomFloats(random, dim);
      const std::vector<size_t> first = {i + 1 > window ? i + 1 - window : 0};
      const std::vector<float> before = Attend(cache, q, first, {i + 1}, 0.5f);
      for (size_t j = 0; j < 24; ++j) {
        Cache changed = cache;
        const std::vector<float> other = testing::RandomFloats(random, dim, 2.0f);
        changed.keys.Store(j, other.data());
        changed.own_values.Store(j, other.data());
        const bool differs = Attend(changed, q, first, {i + 1}, 0.5f) != before;
        EXPECT_EQ(differs, j <= i && j + window > i)
            << NameOf(kind) << " query " << i << " key " << j;
      }
    }
  }
}

// A value that is infinite or NaN reaches the queries that see it and no others. Codes show it in
// the scale, so in the whole row.
TEST(Attention, BadValuesStayWithTheQueriesThatSeeThem) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(15);
    const size_t dim = 24;
    for (const Kind& kind : kKinds) {
      SCOPED_TRACE(NameOf(kind));
      Cache cache(kind, 12, dim, random);
      std::vector<float> infinite = testing::RandomFloats(random, dim);
      std::vector<float> not_a_number = infinite;
      infinite[3] = std::numeric_limits<float>::infinity();
      not_a_number[5] = std::numeric_limits<float>::quiet_NaN();
      cache.own_values.Store(9, infinite.data());
      cache.own_values.Store(2, not_a_number.data());
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
        const bool sees_infinite = last[r] > 9;
        const bool sees_nan = first[r] != 3;
        const bool whole_row = IsCode(kind.dtype) && (sees_infinite || sees_nan);
        EXPECT_EQ(std::isfinite(out[r * dim + 3]), !sees_infinite && !whole_row) << r;
        EXPECT_EQ(std::isfinite(out[r * dim + 5]), !sees_nan && !whole_row) << r;
        EXPECT_EQ(std::isnan(out[r * dim]), whole_row) << r;
      }
    }
  });
}

// A key that is not a number makes NaN of every query that sees it, in either part of it.
TEST(Attention, BadKeysShowAsNan) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(17);
    const size_t dim = 40;
    for (const Kind& kind : kKinds) {
      for (float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        if (!IsCode(kind.dtype) && !std::isnan(bad)) continue;  // exp(-infinity) is a fair 0
        for (size_t place : {0u, 31u, 32u, 39u}) {
          Cache cache(kind, 300, Shape{dim, 32, 32, true}, random);
          std::vector<float> key = testing::RandomFloats(random, dim);
          key[place] = bad;
          cache.keys.Store(280, key.data());
          const std::vector<float> q = testing::RandomFloats(random, 3 * dim);
          const std::vector<float> out = Attend(cache, q, {0, 0, 281}, {300, 280, 300}, 0.3f);
          for (size_t d = 0; d < 32; ++d) {
            ASSERT_TRUE(std::isnan(out[d])) << NameOf(kind) << " " << bad << " at " << place;
            ASSERT_TRUE(std::isfinite(out[32 + d]) && std::isfinite(out[64 + d]));
          }
        }
      }
    }
  });
}

// The codes and scales of a row as they are defined, one element at a time.
TEST(KvCodes, FollowTheirDefinition) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(18);
    for (size_t n : {1u, 2u, 15u, 16u, 24u, 80u, 128u, 192u, 513u}) {
      for (float size : {1e-30f, 1e-3f, 1.0f, 7e4f, 1e37f}) {
        std::vector<float> row = testing::RandomFloats(random, n, size);
        row[n / 2] = 0.0f;
        row[n - 1] = -size;
        float magnitude = 0;
        for (float x : row) magnitude = std::max(magnitude, std::fabs(x));
        std::vector<std::byte> codes(n);
        const float int8_scale = EncodeKvRow(row.data(), n, DType::kI8, codes.data());
        ASSERT_EQ(int8_scale, magnitude / 127.0f);
        for (size_t i = 0; i < n; ++i) {
          const float code = ValueOfCode(DType::kI8, &codes[i]);
          ASSERT_EQ(code, std::nearbyint(row[i] * (1.0f / int8_scale))) << row[i];
          ASSERT_LE(std::fabs(code), 127.0f);
          ASSERT_LE(std::fabs(code * int8_scale - row[i]), 0.50001f * int8_scale) << row[i];
        }
        const float fp8_scale = EncodeKvRow(row.data(), n, DType::kF8E4M3, codes.data());
        ASSERT_EQ(fp8_scale, magnitude / 448.0f);
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(static_cast<uint8_t>(codes[i]), EncodeE4M3(row[i] / fp8_scale)) << row[i];
          const float found = ValueOfCode(DType::kF8E4M3, &codes[i]) * fp8_scale;
          const float bound = std::max(std::fabs(row[i]) / 16, fp8_scale * 0x1p-10f);
          ASSERT_LE(std::fabs(found - row[i]), 1.00001f * bound) << row[i];
        }
      }
    }
  });
}

TEST(KvCodes, ZerosAndTinyRowsHaveAFiniteScale) {
  testing::ForEachTarget([] {
    for (DType dtype : {DType::kI8, DType::kF8E4M3}) {
      for (float value : {0.0f, 1e-45f, 1e-38f, 1e-37f}) {
        const std::vector<float> row = {value, -value, 0.0f};
        std::byte codes[3];
        const float scale = EncodeKvRow(row.data(), 3, dtype, codes);
        ASSERT_GE(scale, std::numeric_limits<float>::min());
        ASSERT_LT(scale, 1e-37f);
        for (size_t i = 0; i < 3; ++i)
          EXPECT_NEAR(ValueOfCode(dtype, codes + i) * scale, row[i], 0.5 * scale) << row[i];
      }
    }
  });
}

TEST(KvCodes, WhatIsNotANumberShowsInTheScale) {
  testing::ForEachTarget([] {
    for (DType dtype : {DType::kI8, DType::kF8E4M3}) {
      for (float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        std::vector<float> row(21, 1.0f);
        row[20] = bad;
        std::vector<std::byte> codes(21);
        EXPECT_TRUE(std::isnan(EncodeKvRow(row.data(), 21, dtype, codes.data()))) << bad;
      }
    }
  });
}

// f32 and f16 numbers are no bf16 numbers: their products stay exact.
TEST(Attention, OnlyWhatBf16HoldsIsMultipliedAsSuch) {
  auto random = testing::MakeRandom(19);
  for (DType dtype : {DType::kF32, DType::kF16}) {
    Cache cache({dtype}, 90, 40, random);
    const std::vector<float> q = testing::RandomFloats(random, 40);
    const std::vector<float> exact = Attend(cache, q, {0}, {90}, 0.3f);
    cache.bf16_products = true;
    EXPECT_EQ(Attend(cache, q, {0}, {90}, 0.3f), exact);
  }
}

TEST(Attention, ARowWithoutKeysIsEmptyAndHarmless) {
  auto random = testing::MakeRandom(14);
  const Cache cache({DType::kF32}, 10, 8, random);
  const std::vector<float> q = testing::RandomFloats(random, 16);
  const std::vector<float> both = Attend(cache, q, {0, 5}, {10, 5}, 1.0f);
  const std::vector<float> alone = Attend(cache, {q.begin(), q.begin() + 8}, {0}, {10}, 1.0f);
  EXPECT_EQ(std::memcmp(both.data(), alone.data(), 8 * sizeof(float)), 0);
}

}  // namespace
}  // namespace switchyard::kernels
