// Ascend components "init routing" and "finalize routing" against sorts and sums that share no code
// with them; the traps of contract 4.1.1, 4.1.5.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "switchyard/moe/ascend/finalize_routing.h"
#include "switchyard/moe/ascend/init_routing.h"
#include "testing/errors.h"
#include "testing/quant_formats.h"
#include "testing/random.h"

namespace switchyard::moe::ascend {
namespace {

using testing::ExpectError;

constexpr size_t kLayer = 7;

// Tokens, each with K distinct experts; some slots empty.
struct Routing {
  size_t tokens, top_k, experts, width;
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  Routing(size_t t, size_t k, size_t e, size_t h, bool with_empty, std::mt19937_64& random)
      : tokens(t), top_k(k), experts(e), width(h), x(testing::RandomFloats(random, t * h)) {
    for (size_t token = 0; token < t; ++token) {
      std::vector<int32_t> order(e);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (size_t slot = 0; slot < k; ++slot) {
        ids.push_back(with_empty && random() % 4 == 0 ? -1 : order[slot]);
        weights.push_back(static_cast<float>(random() % 1000) / 500.0f);
      }
    }
  }

  InitRoutingArgs Args() const {
    InitRoutingArgs args;
    args.x = ConstRows(x.data(), tokens, width);
    args.expert_ids = ids;
    args.top_k = top_k;
    args.expert_num = experts;
    return args;
  }
  // Routes with an expert in [begin, end), stably sorted by it.
  std::vector<size_t> Sorted(int32_t begin, int32_t end) const {
    std::vector<size_t> routes;
    for (size_t f = 0; f < ids.size(); ++f) {
      if (ids[f] >= begin && ids[f] < end) routes.push_back(f);
    }
    std::stable_sort(routes.begin(), routes.end(),
                     [&](size_t a, size_t b) { return ids[a] < ids[b]; });
    return routes;
  }
  std::vector<int64_t> Counts() const {
    std::vector<int64_t> counts(experts, 0);
    for (int32_t id : ids) {
      if (id >= 0) ++counts[static_cast<size_t>(id)];
    }
    return counts;
  }
};

class AscendRouting : public ::testing::Test {
 protected:
  AscendRouting() : random_(testing::MakeRandom(61)), pool_(2), context_{pool_, arena_} {}
  std::mt19937_64 random_;
  ThreadPool pool_;
  Arena arena_;
  ExecContext context_;
};

template <typename T>
std::vector<T> ToVector(std::span<const T> values) {
  return {values.begin(), values.end()};
}

std::vector<float> RowOf(const QuantRows& x, size_t i) {
  const float* row = x.F32().Row(i);
  return {row, row + x.cols};
}

TEST_F(AscendRouting, V2IsAStableSortWithGatherIndices) {
  for (const auto& [t, k, e, h] : {std::array<size_t, 4>{9, 3, 5, 7},
                                   {1, 1, 1, 1},
                                   {0, 2, 4, 3},
                                   {40, 2, 3, 16},
                                   {5, 4, 60, 33}}) {
    for (bool with_empty : {false, true}) {
      const Routing routing(t, k, e, h, with_empty, random_);
      const InitRoutingResult result = InitRoutingV2(kLayer).Run(context_, routing.Args());
      const std::vector<size_t> sorted = routing.Sorted(0, static_cast<int32_t>(e));
      ASSERT_EQ(result.expanded_x.rows, sorted.size());
      std::vector<int32_t> row_of(t * k, -1);
      for (size_t i = 0; i < sorted.size(); ++i) {
        row_of[sorted[i]] = static_cast<int32_t>(i);
        const float* x = routing.x.data() + sorted[i] / k * h;
        EXPECT_EQ(RowOf(result.expanded_x, i), std::vector<float>(x, x + h));
        EXPECT_EQ(result.sorted_experts[i], routing.ids[sorted[i]]);
      }
      EXPECT_EQ(ToVector(result.expanded_row_idx), row_of);
      EXPECT_EQ(ToVector(result.expert_tokens), routing.Counts());
    }
  }
}

TEST_F(AscendRouting, ExpertTokensOfEachType) {
  const Routing routing(12, 2, 5, 4, true, random_);
  const std::vector<int64_t> counts = routing.Counts();
  InitRoutingArgs args = routing.Args();
  args.expert_tokens_type = ExpertTokensType::kCumulative;
  const InitRoutingResult cumulative = InitRoutingV2(kLayer).Run(context_, args);
  args.expert_tokens_type = ExpertTokensType::kPairs;
  const InitRoutingResult pairs = InitRoutingV2(kLayer).Run(context_, args);
  int64_t sum = 0;
  for (size_t e = 0; e < 5; ++e) {
    sum += counts[e];
    EXPECT_EQ(cumulative.expert_tokens[e], sum);
    EXPECT_EQ(pairs.expert_tokens[2 * e], static_cast<int64_t>(e));
    EXPECT_EQ(pairs.expert_tokens[2 * e + 1], counts[e]);
  }
  EXPECT_EQ(cumulative.groups().type, GroupListType::kCumulative);
  ExpectError(ErrorCode::kInvalidArgument, {"pairs"}, [&] { pairs.groups(); });
}

TEST_F(AscendRouting, ExpertsOutsideTheActiveRangeAreNotExpanded) {
  const Routing routing(10, 3, 6, 4, true, random_);
  InitRoutingArgs args = routing.Args();
  args.expert_begin = 2;
  args.expert_end = 5;
  const InitRoutingResult result = InitRoutingV2(kLayer).Run(context_, args);
  const std::vector<size_t> sorted = routing.Sorted(2, 5);
  ASSERT_EQ(result.expanded_x.rows, sorted.size());
  ASSERT_EQ(result.expert_tokens.size(), 3u);
  for (size_t e = 0; e < 3; ++e) EXPECT_EQ(result.expert_tokens[e], routing.Counts()[e + 2]);
  for (size_t f = 0; f < routing.ids.size(); ++f) {
    const bool active = routing.ids[f] >= 2 && routing.ids[f] < 5;
    EXPECT_EQ(result.expanded_row_idx[f] >= 0, active) << f;
  }
}

// The legacy routing: the same rows, indexed k * T + t, counts cumulative.
TEST_F(AscendRouting, V1IsColumnMajorAndCumulative) {
  for (bool with_empty : {false, true}) {
    const Routing routing(11, 3, 4, 5, with_empty, random_);
    InitRoutingArgs args = routing.Args();
    args.row_idx = ColumnMajorRowIndex(context_, 11, 3);
    args.active_num = 11;
    EXPECT_EQ(args.row_idx[3], 1) << "token 1, column 0";
    EXPECT_EQ(args.row_idx[1], 11) << "token 0, column 1";
    const InitRoutingResult v1 = InitRoutingV1(kLayer).Run(context_, args);
    const InitRoutingResult v2 = InitRoutingV2(kLayer).Run(context_, routing.Args());
    ASSERT_EQ(v1.expanded_x.rows, v2.expanded_x.rows);
    for (size_t i = 0; i < v1.expanded_x.rows; ++i)
      EXPECT_EQ(RowOf(v1.expanded_x, i), RowOf(v2.expanded_x, i));
    for (size_t t = 0; t < 11; ++t) {
      for (size_t k = 0; k < 3; ++k)
        EXPECT_EQ(v1.expanded_row_idx[k * 11 + t], v2.expanded_row_idx[t * 3 + k]);
    }
    EXPECT_EQ(v1.groups().type, GroupListType::kCumulative);
    int64_t sum = 0;
    for (size_t e = 0; e < 4; ++e) EXPECT_EQ(v1.expert_tokens[e], sum += routing.Counts()[e]);
  }
}

TEST_F(AscendRouting, DynamicInt8) {
  const Routing routing(7, 2, 4, 21, true, random_);
  InitRoutingArgs args = routing.Args();
  args.quant_mode = InitQuantMode::kDynamic;
  const QuantRows rows = InitRoutingV2Quant(kLayer).Run(context_, args).expanded_x;
  const std::vector<size_t> sorted = routing.Sorted(0, 4);
  ASSERT_EQ(rows.rows, sorted.size());
  ASSERT_EQ(rows.kind, ActQuantKind::kInt8Token);
  for (size_t i = 0; i < rows.rows; ++i) {
    const float* x = routing.x.data() + sorted[i] / 2 * 21;
    double amax = 0;
    for (size_t h = 0; h < 21; ++h) amax = std::max(amax, std::fabs(double{x[h]}));
    const float scale = *reinterpret_cast<const float*>(rows.scale + i * 4);
    EXPECT_NEAR(scale, amax / 127, 1e-7 * amax);
    for (size_t h = 0; h < 21; ++h) {
      const auto code = static_cast<double>(static_cast<int8_t>(rows.Row(i)[h]));
      EXPECT_NEAR(code, x[h] / amax * 127, 0.5001);
    }
  }
}

TEST_F(AscendRouting, SmoothScaleMultipliesByExpertBeforeTheMaximum) {
  const Routing routing(6, 2, 3, 8, false, random_);
  std::vector<float> smooth(3 * 8);
  for (float& value : smooth) value = static_cast<float>(1 + random_() % 4);
  InitRoutingArgs args = routing.Args();
  args.quant_mode = InitQuantMode::kDynamic;
  args.smooth_scale = ConstRows(smooth.data(), 3, 8);
  const QuantRows rows = InitRoutingV2Quant(kLayer).Run(context_, args).expanded_x;
  const std::vector<size_t> sorted = routing.Sorted(0, 3);
  for (size_t i = 0; i < rows.rows; ++i) {
    const auto expert = static_cast<size_t>(routing.ids[sorted[i]]);
    double amax = 0;
    std::vector<double> expected(8);
    for (size_t h = 0; h < 8; ++h) {
      expected[h] = double{routing.x[sorted[i] / 2 * 8 + h]} * double{smooth[expert * 8 + h]};
      amax = std::max(amax, std::fabs(expected[h]));
    }
    for (size_t h = 0; h < 8; ++h)
      EXPECT_NEAR(testing::RowElement(rows, i, h), expected[h], amax / 127 * 0.501);
  }
  args.smooth_scale = ConstRows(smooth.data(), 2, 8);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 7", "smooth scale is [2, 8]", "[3, 8]"},
              [&] { InitRoutingV2Quant(kLayer).Run(context_, args); });
  args.smooth_scale = ConstRows(smooth.data(), 3, 8);
  args.quant_mode = InitQuantMode::kMxFp8;
  ExpectError(ErrorCode::kInvalidArgument, {"smooth scale", "quant_mode 1", "found 3"},
              [&] { InitRoutingV2Quant(kLayer).Run(context_, args); });
}

TEST_F(AscendRouting, StaticInt8RoundsAndClips) {
  Routing routing(2, 1, 2, 4, false, random_);
  routing.x = {0.5f, 1.5f, -2.5f, 1000.0f, -1000.0f, 0.0f, 2.49f, 3.51f};
  routing.ids = {0, 1};
  InitRoutingArgs args = routing.Args();
  args.quant_mode = InitQuantMode::kStatic;
  ExpectError(ErrorCode::kInvalidArgument, {"static", "scale"},
              [&] { InitRoutingV2Quant(kLayer).Run(context_, args); });
  args.scale = 1.0f;
  args.offset = 3.0f;
  const QuantRows rows = InitRoutingV2Quant(kLayer).Run(context_, args).expanded_x;
  const std::vector<int> expected = {4, 4, 0, 127, -128, 3, 5, 7};  // ties to even: 3.5, 4.5, 0.5
  for (size_t i = 0; i < 8; ++i)
    EXPECT_EQ(static_cast<int>(static_cast<int8_t>(rows.Row(i / 4)[i % 4])), expected[i]) << i;
  EXPECT_EQ(testing::RowElement(rows, 1, 1), 0.0) << "(3 - 3) * 1";
}

TEST_F(AscendRouting, MxFp8WithPairedScales) {
  const Routing routing(5, 2, 3, 128, true, random_);
  InitRoutingArgs args = routing.Args();
  args.quant_mode = InitQuantMode::kMxFp8;
  const QuantRows rows = InitRoutingV2Quant(kLayer).Run(context_, args).expanded_x;
  const std::vector<size_t> sorted = routing.Sorted(0, 3);
  const TensorView pairs = PairSplitScales(rows);
  EXPECT_EQ(pairs.shape, (Shape{rows.rows, 2, 2}));
  for (size_t i = 0; i < rows.rows; ++i) {
    const float* x = routing.x.data() + sorted[i] / 2 * 128;
    for (size_t block = 0; block < 4; ++block) {
      float amax = 0;
      for (size_t h = 0; h < 32; ++h) amax = std::max(amax, std::fabs(x[block * 32 + h]));
      const int exponent = static_cast<int>(std::floor(std::log2(amax))) - 8;
      // [M, H / 64, 2]: block 2j + s is element (i, j, s).
      const auto code = static_cast<int>(pairs.data[(i * 2 + block / 2) * 2 + block % 2]);
      EXPECT_EQ(code, exponent + 127);
    }
  }
  const Routing ragged(5, 2, 3, 96, false, random_);
  InitRoutingArgs ragged_args = ragged.Args();
  ragged_args.quant_mode = InitQuantMode::kMxFp8;
  const QuantRows odd = InitRoutingV2Quant(kLayer).Run(context_, ragged_args).expanded_x;
  ExpectError(ErrorCode::kInvalidArgument, {"multiple of 64", "96"}, [&] { PairSplitScales(odd); });
}

TEST_F(AscendRouting, BadOperandsAreRefusedByName) {
  Routing routing(3, 2, 4, 5, false, random_);
  const auto run = [&](const auto& change, const BaseInitRouting& component) {
    InitRoutingArgs args = routing.Args();
    change(args);
    component.Run(context_, args);
  };
  const InitRoutingV1 v1(kLayer);
  const InitRoutingV2 v2(kLayer);
  const InitRoutingV2Quant quant(kLayer);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 7", "row_idx"},
              [&] { run([](InitRoutingArgs&) {}, v1); });
  ExpectError(ErrorCode::kInvalidArgument, {"InitRoutingV2Quant"}, [&] {
    run([](InitRoutingArgs& args) { args.quant_mode = InitQuantMode::kDynamic; }, v2);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"quant_mode 2"}, [&] {
    run([](InitRoutingArgs& args) { args.quant_mode = InitQuantMode::kMxFp8E5M2; }, quant);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"need 9 ids", "found 6"},
              [&] { run([](InitRoutingArgs& args) { args.top_k = 3; }, v2); });
  ExpectError(ErrorCode::kInvalidArgument, {"active_num is 4", "6"},
              [&] { run([](InitRoutingArgs& args) { args.active_num = 4; }, v2); });
  ExpectError(ErrorCode::kInvalidArgument, {"active range [3, 9)", "4 experts"}, [&] {
    run(
        [](InitRoutingArgs& args) {
          args.expert_begin = 3;
          args.expert_end = 9;
        },
        v2);
  });
  for (int32_t id : {4, -2, 1000000}) {
    routing.ids[3] = id;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 7", "token 1", std::to_string(id), "-1 to 3"},
                [&] { run([](InitRoutingArgs&) {}, v2); });
  }
  routing.ids[3] = 0;
  const std::vector<int32_t> twice = {0, 3, 1, 4, 2, 2};
  ExpectError(ErrorCode::kInvalidArgument, {"row_idx holds 2"},
              [&] { run([&](InitRoutingArgs& args) { args.row_idx = twice; }, v1); });
  const std::vector<int32_t> unsorted = {0, 2, 1};
  ExpectError(ErrorCode::kInvalidArgument, {"expert 1 of row 2"},
              [&] { ComputeExpertTokens(context_, unsorted, 4, kLayer); });
}

