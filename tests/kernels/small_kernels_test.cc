// Norms, rotations, conversions and row operations against their scalar forms, on
// every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>

#include "kernels/convert/convert.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::GuardedBuffer;

const std::vector<size_t> kSizes = {0,  1,   3,   7,   8,   15,  16,  17,   31,   64,
                                    65, 100, 127, 128, 192, 256, 896, 1000, 2048, 2880};

TEST(RmsNorm, MatchesTheReference) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(21);
    for (size_t n : kSizes) {
      if (n == 0) continue;
      for (float scale : {1e-4f, 1.0f, 1e4f}) {
        GuardedBuffer<float> x(testing::RandomFloats(random, n, scale));
        GuardedBuffer<float> weight(testing::RandomFloats(random, n));
        GuardedBuffer<float> out(n);
        std::vector<float> expected(n);
        RmsNorm(x.data(), weight.data(), n, 1e-6f, out.data());
        RmsNormReference(x.data(), weight.data(), n, 1e-6f, expected.data());
        for (size_t i = 0; i < n; ++i)
          ASSERT_NEAR(out[i], expected[i], 3e-6 * (1 + std::abs(expected[i]))) << n;
        RmsNorm(x.data(), weight.data(), n, 1e-6f, x.data());
        EXPECT_EQ(std::memcmp(x.data(), out.data(), n * sizeof(float)), 0) << "in place";
      }
    }
  });
}

TEST(Rope, RotatesPairs) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(22);
    for (size_t half : {1u, 3u, 4u, 8u, 12u, 16u, 17u, 32u, 50u, 64u, 96u}) {
      const std::vector<float> before = testing::RandomFloats(random, 2 * half);
      std::vector<float> cos(half);
      std::vector<float> sin(half);
      for (size_t i = 0; i < half; ++i) {
        cos[i] = std::cos(static_cast<float>(i));
        sin[i] = std::sin(static_cast<float>(i));
      }
      GuardedBuffer<float> x(before);
      RotateHalves(x.data(), cos.data(), sin.data(), half);
      for (size_t i = 0; i < half; ++i) {
        ASSERT_NEAR(x[i], before[i] * cos[i] - before[half + i] * sin[i], 1e-6);
        ASSERT_NEAR(x[half + i], before[half + i] * cos[i] + before[i] * sin[i], 1e-6);
      }
      GuardedBuffer<float> y(before);
      RotatePairs(y.data(), cos.data(), sin.data(), half);
      for (size_t i = 0; i < half; ++i) {
        const float a = before[2 * i], b = before[2 * i + 1];
        ASSERT_NEAR(y[2 * i], a * cos[i] - b * sin[i], 1e-6);
        ASSERT_NEAR(y[2 * i + 1], b * cos[i] + a * sin[i], 1e-6);
      }
    }
  });
}

TEST(Convert, EveryBitPatternOf16BitFloatsWidensExactly) {
  testing::ForEachTarget([] {
    std::vector<F16> halves(65536);
    std::vector<BF16> brains(65536);
    for (size_t i = 0; i < 65536; ++i) {
      halves[i].bits = static_cast<uint16_t>(i);
      brains[i].bits = static_cast<uint16_t>(i);
    }
    std::vector<float> wide_f16(65536);
    std::vector<float> wide_bf16(65536);
    ConvertToF32(halves.data(), DType::kF16, 65536, wide_f16.data());
    ConvertToF32(brains.data(), DType::kBF16, 65536, wide_bf16.data());
    for (size_t i = 0; i < 65536; ++i) {
      const float f16 = ToFloat(halves[i]);
      const float bf16 = ToFloat(brains[i]);
      ASSERT_TRUE(std::isnan(f16) ? std::isnan(wide_f16[i])
                                  : std::memcmp(&f16, &wide_f16[i], 4) == 0)
          << i;
      ASSERT_TRUE(std::isnan(bf16) ? std::isnan(wide_bf16[i])
                                   : std::memcmp(&bf16, &wide_bf16[i], 4) == 0)
          << i;
    }
  });
}

