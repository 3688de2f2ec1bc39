// Ascend components "activation" and "hidden-states quantisation": each row of the table of
// contract 4.1.4 against its formula in f64, written here anew.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "switchyard/moe/ascend/activation.h"
#include "switchyard/moe/ascend/hidden_states_quant.h"
#include "testing/errors.h"
#include "testing/quant_formats.h"
#include "testing/random.h"

namespace switchyard::moe::ascend {
namespace {

using testing::ExpectError;

constexpr size_t kLayer = 4;

double Sigma(double x) { return 1 / (1 + std::exp(-x)); }
double Silu(double x) { return x * Sigma(x); }
double Clamp(double x, double limit) { return std::min(std::max(x, -limit), limit); }
double GeluErf(double x) { return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2)); }
double GeluTanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

using Formula = std::function<double(double g, double u)>;

struct Row {
  std::string name;
  RowActivation component;
  Formula formula;
};

// The gated rows whose results stay plain.
std::vector<Row> PlainRows() {
  return {
      {"Swiglu", Swiglu(kLayer), [](double g, double u) { return Silu(g) * u; }},
      {"OAI", SwigluOai({1.702f, 1.5f}, kLayer),
       [](double g, double u) {
         g = std::min(g, 1.5);
         return g * Sigma(double{1.702f} * g) * (Clamp(u, 1.5) + 1);
       }},
      {"OAI defaults", SwigluOai({}, kLayer), [](double g, double u) { return Silu(g) * (u + 1); }},
      {"step", SwigluStepAndMul(0.75f, kLayer),
       [](double g, double u) { return std::min(Silu(g), 0.75) * Clamp(u, 0.75); }},
      {"limit", SwigluLimit(0.75f, kLayer),
       [](double g, double u) { return Silu(std::min(g, 0.75)) * Clamp(u, 0.75); }},
      {"gelu: the default is the tanh form", GeluAndMul(kLayer),
       [](double g, double u) { return GeluTanh(g) * u; }},
      {"gelu erf", GeluAndMul(kLayer, GeluApproximate::kNone),
       [](double g, double u) { return GeluErf(g) * u; }},
      {"situ", Situ({}, false, kLayer),
       [](double g, double u) { return 4 * std::tanh(g / 4) * Sigma(g) * u; }},
      {"situ with a limit", Situ({2.0f, 1.25f}, false, kLayer),
       [](double g, double u) {
         return 2 * std::tanh(g / 2) * Sigma(g) * 1.25 * std::tanh(u / 1.25);
       }},
  };
}

class AscendActivation : public ::testing::Test {
 protected:
  AscendActivation() : random_(testing::MakeRandom(62)), pool_(2), context_{pool_, arena_} {}

  // Rows of gate and up, large enough for every clamp to bite.
  ConstRows GateUp(size_t rows, size_t cols) {
    x_ = testing::RandomFloats(random_, rows * cols, 2.0f);
    return ConstRows(x_.data(), rows, cols);
  }

  std::mt19937_64 random_;
  ThreadPool pool_;
  Arena arena_;
  ExecContext context_;
  std::vector<float> x_;
};

TEST_F(AscendActivation, PlainRowsOfTheTable) {
  for (const Row& row : PlainRows()) {
    for (size_t width : {1u, 7u, 33u}) {
      for (size_t rows : {0u, 1u, 20u}) {
        ActivationArgs args;
        args.x = GateUp(rows, 2 * width);
        const QuantRows out = row.component.Run(context_, args);
        ASSERT_TRUE(out.is_plain_f32());
        ASSERT_EQ(out.rows, rows);
        for (size_t i = 0; i < rows; ++i) {
          for (size_t k = 0; k < width; ++k) {
            const double expected = row.formula(args.x.Row(i)[k], args.x.Row(i)[width + k]);
            EXPECT_NEAR(out.F32().Row(i)[k], expected, 3e-6 * (1 + std::fabs(expected)))
                << row.name;
          }
        }
      }
    }
  }
}

TEST_F(AscendActivation, NotGated) {
  const std::vector<std::pair<std::string, double (*)(double)>> rows = {
      {"silu", &Silu}, {"gelu", &GeluErf}, {"gelu_tanh", &GeluTanh}, {"relu2", [](double x) {
                                                                        return x > 0 ? x * x : 0.0;
                                                                      }}};
  for (const auto& [name, formula] : rows) {
    ActivationArgs args;
    args.x = GateUp(5, 9);
    const QuantRows out = NotGated(name, kLayer).Run(context_, args);
    ASSERT_EQ(out.cols, 9u) << "one half only";
    for (size_t i = 0; i < 5; ++i) {
      for (size_t k = 0; k < 9; ++k) {
        const double expected = formula(args.x.Row(i)[k]);
        EXPECT_NEAR(out.F32().Row(i)[k], expected, 3e-6 * (1 + std::fabs(expected))) << name;
      }
    }
  }
  ExpectError(ErrorCode::kNotFound, {"tanh"}, [] { NotGated("tanh", kLayer); });
}