// y of an expanded row, distinct for every row and column.
class AscendFinalize : public AscendRouting {
 protected:
  std::vector<double> Expected(const Routing& routing, const std::vector<float>& y, size_t width,
                               const std::vector<float>& bias, size_t t) const {
    std::vector<double> out(width, 0.0);
    const std::vector<size_t> sorted = routing.Sorted(0, static_cast<int32_t>(routing.experts));
    for (size_t i = 0; i < sorted.size(); ++i) {
      if (sorted[i] / routing.top_k != t) continue;
      for (size_t h = 0; h < width; ++h) {
        double value = y[i * width + h];
        if (!bias.empty()) value += bias[static_cast<size_t>(routing.ids[sorted[i]]) * width + h];
        out[h] += double{routing.weights[sorted[i]]} * value;
      }
    }
    return out;
  }
};

TEST_F(AscendFinalize, EveryModeUndoesItsRouting) {
  constexpr size_t kWidth = 6;
  for (bool with_empty : {false, true}) {
    const Routing routing(13, 3, 5, 4, with_empty, random_);
    InitRoutingArgs args = routing.Args();
    const InitRoutingResult v2 = InitRoutingV2(kLayer).Run(context_, args);
    args.row_idx = ColumnMajorRowIndex(context_, 13, 3);
    const InitRoutingResult v1 = InitRoutingV1(kLayer).Run(context_, args);
    const std::vector<float> y = testing::RandomFloats(random_, v2.expanded_x.rows * kWidth);
    const std::vector<float> bias = testing::RandomFloats(random_, 5 * kWidth);
    const std::vector<float> skip1 = testing::RandomFloats(random_, 13 * kWidth);
    const std::vector<float> skip2 = testing::RandomFloats(random_, 13 * kWidth);
    FinalizeRoutingArgs finalize;
    finalize.expanded_rows = ConstRows(y.data(), v2.expanded_x.rows, kWidth);
    finalize.num_tokens = 13;
    finalize.top_k = 3;
    finalize.scales = routing.weights;
    for (bool with_more : {false, true}) {
      if (with_more) {
        finalize.bias = ConstRows(bias.data(), 5, kWidth);
        finalize.expert_ids = routing.ids;
        finalize.skip1 = ConstRows(skip1.data(), 13, kWidth);
        finalize.skip2 = ConstRows(skip2.data(), 13, kWidth);
      }
      for (DropPadMode mode : {DropPadMode::kColumnMajor, DropPadMode::kColumnMajorDrop,
                               DropPadMode::kRowMajor, DropPadMode::kRowMajorDrop}) {
        const bool row_major = mode == DropPadMode::kRowMajor || mode == DropPadMode::kRowMajorDrop;
        finalize.mode = mode;
        finalize.expanded_row_idx = row_major ? v2.expanded_row_idx : v1.expanded_row_idx;
        const Rows out = FinalizeRouting(kLayer).Run(context_, finalize);
        ASSERT_EQ(out.rows, 13u);
        for (size_t t = 0; t < 13; ++t) {
          std::vector<double> expected =
              Expected(routing, y, kWidth, with_more ? bias : std::vector<float>(), t);
          for (size_t h = 0; h < kWidth; ++h) {
            if (with_more) expected[h] += skip1[t * kWidth + h] + skip2[t * kWidth + h];
            EXPECT_NEAR(out.Row(t)[h], expected[h], 1e-5) << "mode " << static_cast<int>(mode);
          }
        }
      }
    }
  }
}

