// Blocks are conserved under any order of extending and freeing, windows stop growing, and a full
// cache is refused without harm.
#include "switchyard/engine/kv_cache.h"

#include <gtest/gtest.h>

#include <set>

#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard {
namespace {

ModelConfig SmallConfig(std::vector<size_t> windows) {
  ModelConfig config;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 8;
  for (size_t window : windows) config.layers.push_back({true, window});
  return config;
}

TEST(KvGroups, LayersOfOneWindowShareATable) {
  const std::vector<KvGroup> groups = PlanKvGroups(SmallConfig({0, 8, 0, 16, 8}));
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].layers, (std::vector<size_t>{0, 2}));
  EXPECT_EQ(groups[1].window, 8u);
  EXPECT_EQ(groups[1].layers, (std::vector<size_t>{1, 4}));
}

TEST(KvCache, BlocksAreConserved) {
  auto random = testing::MakeRandom(61);
  KvCache cache(SmallConfig({0, 100}), DType::kBF16, 64 * 40);
  struct Live {
    KvSequence blocks;
    size_t length = 0;
  };
  std::vector<Live> live;
  for (int step = 0; step < 3000; ++step) {
    const uint64_t action = random() % 10;
    if (action < 3 || live.empty()) {
      live.push_back({cache.NewSequence(), 0});
    } else if (action < 8) {
      Live& one = live[random() % live.size()];
      const size_t count = 1 + random() % 200;
      const size_t used = cache.used_blocks();
      try {
        cache.Extend(one.blocks, one.length, count);
        one.length += count;
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::kResourceExhausted);
        EXPECT_EQ(cache.used_blocks(), used) << "a refusal changes nothing";
      }
    } else {
      const size_t victim = random() % live.size();
      cache.Free(live[victim].blocks);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    // No block belongs to two sequences, and all that are held are counted.
    size_t held = 0;
    for (size_t group = 0; group < 2; ++group) {
      std::set<uint32_t> seen;
      for (const Live& one : live) {
        for (uint32_t block : one.blocks.tables()[group].blocks) {
          ASSERT_TRUE(seen.insert(block).second);
          ASSERT_LT(block, 40u);
          ++held;
        }
      }
    }
    ASSERT_EQ(held, cache.used_blocks());
  }
  for (Live& one : live) cache.Free(one.blocks);
  EXPECT_EQ(cache.used_blocks(), 0u);
  EXPECT_EQ(cache.free_tokens(), 64u * 40);
}

TEST(KvCache, EveryVisibleTokenHasABlock) {
  KvCache cache(SmallConfig({0, 70}), DType::kF32, 4096);
  KvSequence sequence = cache.NewSequence();
  for (size_t position = 0; position < 1000; ++position) {
    cache.Extend(sequence, position, 1);
    for (size_t group = 0; group < 2; ++group) {
      const size_t window = group == 0 ? SIZE_MAX : 70;
      const size_t first_key = position + 1 > window ? position + 1 - window : 0;
      const BlockTable& table = sequence.tables()[group];
      ASSERT_LE(table.first_block, first_key / kKvBlockSize);
      ASSERT_GT(table.first_block + table.blocks.size(), position / kKvBlockSize);
    }
    ASSERT_LE(sequence.tables()[1].blocks.size(), 3u) << "a window layer's memory stops growing";
  }
}

TEST(KvCache, AFullCacheNamesWhatIsFree) {
  KvCache cache(SmallConfig({0}), DType::kF32, 128);
  KvSequence a = cache.NewSequence();
  cache.Extend(a, 0, 65);
  KvSequence b = cache.NewSequence();
  testing::ExpectError(ErrorCode::kResourceExhausted, {"1 more tokens", "0 tokens are free of 128"},
                       [&] { cache.Extend(b, 0, 1); });
  cache.Free(a);
  EXPECT_NO_THROW(cache.Extend(b, 0, 128));
}

