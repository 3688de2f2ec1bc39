// Encoders, decoders and the 8-bit product against their scalar definitions, on every instruction
// set.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/matmul/matmul_i8.h"
#include "kernels/quantize/quantize.h"
#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::GuardedBuffer;

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kSizes[] = {0,  1,  2,  3,  4,   7,   8,   15,  16,  17,  31,
                             33, 63, 64, 65, 127, 192, 200, 515, 896, 2880};

// Values of every magnitude, special ones, and each middle between two codes with its neighbours.
std::vector<float> HardValues() {
  std::vector<float> values = {0.0f, -0.0f, kInf, -kInf, kNan, 1e-45f, 3e38f, 447.9f, 448.1f};
  const auto add_near = [&](float value) {
    for (float near : {value, std::nextafter(value, 0.0f), std::nextafter(value, kInf)}) {
      values.push_back(near);
      values.push_back(-near);
    }
  };
  for (int code = 0; code < 0x7e; ++code) {
    const float low = DecodeE4M3(static_cast<uint8_t>(code));
    add_near(low);
    add_near((low + DecodeE4M3(static_cast<uint8_t>(code + 1))) / 2);
  }
  for (float middle : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) add_near(middle);
  for (int i = 0; i < 128; ++i) add_near(static_cast<float>(i) + 0.5f);
  auto random = testing::MakeRandom(31);
  for (float value : testing::RandomFloats(random, 2000, 30.0f)) values.push_back(value);
  return values;
}

TEST(MaxMagnitude, FindsTheLargestAndNaN) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(32);
    for (size_t n : kSizes) {
      GuardedBuffer<float> x(testing::RandomFloats(random, n));
      float expected = 0;
      for (float value : x.span()) expected = std::max(expected, std::fabs(value));
      EXPECT_EQ(MaxMagnitude(x.data(), n), expected);
      EXPECT_EQ(MaxFiniteMagnitude(x.data(), n), expected);
      if (n == 0) continue;
      x[n - 1] = -kInf;
      EXPECT_EQ(MaxMagnitude(x.data(), n), kInf);
      x[n / 2] = -kNan;
      EXPECT_TRUE(std::isnan(MaxMagnitude(x.data(), n)));
      EXPECT_LE(MaxFiniteMagnitude(x.data(), n), expected);
    }
  });
}

TEST(EncodeE4M3Row, EqualsTheScalarEncoder) {
  const std::vector<float> values = HardValues();
  testing::ForEachTarget([&] {
    for (float scale : {1.0f, 0.37f, 0x1p-127f}) {
      const GuardedBuffer<float> x(values);
      GuardedBuffer<uint8_t> codes(values.size());
      EncodeE4M3Row(x.data(), values.size(), scale, codes.data());
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(codes[i], EncodeE4M3(values[i] / scale)) << values[i] << " / " << scale;
    }
  });
}

TEST(EncodeE2M1Row, EqualsTheScalarEncoder) {
  const std::vector<float> values = HardValues();
  testing::ForEachTarget([&] {
    for (MxRounding rounding : {MxRounding::kHalfToEven, MxRounding::kHalfToZero}) {
      for (size_t n : {size_t{1}, size_t{5}, size_t{31}, size_t{64}, values.size()}) {
        const GuardedBuffer<float> x(
            std::vector<float>(values.begin(), values.begin() + static_cast<long>(n)));
        GuardedBuffer<uint8_t> packed((n + 1) / 2);
        EncodeE2M1Row(x.data(), n, 0.5f, rounding, packed.data());
        for (size_t i = 0; i < n; ++i) {
          const int code = i % 2 == 0 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
          ASSERT_EQ(code, EncodeE2M1(values[i] / 0.5f, rounding)) << values[i];
        }
        if (n % 2 == 1) {
          EXPECT_EQ(packed[n / 2] >> 4, 0);
        }
      }
    }
  });
}

TEST(EncodeInt8, RoundsToEvenAndClamps) {
  const std::vector<float> values = HardValues();
  testing::ForEachTarget([&] {
    for (const Int8Codes& how : {Int8Codes{}, Int8Codes{0.5f, 3.0f, -128.0f, 127.0f},
                                 Int8Codes{0.1f, 0.0f, -8.0f, 7.0f}}) {
      const GuardedBuffer<float> x(values);
      GuardedBuffer<int8_t> codes(values.size());
      EncodeInt8(x.data(), values.size(), how, codes.data());
      for (size_t i = 0; i < values.size(); ++i) {
        const float scaled = values[i] * how.factor;
        const float exact = std::clamp(std::nearbyint(scaled + how.offset), how.low, how.high);
        ASSERT_EQ(codes[i], std::isnan(values[i]) ? 0 : static_cast<int>(exact)) << values[i];
      }
    }
  });
}