// Trap of contract 4.1.5: the wrong pair gives a permuted, plausible result.
TEST_F(AscendFinalize, ModeAndRoutingMustAgree) {
  const Routing routing(5, 2, 4, 3, false, random_);
  const InitRoutingResult v2 = InitRoutingV2(kLayer).Run(context_, routing.Args());
  FinalizeRoutingArgs args;
  args.expanded_rows = v2.expanded_x.F32();
  args.expanded_row_idx = v2.expanded_row_idx;
  args.num_tokens = 5;
  args.top_k = 2;
  args.scales = routing.weights;
  const Rows right = FinalizeRouting(kLayer).Run(context_, args);
  args.mode = DropPadMode::kColumnMajor;
  const Rows wrong = FinalizeRouting(kLayer).Run(context_, args);
  double difference = 0;
  for (size_t t = 0; t < 5; ++t) {
    for (size_t h = 0; h < 3; ++h) {
      const double sum = routing.weights[2 * t] + routing.weights[2 * t + 1];
      EXPECT_NEAR(right.Row(t)[h], sum * routing.x[t * 3 + h], 1e-5);
      difference += std::fabs(right.Row(t)[h] - wrong.Row(t)[h]);
    }
  }
  EXPECT_GT(difference, 0.1);
}

TEST_F(AscendFinalize, TokenUnpermuteIsTheSameSumAndDropsNegativeRows) {
  const Routing routing(9, 3, 4, 5, true, random_);
  const InitRoutingResult v2 = InitRoutingV2(kLayer).Run(context_, routing.Args());
  FinalizeRoutingArgs args;
  args.expanded_rows = v2.expanded_x.F32();
  args.expanded_row_idx = v2.expanded_row_idx;
  args.num_tokens = 9;
  args.top_k = 3;
  args.scales = routing.weights;  // not 0 where the slot is empty
  const Rows one = FinalizeRouting(kLayer).Run(context_, args);
  const Rows other = TokenUnpermute(kLayer).Run(context_, args);
  for (size_t t = 0; t < 9; ++t) {
    for (size_t h = 0; h < 5; ++h) EXPECT_EQ(one.Row(t)[h], other.Row(t)[h]);
  }
  args.mode = DropPadMode::kColumnMajor;
  ExpectError(ErrorCode::kUnsupported, {"TokenUnpermute", "column-major"},
              [&] { TokenUnpermute(kLayer).Run(context_, args); });
}