// Two heads of 8 keys and 8 values in each of two layers; codes have two scales a head.
TEST(KvCache, BytesOfATokenAreExact) {
  const ModelConfig config = SmallConfig({0, 16});
  EXPECT_EQ(KvCache(config, DType::kF32, 64).bytes_per_token(), 2 * 2 * 16 * 4u);
  for (DType dtype : {DType::kF16, DType::kBF16})
    EXPECT_EQ(KvCache(config, dtype, 64).bytes_per_token(), 2 * 2 * 16 * 2u);
  for (DType dtype : {DType::kF8E4M3, DType::kI8})
    EXPECT_EQ(KvCache(config, dtype, 64).bytes_per_token(), 2 * 2 * (16 + 2 * 4u));
}

// A latent row of 24 + 8 has a scale for each of its parts.
TEST(KvCache, BytesOfALatentRowAreExact) {
  ModelConfig config = SmallConfig({0, 0, 0});
  config.latent.emplace();
  config.latent->kv_rank = 24;
  config.rope.rotary_dim = 8;
  EXPECT_EQ(KvCache(config, DType::kF32, 64).bytes_per_token(), 3 * 32 * 4u);
  EXPECT_EQ(KvCache(config, DType::kBF16, 64).bytes_per_token(), 3 * 32 * 2u);
  for (DType dtype : {DType::kF8E4M3, DType::kI8})
    EXPECT_EQ(KvCache(config, dtype, 64).bytes_per_token(), 3 * (32 + 2 * 4u));
}

// The parts of a block follow one another without a gap or an overlap, scales at multiples of 4.
TEST(KvBlockLayout, PartsFillTheBlock) {
  ModelConfig latent = SmallConfig({0});
  latent.latent.emplace();
  latent.latent->kv_rank = 19;
  latent.rope.rotary_dim = 4;
  ModelConfig odd = SmallConfig({0});
  odd.num_heads = odd.num_kv_heads = 3;
  odd.head_dim = 5;
  for (const ModelConfig& config : {odd, latent}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI8, DType::kF8E4M3}) {
      const KvBlockLayout layout(config, dtype);
      const KvShape shape = config.kv_shape();
      const bool own_values = shape.value_dim != 0;
      size_t at = 0;
      for (size_t h = 0; h < shape.heads; ++h) {
        EXPECT_EQ(layout.Keys(h), at);
        at += 64 * shape.key_dim * DTypeBytes(dtype);
      }
      for (size_t h = 0; own_values && h < shape.heads; ++h) {
        EXPECT_EQ(layout.Values(h), at);
        at += 64 * shape.value_dim * DTypeBytes(dtype);
      }
      if (IsKvCode(dtype)) {
        EXPECT_EQ(at % sizeof(float), 0u);
        for (size_t h = 0; h < shape.heads; ++h) {
          EXPECT_EQ(layout.KeyScales(h), at);
          at += 64 * sizeof(float) * (own_values ? 1 : 2);
        }
        for (size_t h = 0; own_values && h < shape.heads; ++h) {
          EXPECT_EQ(layout.ValueScales(h), at);
          at += 64 * sizeof(float);
        }
      }
      EXPECT_EQ(layout.bytes(), at);
      if (own_values) continue;
      EXPECT_EQ(layout.Values(0), layout.Keys(0));
      EXPECT_EQ(layout.ValueScales(0), layout.KeyScales(0));
    }
  }
}

TEST(KvCache, RefusesTypesAndSizesItCannotHold) {
  testing::ExpectError(ErrorCode::kUnsupported, {"F8_E5M2", "f32, bf16, f16, fp8 or int8"},
                       [] { KvCache(SmallConfig({0}), DType::kF8E5M2, 64); });
  testing::ExpectError(ErrorCode::kResourceExhausted, {"tokens"},
                       [] { KvCache(SmallConfig({0}), DType::kF32, size_t{1} << 60); });
}

}  // namespace
}  // namespace switchyard