TEST_F(AscendActivation, InterleavedGateAndUp) {
  const SwigluOaiParams pairs{1.702f, 2.0f, GateUpLayout::kInterleaved};
  for (size_t width : {5u, 300u}) {
    const ConstRows x = GateUp(4, 2 * width);
    std::vector<float> halves(x_.size());
    for (size_t i = 0; i < 4; ++i) {
      for (size_t k = 0; k < width; ++k) {
        halves[i * 2 * width + k] = x.Row(i)[2 * k];
        halves[i * 2 * width + width + k] = x.Row(i)[2 * k + 1];
      }
    }
    ActivationArgs interleaved;
    interleaved.x = x;
    ActivationArgs split;
    split.x = ConstRows(halves.data(), 4, 2 * width);
    const QuantRows a = SwigluOai(pairs, kLayer).Run(context_, interleaved);
    const QuantRows b = SwigluOai({1.702f, 2.0f}, kLayer).Run(context_, split);
    for (size_t i = 0; i < 4; ++i) {
      for (size_t k = 0; k < width; ++k) EXPECT_EQ(a.F32().Row(i)[k], b.F32().Row(i)[k]);
    }
  }
}

// Codes within half a step of y / scale, the scale that of the largest.
void ExpectInt8(const QuantRows& rows, size_t i, const std::vector<double>& y) {
  double amax = 0;
  for (double value : y) amax = std::max(amax, std::fabs(value));
  for (size_t k = 0; k < y.size(); ++k)
    EXPECT_NEAR(testing::RowElement(rows, i, k), y[k], amax / 127 * 0.502 + 1e-12);
}

void ExpectMxFp8(const QuantRows& rows, size_t i, const std::vector<double>& y) {
  for (size_t block = 0; block < y.size(); block += 32) {
    const size_t end = std::min(y.size(), block + 32);
    double amax = 0;
    for (size_t k = block; k < end; ++k) amax = std::max(amax, std::fabs(y[k]));
    const int exponent = static_cast<int>(std::floor(std::log2(amax))) - 8;
    EXPECT_EQ(static_cast<int>(rows.scale[i * rows.scale_stride + block / 32]), exponent + 127);
    for (size_t k = block; k < end; ++k) {
      // e4m3 has 3 bits of mantissa; codes beyond 448 saturate.
      const double most = 448 * std::exp2(exponent);
      const double expected = Clamp(y[k], most);
      EXPECT_NEAR(testing::RowElement(rows, i, k), expected,
                  std::max(std::fabs(expected) / 16, std::exp2(exponent - 10)) * 1.001);
    }
  }
}

std::vector<double> RowOf(const ConstRows& x, size_t i, const Formula& formula) {
  const size_t width = x.cols / 2;
  std::vector<double> y(width);
  for (size_t k = 0; k < width; ++k) y[k] = formula(x.Row(i)[k], x.Row(i)[width + k]);
  return y;
}

TEST_F(AscendActivation, QuantisedRowsOfTheTable) {
  const Formula swiglu = [](double g, double u) { return Silu(g) * u; };
  const Formula situ = [](double g, double u) {
    return 4 * std::tanh(g / 4) * Sigma(g) * 1.5 * std::tanh(u / 1.5);
  };
  ActivationArgs args;
  args.x = GateUp(6, 2 * 70);
  const QuantRows int8 = SwigluQuant(kLayer).Run(context_, args);
  const QuantRows situ_int8 = Situ({4.0f, 1.5f}, true, kLayer).Run(context_, args);
  const QuantRows situ_mx =
      SituMxFp8Quant({4.0f, 1.5f}, MxScaleRule::kOcpFloor, kLayer).Run(context_, args);
  EXPECT_EQ(int8.kind, ActQuantKind::kInt8Token);
  EXPECT_EQ(situ_mx.kind, ActQuantKind::kMxFp8);
  for (size_t i = 0; i < 6; ++i) {
    ExpectInt8(int8, i, RowOf(args.x, i, swiglu));
    ExpectInt8(situ_int8, i, RowOf(args.x, i, situ));
    ExpectMxFp8(situ_mx, i, RowOf(args.x, i, situ));
  }
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "SituMXFP8Quant", "linear limit"}, [] {
    SituMxFp8Quant({4.0f, std::nullopt}, MxScaleRule::kOcpFloor, kLayer);
  });
}