// Two ranks that each hold half of the columns.
TEST_F(AscendFinalize, AllGatherPutsColumnsSideBySide) {
  const Routing routing(4, 2, 3, 8, false, random_);
  const InitRoutingResult v2 = InitRoutingV2(kLayer).Run(context_, routing.Args());
  FinalizeRoutingArgs args;
  args.expanded_row_idx = v2.expanded_row_idx;
  args.num_tokens = 4;
  args.top_k = 2;
  args.scales = routing.weights;
  const ConstRows all = v2.expanded_x.F32();
  const ConstRows left(all.data, all.rows, 4, all.stride);
  const ConstRows right(all.data + 4, all.rows, 4, all.stride);
  args.expanded_rows = right;
  const Rows other_rank = FinalizeRouting(kLayer).Run(context_, args);
  const GatherColumns gather = [&](ExecContext& context, ConstRows columns) {
    const Rows joined = context.arena.AllocateRows(columns.rows, 8);
    for (size_t t = 0; t < columns.rows; ++t) {
      std::copy_n(columns.Row(t), 4, joined.Row(t));
      std::copy_n(other_rank.Row(t), 4, joined.Row(t) + 4);
    }
    return joined;
  };
  args.expanded_rows = left;
  const Rows gathered =
      AllGatherFinalizeRoutingWrapper(std::make_unique<FinalizeRouting>(kLayer), gather)
          .Run(context_, args);
  const Rows alone =
      AllGatherFinalizeRoutingWrapper(std::make_unique<FinalizeRouting>(kLayer), nullptr)
          .Run(context_, args);
  EXPECT_EQ(alone.cols, 4u) << "one rank: nothing to gather";
  args.expanded_rows = all;
  const Rows whole = FinalizeRouting(kLayer).Run(context_, args);
  ASSERT_EQ(gathered.cols, 8u);
  for (size_t t = 0; t < 4; ++t) {
    for (size_t h = 0; h < 8; ++h) EXPECT_EQ(gathered.Row(t)[h], whole.Row(t)[h]);
  }
}