TEST(Convert, NarrowingRoundsToNearestEven) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(24);
    std::vector<float> values = {
        0.0f,     -0.0f, 1.0f,  1.00390625f, 1.01171875f,
        65504.0f, 1e-8f, -3.5f, 0x1p-20f,    std::numeric_limits<float>::infinity()};
    for (int i = 0; i < 5000; ++i) {
      // Random bits with exponents that f16 can hold.
      const uint32_t bits = (static_cast<uint32_t>(random()) & 0x807fffffu) |
                            (static_cast<uint32_t>(113u + random() % 29u) << 23);
      values.push_back(std::bit_cast<float>(bits));
    }
    std::vector<BF16> brains(values.size());
    std::vector<F16> halves(values.size());
    ConvertFromF32(values.data(), values.size(), DType::kBF16, brains.data());
    ConvertFromF32(values.data(), values.size(), DType::kF16, halves.data());
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(brains[i].bits, ToBF16(values[i]).bits) << values[i];
      ASSERT_EQ(halves[i].bits, ToF16(values[i]).bits) << values[i];
    }
  });
}

// The vectors of a row and its tail, in both directions; numbers that both types hold.
TEST(Convert, RowsOfEverySize) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(27);
    for (size_t n : kSizes) {
      GuardedBuffer<float> x(testing::RandomFloats(random, n));
      for (float& value : x.span()) value = ToFloat(ToBF16(value));
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        GuardedBuffer<std::byte> narrow(n * DTypeBytes(dtype));
        GuardedBuffer<float> back(n);
        ConvertFromF32(x.data(), n, dtype, narrow.data());
        ConvertToF32(narrow.data(), dtype, n, back.data());
        for (size_t i = 0; i < n; ++i) {
          const float expected = dtype == DType::kF16 ? ToFloat(ToF16(x[i])) : x[i];
          ASSERT_EQ(back[i], expected) << DTypeName(dtype) << " " << i << " of " << n;
        }
      }
    }
  });
}

TEST(Elementwise, AddScaleAndClamp) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(25);
    for (size_t n : kSizes) {
      GuardedBuffer<float> x(testing::RandomFloats(random, n));
      const std::vector<float> before = testing::RandomFloats(random, n);
      GuardedBuffer<float> sum(before);
      AddTo(x.data(), n, sum.data());
      GuardedBuffer<float> scaled(before);
      ScaleAddTo(x.data(), 0.25f, n, scaled.data());
      GuardedBuffer<float> times(before);
      Scale(times.data(), 0.3f, n);
      GuardedBuffer<float> clamped(before);
      Clamp(clamped.data(), 0.5f, n);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(sum[i], before[i] + x[i]);
        ASSERT_NEAR(scaled[i], before[i] + 0.25f * x[i], 1e-6);
        ASSERT_EQ(times[i], before[i] * 0.3f);
        ASSERT_EQ(clamped[i], std::min(0.5f, std::max(-0.5f, before[i])));
      }
    }
  });
}

TEST(Elementwise, WeightedSumHasTheBitsOfRowByRow) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(26);
    for (size_t n : kSizes) {
      for (size_t num_rows : {0u, 1u, 3u, 8u}) {
        std::deque<GuardedBuffer<float>> rows;
        std::vector<const float*> pointers;
        for (size_t r = 0; r < num_rows; ++r) rows.emplace_back(testing::RandomFloats(random, n));
        for (const GuardedBuffer<float>& row : rows) pointers.push_back(row.data());
        const std::vector<float> weights = testing::RandomFloats(random, num_rows);
        std::vector<float> expected(n, 0.0f);
        for (size_t r = 0; r < num_rows; ++r)
          ScaleAddTo(pointers[r], weights[r], n, expected.data());
        GuardedBuffer<float> found(testing::RandomFloats(random, n));
        WeightedSum(pointers.data(), weights.data(), num_rows, n, found.data());
        for (size_t i = 0; i < n; ++i)
          ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]));
      }
    }
  });
}

}  // namespace
}  // namespace switchyard::kernels