// Rows past the last group hold NaN: they would spoil a statistic, and tell if they are read.
TEST_F(AscendActivation, GroupedOnesReadRowsOfGroupsOnly) {
  const std::vector<int64_t> counts = {3, 0, 2};
  const std::vector<int64_t> ends = {3, 3, 5};
  ConstRows x = GateUp(8, 2 * 40);
  for (size_t i = 5 * 80; i < x_.size(); ++i) x_[i] = NAN;
  ActivationArgs args;
  args.x = x;
  const Formula swiglu = [](double g, double u) { return Silu(g) * u; };
  const Formula oai = [](double g, double u) {
    g = std::min(g, 1.0);
    return g * Sigma(double{1.702f} * g) * (Clamp(u, 1.0) + 1);
  };
  const Formula limited = [](double g, double u) { return Silu(std::min(g, 1.0)) * Clamp(u, 1.0); };
  const SwigluOaiParams params{1.702f, 1.0f};
  for (GroupListType type : {GroupListType::kCounts, GroupListType::kCumulative}) {
    args.groups = GroupList{type == GroupListType::kCounts ? counts : ends, type};
    const QuantRows plain = SwigluDeepEpKernel(false, {}, kLayer).Run(context_, args);
    const QuantRows quantised = SwigluDeepEpKernel(true, {}, kLayer).Run(context_, args);
    const QuantRows clamped = SwigluDeepEpKernel(false, params, kLayer).Run(context_, args);
    const QuantRows both = SwigluDeepEpKernel(true, params, kLayer).Run(context_, args);
    ASSERT_EQ(plain.rows, 5u);
    ASSERT_EQ(quantised.rows, 5u);
    for (size_t i = 0; i < 5; ++i) {
      const std::vector<double> y = RowOf(x, i, swiglu);
      const std::vector<double> z = RowOf(x, i, oai);
      for (size_t k = 0; k < 40; ++k) {
        EXPECT_NEAR(plain.F32().Row(i)[k], y[k], 3e-6 * (1 + std::fabs(y[k])));
        EXPECT_NEAR(clamped.F32().Row(i)[k], z[k], 3e-6 * (1 + std::fabs(z[k])));
      }
      ExpectInt8(quantised, i, y);
      ExpectInt8(both, i, z);
    }
  }
  const RowActivation mx = SwigluMxFp8Quant(1.0f, MxScaleRule::kOcpFloor, kLayer);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "SwigluMxfp8Quant", "counts"},
              [&] { mx.Run(context_, args); });
  args.groups = GroupList{counts, GroupListType::kCounts};
  const QuantRows rows = mx.Run(context_, args);
  for (size_t i = 0; i < 5; ++i) ExpectMxFp8(rows, i, RowOf(x, i, limited));
  args.groups.reset();
  ExpectError(ErrorCode::kInvalidArgument, {"SwigluMxfp8Quant", "group list"},
              [&] { mx.Run(context_, args); });
}