TEST_F(AscendFinalize, BadOperandsAreRefusedByName) {
  const std::vector<float> y(4 * 3);
  const std::vector<float> scales(4);
  std::vector<int32_t> rows = {0, 1, 2, 3};
  FinalizeRoutingArgs args;
  args.expanded_rows = ConstRows(y.data(), 4, 3);
  args.num_tokens = 2;
  args.top_k = 2;
  args.scales = scales;
  args.expanded_row_idx = rows;
  const FinalizeRouting finalize(kLayer);
  EXPECT_NO_THROW(finalize.Run(context_, args));
  for (int32_t row : {4, -2}) {
    rows[3] = row;
    ExpectError(ErrorCode::kInvalidArgument,
                {"layer 7", "column 1 of token 1", std::to_string(row), "0 to 3"},
                [&] { finalize.Run(context_, args); });
  }
  rows[3] = -1;
  args.expanded_row_idx = std::span<const int32_t>(rows).first(3);
  ExpectError(ErrorCode::kInvalidArgument, {"expanded_row_idx", "4", "3"},
              [&] { finalize.Run(context_, args); });
  args.expanded_row_idx = rows;
  args.bias = ConstRows(y.data(), 2, 3);
  const std::vector<int32_t> ids = {0, 1, 2, -1};
  args.expert_ids = ids;
  ExpectError(ErrorCode::kInvalidArgument, {"token 1 names expert 2", "has 2"},
              [&] { finalize.Run(context_, args); });
  args.bias = {};
  args.mode = static_cast<DropPadMode>(4);
  ExpectError(ErrorCode::kInvalidArgument, {"drop_pad_mode is 4"},
              [&] { finalize.Run(context_, args); });
}

