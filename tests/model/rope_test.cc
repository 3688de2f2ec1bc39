// Rotary frequencies of every scaling kind against values computed independently from the published
// formulas.
#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "testing/errors.h"

namespace switchyard {
namespace {

RopeConfig Parse(const std::string& json, size_t dim = 8, size_t max_positions = 128) {
  ConfigReader reader = ConfigReader::Parse("config.json", json);
  RopeConfig rope = ParseRope(reader, dim, max_positions, 10000.0);
  reader.Finish();
  return rope;
}

TEST(Rope, DefaultAndLinear) {
  const std::vector<float> plain = InverseFrequencies(Parse("{}"), 128);
  ASSERT_EQ(plain.size(), 4u);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_FLOAT_EQ(plain[i],
                    static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / 8)));
  const std::vector<float> theta = InverseFrequencies(Parse(R"({"rope_theta": 500000.0})"), 128);
  EXPECT_FLOAT_EQ(theta[1], static_cast<float>(std::pow(500000.0, -0.25)));
  const std::vector<float> linear =
      InverseFrequencies(Parse(R"({"rope_scaling": {"type": "linear", "factor": 4.0}})"), 128);
  for (size_t i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(linear[i], plain[i] / 4);
}

TEST(Rope, Transformers5Spelling) {
  const RopeConfig rope =
      Parse(R"({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})");
  EXPECT_EQ(rope.theta, 500000.0);
  EXPECT_EQ(rope.kind, RopeConfig::Kind::kDefault);
}

TEST(Rope, DynamicStretchesByTheLimitOfTheSequence) {
  const RopeConfig rope = Parse(R"({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})");
  EXPECT_TRUE(FrequenciesDependOnSequence(rope));
  const std::vector<float> plain = InverseFrequencies(Parse("{}"), 128);
  EXPECT_EQ(InverseFrequencies(rope, 128), plain) << "no stretch within the trained length";
  const double theta = 10000.0 * std::pow(2.0 * 256 / 128 - 1.0, 8.0 / 6.0);
  EXPECT_FLOAT_EQ(InverseFrequencies(rope, 256)[1], static_cast<float>(std::pow(theta, -0.25)));
}

TEST(Rope, YarnKeepsHighFrequenciesAndStretchesLowOnes) {
  const RopeConfig rope = Parse(
      R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}})",
      64, 16384);
  const std::vector<float> plain = InverseFrequencies(Parse("{}", 64, 16384), 1);
  const std::vector<float> yarn = InverseFrequencies(rope, 1);
  EXPECT_FLOAT_EQ(yarn[0], plain[0]);
  EXPECT_FLOAT_EQ(yarn[31], plain[31] / 4);
  EXPECT_NEAR(rope.attention_factor, 0.1 * std::log(4.0) + 1.0, 1e-12);
  const double mid = [] {  // pair 14, by hand: low = floor(d(32)) = 10, high = ceil(d(1)) = 23
    const auto d = [](double rotations) {
      return 64 * std::log(4096 / (rotations * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
    };
    const double low = std::floor(d(32));
    const double high = std::ceil(d(1));
    const double ramp = (14 - low) / (high - low);
    const double base = std::pow(10000.0, -28.0 / 64);
    return base / 4 * ramp + base * (1 - ramp);
  }();
  EXPECT_NEAR(yarn[14], mid, 1e-7);
  const RopeConfig deepseek = Parse(
      R"({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}})",
      64, 163840);
  EXPECT_NEAR(deepseek.attention_factor, 1.0, 1e-12);
}

TEST(Rope, Llama3) {
  const RopeConfig rope = Parse(
      R"({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}})",
      16);
  const std::vector<float> scaled = InverseFrequencies(rope, 1);
  for (size_t i = 0; i < 8; ++i) {
    const double base = std::pow(500000.0, -2.0 * static_cast<double>(i) / 16);
    const double wavelength = 2 * std::numbers::pi / base;
    double expected = base;
    if (wavelength > 64) {
      expected = base / 8;
    } else if (wavelength > 16) {
      const double smooth = (64 / wavelength - 1) / 3;
      expected = (1 - smooth) * base / 8 + smooth * base;
    }
    EXPECT_NEAR(scaled[i], expected, 1e-7 * base) << i;
  }
}

TEST(Rope, Longrope) {
  const RopeConfig rope = Parse(
      R"({"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 2, 2],
          "long_factor": [4, 4, 8, 8]}})");
  const std::vector<float> plain = InverseFrequencies(Parse("{}"), 1);
  EXPECT_FLOAT_EQ(InverseFrequencies(rope, 32)[2], plain[2] / 2);
  EXPECT_FLOAT_EQ(InverseFrequencies(rope, 33)[2], plain[2] / 8);
  EXPECT_NEAR(rope.attention_factor, std::sqrt(1 + std::log(4.0) / std::log(32.0)), 1e-12);
}

TEST(Rope, AnglesOfAPosition) {
  const RopeConfig rope = Parse("{}");
  const std::vector<float> frequencies = InverseFrequencies(rope, 1);
  float cos[4];
  float sin[4];
  RopeAngles(rope, frequencies, 100, cos, sin);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(cos[i], std::cos(100.0 * frequencies[i]), 1e-5);
    EXPECT_NEAR(sin[i], std::sin(100.0 * frequencies[i]), 1e-5);
  }
}

TEST(Rope, BadValuesAreNamed) {
  using testing::ExpectError;
  ExpectError(ErrorCode::kUnsupported, {"rope_scaling", "su"},
              [] { Parse(R"({"rope_scaling": {"type": "su"}})"); });
  ExpectError(ErrorCode::kCorruptData, {"rope_scaling.factor"},
              [] { Parse(R"({"rope_scaling": {"rope_type": "linear"}})"); });
  ExpectError(ErrorCode::kUnsupported, {"contradicts"}, [] {
    Parse(R"({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}})");
  });
  ExpectError(ErrorCode::kUnsupported, {"short_factor", "4 numbers"}, [] {
    Parse(
        R"({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1, 1, 1, 1]}})");
  });
  ExpectError(ErrorCode::kUnsupported, {"high_freq_factor"}, [] {
    Parse(
        R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
              "original_max_position_embeddings": 64}})");
  });
}

}  // namespace
}  // namespace switchyard