TEST_F(AscendActivation, SwigluQuantWithScales) {
  constexpr size_t kWidth = 11;
  const std::vector<int64_t> counts = {2, 0, 3};
  std::vector<int32_t> sums(6 * 2 * kWidth);
  for (int32_t& sum : sums) sum = static_cast<int32_t>(random_() % 20001) - 10000;
  std::vector<float> weight_scale(3 * 2 * kWidth);
  for (float& scale : weight_scale) scale = 1e-3f * static_cast<float>(1 + random_() % 9);
  std::vector<float> act_scale = {0.1f, 0.2f, 0.05f, 0.3f, 0.15f, NAN};
  const std::vector<float> bias = testing::RandomFloats(random_, 3 * 2 * kWidth, 0.5f);
  std::vector<float> smooth(3 * kWidth);
  for (float& scale : smooth) scale = static_cast<float>(1 + random_() % 4);
  ActivationArgs args;
  args.accumulators = RowsView<const int32_t>(sums.data(), 6, 2 * kWidth);
  args.weight_scale = ConstRows(weight_scale.data(), 3, 2 * kWidth);
  args.act_scale = act_scale;
  args.groups = GroupList{counts, GroupListType::kCounts};
  const std::vector<size_t> expert_of = {0, 0, 2, 2, 2};
  const auto expected = [&](size_t i, bool left) {
    std::vector<double> y(kWidth);
    for (size_t k = 0; k < kWidth; ++k) {
      double half[2];
      for (size_t h = 0; h < 2; ++h) {
        const size_t column = h * kWidth + k;
        const size_t at = expert_of[i] * 2 * kWidth + column;
        half[h] = double{static_cast<double>(sums[i * 2 * kWidth + column])} *
                  double{weight_scale[at]} * double{act_scale[i]};
        if (args.bias.rows != 0) half[h] += bias[at];
      }
      y[k] = Silu(half[left ? 0 : 1]) * half[left ? 1 : 0];
      if (args.quant_scale.rows != 0) y[k] *= smooth[expert_of[i] * kWidth + k];
    }
    return y;
  };
  for (bool more : {false, true}) {
    if (more) {
      args.bias = ConstRows(bias.data(), 3, 2 * kWidth);
      args.quant_scale = ConstRows(smooth.data(), 3, kWidth);
    }
    for (bool left : {true, false}) {
      const QuantRows rows =
          SwigluQuantWithScales({std::nullopt, left, kLayer}).Run(context_, args);
      ASSERT_EQ(rows.rows, 5u);
      ASSERT_EQ(rows.kind, ActQuantKind::kInt8Token);
      for (size_t i = 0; i < 5; ++i) ExpectInt8(rows, i, expected(i, left));
    }
  }
  // Static: round(y * scale + offset), clipped.
  const QuantRows codes = SwigluQuantWithScales({5.0f, true, kLayer}).Run(context_, args);
  for (size_t i = 0; i < 5; ++i) {
    const std::vector<double> y = expected(i, true);
    for (size_t k = 0; k < kWidth; ++k) {
      const auto code = static_cast<double>(static_cast<int8_t>(codes.Row(i)[k]));
      EXPECT_NEAR(code, std::clamp(y[k] + 5, -128.0, 127.0), 0.51);
    }
  }
  args.act_scale = std::span<const float>(act_scale).first(3);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "act_scale has 3", "6"}, [&] {
    SwigluQuantWithScales({std::nullopt, true, kLayer}).Run(context_, args);
  });
}

// Gate and up are shares of their own: concatenating after the activation restores the order.
TEST_F(AscendActivation, AllGatherRestoresTheColumns) {
  constexpr size_t kWidth = 12;
  const ConstRows x = GateUp(5, 2 * kWidth);
  std::vector<std::vector<float>> shares(2);
  for (size_t i = 0; i < 5; ++i) {
    for (size_t half : {0u, 1u}) {
      for (size_t rank : {0u, 1u}) {
        const float* from = x.Row(i) + half * kWidth + rank * kWidth / 2;
        shares[rank].insert(shares[rank].end(), from, from + kWidth / 2);
      }
    }
  }
  const RowActivation swiglu = Swiglu(kLayer);
  std::vector<QuantRows> results;
  for (const std::vector<float>& share : shares) {
    ActivationArgs args;
    args.x = ConstRows(share.data(), 5, kWidth);
    results.push_back(swiglu.Run(context_, args));
  }
  const GatherColumns gather = [&](ExecContext& context, ConstRows columns) {
    const Rows joined = context.arena.AllocateRows(columns.rows, kWidth);
    for (size_t i = 0; i < columns.rows; ++i) {
      std::copy_n(columns.Row(i), kWidth / 2, joined.Row(i));
      std::copy_n(results[1].F32().Row(i), kWidth / 2, joined.Row(i) + kWidth / 2);
    }
    return joined;
  };
  ActivationArgs args;
  args.x = ConstRows(shares[0].data(), 5, kWidth);
  const QuantRows gathered = AllGatherActivationWrapper(swiglu, gather, kLayer).Run(context_, args);
  const QuantRows alone = AllGatherActivationWrapper(swiglu, nullptr, kLayer).Run(context_, args);
  EXPECT_EQ(alone.cols, kWidth / 2);
  args.x = x;
  const QuantRows whole = swiglu.Run(context_, args);
  ASSERT_EQ(gathered.cols, kWidth);
  for (size_t i = 0; i < 5; ++i) {
    for (size_t k = 0; k < kWidth; ++k) EXPECT_EQ(gathered.F32().Row(i)[k], whole.F32().Row(i)[k]);
  }
  const RowActivation quantising = SwigluQuant(kLayer);
  ExpectError(ErrorCode::kUnsupported, {"layer 4", "int8_token"},
              [&] { AllGatherActivationWrapper(quantising, gather, kLayer); });
}

