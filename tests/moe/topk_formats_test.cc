// Contract 1.3: packed, ragged and bypassed routing.
#include "switchyard/moe/routing/topk_formats.h"

#include <gtest/gtest.h>

#include "moe/routing_case.h"
#include "switchyard/core/dtype.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

class TopKFormats : public ::testing::Test {
 protected:
  ThreadPool pool_{1};
  Arena arena_;
  ExecContext context_{pool_, arena_};
};

TEST_F(TopKFormats, PackedWordsComeBack) {
  const std::vector<int32_t> ids = {0, -1, 32767, 5};
  const std::vector<float> weights = {1.0f, 0.0f, 0.3f, -2.5f};
  const PackedTopK packed = PackTopK(context_, {2, 2, weights, ids, {}});
  EXPECT_EQ(packed.words[0], 0x3f80);
  EXPECT_EQ(packed.words[3], (5 << 16) | 0xc020);
  const TopKOutput back = UnpackTopK(context_, packed);
  EXPECT_EQ(back.num_tokens, 2u);
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(back.ids[i], ids[i]);
    EXPECT_EQ(back.weights[i], ToFloat(ToBF16(weights[i])));
  }
  for (int32_t bad : {32768, -2}) {
    const std::vector<int32_t> out = {0, bad};
    ExpectError(ErrorCode::kInvalidArgument, {"packed", "token 0 column 1", "-1 to 32767"}, [&] {
      PackTopK(context_, {1, 2, std::span(weights).first(2), out, {}});
    });
  }
  EXPECT_TRUE(PackTopK(context_, {}).words.empty());
}

TEST_F(TopKFormats, ARouterPacksWhereItIsAskedTo) {
  TopKConfig config = RouterConfig(4, 2);
  const std::vector<float> logits = {1, 2, 3, 4};
  const ConstRows rows(logits.data(), 1, 4);
  EXPECT_TRUE(SelectExperts(context_, config, rows, size_t{1}).packed_topk_ids.empty());
  config.fused_gate_packed_ids = true;
  const TopKOutput topk = SelectExperts(context_, config, rows, size_t{1});
  ASSERT_EQ(topk.packed_topk_ids.size(), 2u);
  EXPECT_EQ(topk.packed_topk_ids[0] >> 16, 3);
}

TEST_F(TopKFormats, RaggedSortsLiveSlotsByExpert) {
  auto random = testing::MakeRandom(41);
  for (size_t tokens : {0u, 1u, 7u, 30u}) {
    constexpr size_t kTopK = 3, kExperts = 5;
    std::vector<int32_t> ids(tokens * kTopK);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (kExperts + 1)) - 1;
    const std::vector<float> weights = testing::RandomFloats(random, ids.size());
    const RaggedTopK ragged =
        BuildRaggedTopK(context_, {tokens, kTopK, weights, ids, {}}, kExperts);
    size_t live = 0;
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      if (ids[slot] < 0) {
        EXPECT_EQ(ragged.scatter[slot], -1);
        continue;
      }
      ++live;
      const auto row = static_cast<size_t>(ragged.scatter[slot]);
      EXPECT_EQ(ragged.gather[row], static_cast<int32_t>(slot)) << "scatter undoes gather";
      EXPECT_EQ(ragged.gate_scale[row], weights[slot]);
    }
    ASSERT_EQ(ragged.gather.size(), live);
    EXPECT_EQ(ragged.offsets[0], 0);
    for (size_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(ragged.offsets[e + 1] - ragged.offsets[e], ragged.counts[e]);
      for (int32_t row = ragged.offsets[e]; row < ragged.offsets[e + 1]; ++row) {
        const auto at = static_cast<size_t>(row);
        EXPECT_EQ(ids[static_cast<size_t>(ragged.gather[at])], static_cast<int32_t>(e));
        if (row > ragged.offsets[e]) {
          EXPECT_LT(ragged.gather[at - 1], ragged.gather[at]);
        }
      }
    }
  }
  const std::vector<int32_t> ids = {5};
  const std::vector<float> weights = {1};
  ExpectError(ErrorCode::kInvalidArgument, {"ragged", "-1 to 4", "5"}, [&] {
    BuildRaggedTopK(context_, {1, 1, weights, ids, {}}, 5);
  });
}

TEST_F(TopKFormats, BypassedRoutesLaterAndRefusesLogitsUnderAPlacement) {
  const TopKConfig config = RouterConfig(4, 2);
  const std::vector<float> logits = {1, 2, 3, 4, 4, 3, 2, 1};
  BypassedTopK bypassed{{}, ConstRows(logits.data(), 2, 4), &config, {}};
  EXPECT_EQ(LogitsForKernel(bypassed).data, logits.data());
  const std::vector<int32_t> map = {4, 1, 2, 3};
  ExpertPlacement placement;
  bypassed.inputs.placement = &placement;
  EXPECT_EQ(LogitsForKernel(bypassed).rows, 2u) << "algorithm none is no placement";
  placement.algorithm = DispatchAlgorithm::kStatic;
  placement.num_physical = 5;
  placement.rank_map = map;
  ExpectError(ErrorCode::kFailedPrecondition, {"bypassed", "static", "ToStandard"},
              [&] { LogitsForKernel(bypassed); });
  const TopKOutput topk = ToStandard(context_, bypassed);
  EXPECT_EQ(topk.Ids(0)[0], 3);
  EXPECT_EQ(topk.Ids(1)[0], 4);
}

}  // namespace
}  // namespace switchyard::moe