TEST(AscendGroupList, BothTypesAndTheirErrors) {
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  const std::vector<int64_t> counts = {2, 0, 3};
  const std::vector<int64_t> ends = {2, 2, 5};
  const auto check = [&](const std::vector<int64_t>& values, GroupListType type, size_t experts,
                         size_t rows) {
    return CheckGroups(context, {values, type}, experts, rows, kLayer);
  };
  for (const auto& [values, type] :
       {std::pair{counts, GroupListType::kCounts}, std::pair{ends, GroupListType::kCumulative}}) {
    const GroupRanges groups = check(values, type, 3, 9);
    EXPECT_EQ(groups.num_rows(), 5u);
    EXPECT_EQ(groups.Count(1), 0u);
    EXPECT_EQ(groups.Begin(2), 2u);
    EXPECT_EQ(ToVector<int64_t>(ToCounts(context, {values, type}, kLayer).values), counts);
    EXPECT_EQ(ToVector<int64_t>(ToCumulative(context, {values, type}, kLayer).values), ends);
  }
  const auto refused = [&](std::initializer_list<std::string_view> words, const auto& body) {
    ExpectError(ErrorCode::kInvalidArgument, words, body);
  };
  refused({"layer 7", "expected 4 entries", "found 3"},
          [&] { check(counts, GroupListType::kCounts, 4, 9); });
  refused({"layer 7", "decrease from 2 to 0 at expert 1", "counts"},
          [&] { check(counts, GroupListType::kCumulative, 3, 9); });
  refused({"expert 2", "need 9 rows", "there are 8", "end offsets"},
          [&] { check(ends, GroupListType::kCounts, 3, 8); });
  refused({"need 5 rows", "there are 4"}, [&] { check(ends, GroupListType::kCumulative, 3, 4); });
  refused({"expert 1 is -1"}, [&] { check({1, -1, 0}, GroupListType::kCounts, 3, 9); });
  refused({"expert 0 is -1"}, [&] { check({-1, 0, 0}, GroupListType::kCumulative, 3, 9); });
  refused({"type 0", "type"}, [&] { check({}, static_cast<GroupListType>(2), 0, 9); });
  refused({"overflow"}, [&] {
    check({INT64_MAX, INT64_MAX, INT64_MAX}, GroupListType::kCounts, 3, SIZE_MAX);
  });
}

}  // namespace
}  // namespace switchyard::moe::ascend