TEST_F(AscendActivation, BadNumbersAreRefusedByName) {
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "SwigluStepAndMul", "limit", "-1"},
              [] { SwigluStepAndMul(-1.0f, kLayer); });
  ExpectError(ErrorCode::kInvalidArgument, {"swiglu_limit", "0"},
              [] { SwigluLimit(0.0f, kLayer); });
  ExpectError(ErrorCode::kInvalidArgument, {"SwigluOAI", "nan"}, [] {
    SwigluOai({1.0f, NAN}, kLayer);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"SwigluDeepEPKernel", "alpha and limit"}, [] {
    SwigluDeepEpKernel(false, {1.702f, std::nullopt}, kLayer);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"SiTU", "beta"}, [] {
    Situ({0.0f, std::nullopt}, false, kLayer);
  });
  ActivationArgs odd;
  odd.x = GateUp(2, 5);
  ExpectError(ErrorCode::kInvalidArgument, {"Swiglu", "even", "5"},
              [&] { Swiglu(kLayer).Run(context_, odd); });
}

TEST_F(AscendActivation, HiddenStatesDynamic) {
  const std::vector<float> values = testing::RandomFloats(random_, 6 * 96);
  const ConstRows x(values.data(), 6, 96);
  for (DType dtype : {DType::kI8, DType::kI4, DType::kF8E4M3, DType::kF4E2M1}) {
    const QuantRows rows = DynamicHiddenStatesQuant(dtype, kLayer).Run(context_, x);
    for (size_t i = 0; i < 6; ++i) {
      if (dtype == DType::kI8 || dtype == DType::kI4) {
        const double largest = dtype == DType::kI8 ? 127 : 7;
        double amax = 0;
        for (size_t k = 0; k < 96; ++k) amax = std::max(amax, std::fabs(double{x.Row(i)[k]}));
        double most = 0;
        for (size_t k = 0; k < 96; ++k) {
          EXPECT_NEAR(testing::RowElement(rows, i, k), x.Row(i)[k], amax / largest * 0.501);
          most =
              std::max(most, std::fabs(static_cast<double>(static_cast<int8_t>(rows.Row(i)[k]))));
        }
        EXPECT_EQ(most, largest) << "the largest code is reached";
        continue;
      }
      const int emax = dtype == DType::kF8E4M3 ? 8 : 2;
      for (size_t block = 0; block < 3; ++block) {
        double amax = 0;
        for (size_t k = 0; k < 32; ++k)
          amax = std::max(amax, std::fabs(double{x.Row(i)[block * 32 + k]}));
        EXPECT_EQ(static_cast<int>(rows.scale[i * rows.scale_stride + block]),
                  static_cast<int>(std::floor(std::log2(amax))) - emax + 127);
      }
    }
  }
  ExpectError(ErrorCode::kUnsupported, {"layer 4", "BF16", "int8"},
              [] { DynamicHiddenStatesQuant(DType::kBF16, kLayer); });
  ExpectError(ErrorCode::kUnsupported, {"layer 4", "fp8_group"},
              [] { DynamicHiddenStatesQuant(ActQuant{.kind = ActQuantKind::kFp8Group}, kLayer); });
}

TEST_F(AscendActivation, HiddenStatesStatic) {
  const std::vector<float> x = {0.25f, -1.0f, 3.0f, 40.0f, -40.0f, 0.0f};
  const std::vector<float> scale = {2.0f, 4.0f, 10.0f};
  const std::vector<float> offset = {1.0f, 0.0f, -3.0f};
  const StaticHiddenStatesQuant per_column({scale, offset}, kLayer);
  const QuantRows rows = per_column.Run(context_, ConstRows(x.data(), 2, 3));
  const std::vector<int> expected = {2, -4, 27, 81, -128, -3};  // 1.5 rounds to the even 2
  for (size_t i = 0; i < 6; ++i)
    EXPECT_EQ(static_cast<int>(static_cast<int8_t>(rows.Row(i / 3)[i % 3])), expected[i]) << i;
  EXPECT_EQ(rows.scale, nullptr);
  const std::span<const float> one(scale.data(), 1);
  const QuantRows same =
      StaticHiddenStatesQuant({one, one}, kLayer).Run(context_, ConstRows(x.data(), 2, 3));
  EXPECT_EQ(static_cast<int>(static_cast<int8_t>(same.Row(0)[2])), 8);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "offset is missing"}, [&] {
    StaticHiddenStatesQuant({scale, {}}, kLayer);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"layer 4", "scale_reciprocal is missing"}, [&] {
    StaticHiddenStatesQuant({{}, offset}, kLayer);
  });
  ExpectError(ErrorCode::kInvalidArgument, {"scale_reciprocal has 3", "1 or 2"},
              [&] { per_column.Run(context_, ConstRows(x.data(), 3, 2)); });
}

}  // namespace
}  // namespace switchyard::moe::ascend