// The vectors of a row and its tail: the codes of a row's beginning are those of the whole row.
TEST(Encoders, RowsOfEverySize) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(36);
    const std::vector<float> x = testing::RandomFloats(random, 2880, 20.0f);
    for (size_t n : kSizes) {
      const GuardedBuffer<float> row(
          std::vector<float>(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(n)));
      GuardedBuffer<int8_t> int8(n);
      GuardedBuffer<uint8_t> e4m3(n);
      GuardedBuffer<uint8_t> e2m1((n + 1) / 2);
      EncodeInt8(row.data(), n, {.factor = 3.0f}, int8.data());
      EncodeE4M3Row(row.data(), n, 0.25f, e4m3.data());
      EncodeE2M1Row(row.data(), n, 8.0f, MxRounding::kHalfToEven, e2m1.data());
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(int8[i], std::clamp(std::nearbyint(x[i] * 3.0f), -128.0f, 127.0f)) << n;
        ASSERT_EQ(e4m3[i], EncodeE4M3(x[i] / 0.25f)) << n;
        const int code = i % 2 == 0 ? e2m1[i / 2] & 15 : e2m1[i / 2] >> 4;
        ASSERT_EQ(code, EncodeE2M1(x[i] / 8.0f, MxRounding::kHalfToEven)) << n;
      }
    }
  });
}

// Random bytes of n codes in a guarded buffer.
GuardedBuffer<uint8_t>& RandomBytes(std::mt19937_64& random, GuardedBuffer<uint8_t>& bytes) {
  for (uint8_t& byte : bytes.span()) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(DecodeRow, EqualsTheScalarDecoder) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(33);
    for (DType dtype : {DType::kI8, DType::kU8, DType::kI4, DType::kU4, DType::kF8E4M3,
                        DType::kF4E2M1, DType::kF32, DType::kF16, DType::kBF16}) {
      for (DType scale_dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E8M0}) {
        for (size_t n : {1u, 2u, 3u, 31u, 32u, 33u, 64u, 127u, 130u, 515u, 1031u}) {
          for (size_t group : {1u, 5u, 32u, 128u, 4096u}) {
            const size_t groups = (n + group - 1) / group;
            GuardedBuffer<uint8_t> q(BytesOf(dtype, n));
            GuardedBuffer<uint8_t> scale(groups * DTypeBytes(scale_dtype));
            GuardedBuffer<uint8_t> zero(groups);
            RandomBytes(random, q);
            RandomBytes(random, scale);
            RandomBytes(random, zero);
            for (int variant = 0; variant < 4; ++variant) {
              CodeRow row{dtype, q.data(), n, scale_dtype, nullptr, nullptr, group};
              if ((variant & 1) != 0) row.scale = scale.data();
              if ((variant & 2) != 0) row.zero = zero.data();
              GuardedBuffer<float> out(n);
              std::vector<float> expected(n);
              DecodeRow(row, out.data());
              DecodeRowReference(row, expected.data());
              for (size_t i = 0; i < n; ++i) {
                if (std::isnan(expected[i])) {
                  ASSERT_TRUE(std::isnan(out[i])) << i;
                } else {
                  ASSERT_EQ(out[i], expected[i])
                      << DTypeName(dtype) << " " << DTypeName(scale_dtype) << " n " << n << " i "
                      << i;
                }
              }
            }
          }
        }
      }
    }
  });
}

TEST(DecodeRow, SizesOfModels) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(37);
    for (DType dtype :
         {DType::kI8, DType::kU8, DType::kI4, DType::kU4, DType::kF8E4M3, DType::kF4E2M1}) {
      for (size_t n : {192u, 896u, 2880u}) {
        GuardedBuffer<uint8_t> q(BytesOf(dtype, n));
        GuardedBuffer<uint8_t> zero((n + 127) / 128);
        const GuardedBuffer<float> scale(testing::RandomFloats(random, (n + 127) / 128));
        RandomBytes(random, q);
        RandomBytes(random, zero);
        const CodeRow row{dtype, q.data(), n, DType::kF32, scale.data(), zero.data(), 128};
        GuardedBuffer<float> out(n);
        std::vector<float> expected(n);
        DecodeRow(row, out.data());
        DecodeRowReference(row, expected.data());
        for (size_t i = 0; i < n; ++i) {
          ASSERT_TRUE(out[i] == expected[i] || (std::isnan(out[i]) && std::isnan(expected[i])))
              << DTypeName(dtype) << " n " << n << " i " << i;
        }
      }
    }
  });
}

