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

TEST(KvCache, RefusesTypesAndSizesItCannotHold) {
  testing::ExpectError(ErrorCode::kUnsupported, {"I8", "bf16"},
                       [] { KvCache(SmallConfig({0}), DType::kI8, 64); });
  testing::ExpectError(ErrorCode::kResourceExhausted, {"tokens"},
                       [] { KvCache(SmallConfig({0}), DType::kF32, size_t{1} << 60); });
}

}  // namespace
}  // namespace switchyard