TEST(DecodeRow, EveryCodeOfEveryType) {
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
  testing::ForEachTarget([&] {
    for (DType dtype :
         {DType::kI8, DType::kU8, DType::kI4, DType::kU4, DType::kF8E4M3, DType::kF4E2M1}) {
      const size_t n = 256 * 8 / DTypeBits(dtype);
      std::vector<float> out(n);
      DecodeRow({dtype, bytes.data(), n, DType::kF32, nullptr, nullptr, 1}, out.data());
      for (size_t i = 0; i < n; ++i) {
        const auto code = static_cast<uint8_t>(i);
        const uint8_t nibble = i % 2 == 0 ? (i / 2) & 15 : static_cast<uint8_t>(i / 2) >> 4;
        float expected = 0;
        switch (dtype) {
          case DType::kI8: expected = static_cast<int8_t>(code); break;
          case DType::kU8: expected = code; break;
          case DType::kI4: expected = static_cast<float>(nibble < 8 ? nibble : nibble - 16); break;
          case DType::kU4: expected = nibble; break;
          case DType::kF8E4M3: expected = DecodeE4M3(code); break;
          default: expected = DecodeE2M1(nibble); break;
        }
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(out[i]));
        } else {
          EXPECT_EQ(out[i], expected) << DTypeName(dtype) << " " << i;
        }
      }
    }
  });
}

TEST(DecodeToInt8, EqualsTheScalarDecoder) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(34);
    for (DType dtype : {DType::kI8, DType::kI4}) {
      for (size_t n : kSizes) {
        GuardedBuffer<uint8_t> q(BytesOf(dtype, n));
        RandomBytes(random, q);
        GuardedBuffer<int8_t> out(n);
        DecodeToInt8(dtype, q.data(), n, out.data());
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], CodeAt(dtype, q.data(), i));
      }
    }
  });
}

struct Problem {
  size_t m, n, k;
};

// `value(i)` gives the codes: random ones, or the extremes that saturate where they can.
template <typename Value>
void CheckProduct(const Problem& problem, const Value& value) {
  GuardedBuffer<int8_t> a(problem.m * problem.k);
  GuardedBuffer<int8_t> w(problem.n * problem.k);
  for (size_t i = 0; i < a.size(); ++i) a[i] = value(i);
  for (size_t i = 0; i < w.size(); ++i) w[i] = value(i + 1);
  std::vector<const int8_t*> rows;
  for (size_t m = 0; m < problem.m; ++m) rows.push_back(a.data() + m * problem.k);
  GuardedBuffer<int32_t> out(problem.m * problem.n);
  std::vector<int32_t> expected(problem.m * problem.n);
  const MatmulI8Args args{rows.data(), problem.m, w.data(), problem.k,
                          problem.n,   problem.k, problem.n};
  MatmulI8I8(args, out.data());
  MatmulI8I8Reference(args, expected.data());
  std::vector<float> a_scale(problem.m, 0.3f);
  std::vector<float> w_scale(problem.n, 0.7f);
  GuardedBuffer<float> scaled(problem.m * problem.n);
  MatmulI8I8Scaled(args, a_scale.data(), w_scale.data(), scaled.data());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(out[i], expected[i]) << problem.m << " " << problem.n << " " << problem.k;
    ASSERT_EQ(scaled[i], static_cast<float>(expected[i]) * (0.3f * 0.7f));
  }
}

TEST(MatmulI8I8, IsExact) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(35);
    const auto any = [&](size_t) { return static_cast<int8_t>(random()); };
    for (size_t m : {0u, 1u, 2u, 3u, 4u, 5u, 9u}) {
      for (size_t n : {0u, 1u, 3u, 4u, 5u, 9u}) {
        for (size_t k : {0u, 1u, 7u, 15u, 16u, 17u, 63u, 64u, 65u, 131u})
          CheckProduct({m, n, k}, any);
      }
    }
    CheckProduct({5, 192, 896}, any);
    CheckProduct({3, 1, 2880}, any);
    CheckProduct({2, 7, 192}, any);
    CheckProduct({400, 9, 1024}, any);  // more rows than stay in L2
  });
}

TEST(MatmulI8I8, ExtremesNeitherSaturateNorOverflow) {
  testing::ForEachTarget([] {
    for (size_t k : {64u, 70u, 65536u}) {
      CheckProduct({3, 5, k}, [](size_t) { return int8_t{-128}; });
      CheckProduct({3, 5, k}, [](size_t) { return int8_t{127}; });
      CheckProduct({3, 5, k}, [](size_t i) { return i % 2 == 0 ? int8_t{127} : int8_t{-128}; });
    }
  });
}

}  // namespace
}  // namespace switchyard::kernels
