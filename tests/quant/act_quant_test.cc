// Quantisers of activations, of every kind.
#include "quant/act_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "testing/errors.h"
#include "testing/quant_formats.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::quant {
namespace {

using testing::AllActQuants;
using testing::RowElement;

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kCols[] = {1, 31, 32, 33, 128, 130, 192, 257, 896, 2880};

class ActQuantTest : public ::testing::Test {
 protected:
  ActQuant Of(ActQuantKind kind) const {
    for (const ActQuant& how : AllActQuants()) {
      if (how.kind == kind) return how;
    }
    return {};
  }
  // Rows of very different sizes; the first is all zero.
  std::vector<float> RandomRows(size_t rows, size_t cols) {
    std::vector<float> x = testing::RandomFloats(random_, rows * cols);
    for (size_t i = 0; i < rows; ++i) {
      const float size = i == 0 ? 0.0f : std::pow(10.0f, static_cast<float>(i % 5) - 2);
      for (size_t k = 0; k < cols; ++k) x[i * cols + k] *= size;
    }
    return x;
  }

  ThreadPool pool_{3};
  Arena arena_;
  ExecContext context_{pool_, arena_};
  std::mt19937_64 random_ = testing::MakeRandom(41);
};

// The largest distance of a value from its code's value, as a multiple of the scale.
double Step(const ActQuant& how, double magnitude, double scale) {
  switch (how.kind) {
    case ActQuantKind::kInt8Token:
    case ActQuantKind::kInt4Token: return scale * 0.5001;
    case ActQuantKind::kMxFp4: return std::max(scale * 0.25, magnitude / 4) + scale * 2;
    default: return std::max(magnitude / 16, scale * 0x1p-10) * 1.0001;
  }
}

TEST_F(ActQuantTest, ValuesAreWithinAStep) {
  testing::ForEachTarget([&] {
    for (const ActQuant& how : AllActQuants()) {
      if (how.kind == ActQuantKind::kNone || how.kind == ActQuantKind::kInt8Static ||
          how.kind == ActQuantKind::kFp8TensorStatic)
        continue;
      for (size_t cols : kCols) {
        SCOPED_TRACE(std::string(ActQuantKindName(how.kind)) + " " + std::to_string(cols));
        ArenaScope scope(arena_);
        const std::vector<float> x = RandomRows(7, cols);
        const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 7, cols), how);
        ASSERT_EQ(rows.rows, 7u);
        ASSERT_EQ(rows.cols, cols);
        std::vector<float> back(x.size());
        DequantizeRows(context_, rows, Rows(back.data(), 7, cols));
        for (size_t i = 0; i < 7; ++i) {
          for (size_t k = 0; k < cols; ++k) {
            const float value = x[i * cols + k];
            const double exact = RowElement(rows, i, k);
            ASSERT_EQ(back[i * cols + k], static_cast<float>(exact));
            const double scale = kernels::ScaleAt(rows.scale_dtype, rows.scale,
                                                  i * rows.scale_stride + k / rows.scale_cols);
            // A floor rule may saturate: the top value loses up to an eighth (e4m3).
            const double slack = how.kind == ActQuantKind::kMxFp8 ? std::fabs(value) / 8 : 0.0;
            ASSERT_NEAR(exact, value, Step(how, std::fabs(value), scale) + slack) << i << " " << k;
          }
        }
      }
    }
  });
}

TEST_F(ActQuantTest, LargestValueReachesTheLargestCode) {
  const std::vector<float> x = {0.5f, -3.0f, 1.0f, 2.9f};
  const ConstRows rows(x.data(), 1, 4);
  const QuantRows int8 = QuantizeRows(context_, rows, Of(ActQuantKind::kInt8Token));
  EXPECT_EQ(kernels::CodeAt(int8.dtype, int8.Row(0), 1), -127);
  EXPECT_EQ(kernels::ScaleAt(int8.scale_dtype, int8.scale, 0), 3.0f / 127.0f);
  const QuantRows int4 = QuantizeRows(context_, rows, Of(ActQuantKind::kInt4Token));
  EXPECT_EQ(int4.dtype, DType::kI8);
  EXPECT_EQ(kernels::CodeAt(int4.dtype, int4.Row(0), 1), -7);
  const QuantRows fp8 = QuantizeRows(context_, rows, Of(ActQuantKind::kFp8Token));
  EXPECT_EQ(kernels::CodeAt(fp8.dtype, fp8.Row(0), 1), -448);
}

TEST_F(ActQuantTest, MxRules) {
  // amax 7: floor(log2 7) - 2 = 0 saturates at 6; ceil(log2(7 / 6)) = 1 does not.
  const std::vector<float> x = {7.0f, 2.5f, 0.75f, -0.25f};
  ActQuant how = Of(ActQuantKind::kMxFp4);
  const QuantRows floor = QuantizeRows(context_, ConstRows(x.data(), 1, 4), how);
  EXPECT_EQ(RowElement(floor, 0, 0), 6.0);
  EXPECT_EQ(RowElement(floor, 0, 1), 2.0);
  EXPECT_EQ(RowElement(floor, 0, 2), 1.0);  // half to even
  how.mx_rounding = MxRounding::kHalfToZero;
  EXPECT_EQ(RowElement(QuantizeRows(context_, ConstRows(x.data(), 1, 4), how), 0, 2), 0.5);
  how.mx_rule = MxScaleRule::kCeil;
  const QuantRows ceil = QuantizeRows(context_, ConstRows(x.data(), 1, 4), how);
  EXPECT_EQ(kernels::ScaleAt(ceil.scale_dtype, ceil.scale, 0), 2.0f);
  EXPECT_EQ(RowElement(ceil, 0, 0), 6.0);
}

TEST(MxExponent, ExactAtPowersOfTwo) {
  constexpr auto kFloor = MxScaleRule::kOcpFloor;
  constexpr auto kCeil = MxScaleRule::kCeil;
  for (int e = -100; e <= 100; e += 25) {
    const float largest = std::ldexp(6.0f, e);
    EXPECT_EQ(MxExponent(largest, kCeil, 6.0f, 2), e);
    EXPECT_EQ(MxExponent(std::nextafter(largest, kInf), kCeil, 6.0f, 2), e + 1);
    EXPECT_EQ(MxExponent(std::ldexp(448.0f, e), kCeil, 448.0f, 8), e);
    EXPECT_EQ(MxExponent(std::ldexp(1.0f, e), kFloor, 6.0f, 2), e - 2);
    EXPECT_EQ(MxExponent(std::nextafter(std::ldexp(1.0f, e), 0.0f), kFloor, 448.0f, 8), e - 9);
  }
  EXPECT_EQ(MxExponent(0.0f, kCeil, 6.0f, 2), -127);
  EXPECT_LT(MxExponent(1e-45f, kFloor, 448.0f, 8), -127);  // the encoder clamps it
}

TEST_F(ActQuantTest, ZerosGiveZeroCodesAndFiniteScales) {
  const std::vector<float> x(2 * 130, 0.0f);
  for (const ActQuant& how : AllActQuants()) {
    if (how.kind == ActQuantKind::kNone) continue;
    const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 2, 130), how);
    for (size_t k = 0; k < 130; ++k) {
      const size_t at = rows.scale_stride + k / rows.scale_cols;
      EXPECT_TRUE(std::isfinite(kernels::ScaleAt(rows.scale_dtype, rows.scale, at)));
      EXPECT_EQ(RowElement(rows, 1, k), 0.0) << ActQuantKindName(how.kind);
    }
  }
}

TEST_F(ActQuantTest, TinyAndHugeValuesStayFinite) {
  for (float size : {1e-45f, 1e-38f, 3e38f}) {
    const std::vector<float> x(64, size);
    for (const ActQuant& how : AllActQuants()) {
      const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 1, 64), how);
      for (size_t k = 0; k < 64; ++k) {
        const double value = RowElement(rows, 0, k);
        EXPECT_TRUE(std::isfinite(value));
        EXPECT_LE(std::fabs(value), 3.5e38) << ActQuantKindName(how.kind);
      }
    }
  }
}

// A NaN or an infinity shows in its row (or group) and in no other one.
TEST_F(ActQuantTest, NonFiniteValuesStayVisibleAndLocal) {
  for (const ActQuant& how : AllActQuants()) {
    if (how.kind == ActQuantKind::kInt8Static) continue;
    for (float bad : {kNan, kInf, -kInf}) {
      SCOPED_TRACE(std::string(ActQuantKindName(how.kind)) + " " + std::to_string(bad));
      std::vector<float> x = RandomRows(3, 130);
      x[130 + 77] = bad;
      const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 3, 130), how);
      std::vector<float> back(x.size());
      DequantizeRows(context_, rows, Rows(back.data(), 3, 130));
      if (how.kind == ActQuantKind::kFp8TensorStatic && std::isinf(bad)) {
        EXPECT_EQ(back[130 + 77], std::copysign(448.0f * how.scale, bad));
      } else if (how.kind == ActQuantKind::kNone) {
        EXPECT_EQ(std::isnan(back[130 + 77]), std::isnan(bad));
      } else {
        EXPECT_TRUE(std::isnan(back[130 + 77]));
      }
      for (size_t k = 0; k < 130; ++k) {
        EXPECT_TRUE(std::isfinite(back[k]));
        EXPECT_TRUE(std::isfinite(back[2 * 130 + k]));
      }
    }
  }
}

TEST_F(ActQuantTest, StaticInt8ClampsAndWritesZeroForNaN) {
  const std::vector<float> x = {0.0f, 1e9f, -kInf, kNan, 0.25f};
  ActQuant how;
  how.kind = ActQuantKind::kInt8Static;
  how.scale = 0.5f;
  how.offset = 3.0f;
  const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 1, 5), how);
  const auto* codes = reinterpret_cast<const int8_t*>(rows.Row(0));
  EXPECT_EQ(std::vector<int>(codes, codes + 5), (std::vector<int>{3, 127, -128, 0, 4}));
  EXPECT_EQ(RowElement(rows, 0, 4), 0.5);
}

TEST_F(ActQuantTest, PaddingIsNotReadAndDoesNotCount) {
  std::vector<float> x = RandomRows(4, 40);
  for (size_t k = 0; k < 40; ++k) x[2 * 40 + k] = k % 2 == 0 ? kNan : 1e30f;
  const std::vector<uint8_t> counted = {1, 1, 0, 1};
  for (const ActQuant& how : AllActQuants()) {
    if (how.kind == ActQuantKind::kNone) continue;
    const QuantRows rows = QuantizeRows(context_, ConstRows(x.data(), 4, 40), how, counted);
    std::vector<float> with_zeros = x;
    std::fill_n(with_zeros.begin() + 80, 40, 0.0f);
    const QuantRows expected = QuantizeRows(context_, ConstRows(with_zeros.data(), 4, 40), how);
    for (size_t i : {0u, 1u, 3u}) {
      for (size_t k = 0; k < 40; ++k)
        EXPECT_EQ(RowElement(rows, i, k), RowElement(expected, i, k)) << ActQuantKindName(how.kind);
    }
    EXPECT_EQ(kernels::CodeAt(rows.dtype, rows.Row(2), 0), 0);
  }
}

// Rows do not influence each other, so batches of any size give the same codes.
TEST_F(ActQuantTest, RowsAreIndependent) {
  const size_t cols = 130;
  const std::vector<float> x = RandomRows(40, cols);
  for (const ActQuant& how : AllActQuants()) {
    if (how.kind == ActQuantKind::kNone || how.kind == ActQuantKind::kFp8Tensor) continue;
    const QuantRows all = QuantizeRows(context_, ConstRows(x.data(), 40, cols), how);
    for (size_t i : {0u, 17u, 39u}) {
      const QuantRows one = QuantizeRows(context_, ConstRows(x.data() + i * cols, 1, cols), how);
      EXPECT_EQ(std::memcmp(one.Row(0), all.Row(i), BytesOf(all.dtype, cols)), 0);
      const size_t scale_bytes = all.scale_stride * DTypeBytes(all.scale_dtype);
      EXPECT_EQ(std::memcmp(one.scale, all.scale + i * scale_bytes, scale_bytes), 0);
      const QuantRows slice = all.Slice(i, 1);
      for (size_t k = 0; k < cols; ++k) EXPECT_EQ(RowElement(slice, 0, k), RowElement(all, i, k));
    }
  }
}

// Rows are spread over the threads, and the scale over all of them is found in parts.
TEST_F(ActQuantTest, BitsDoNotDependOnThreads) {
  testing::ForEachTarget([&] {
    for (size_t cols : {1u, 33u, 192u}) {
      const std::vector<float> x = RandomRows(50, cols);  // four tasks
      for (const ActQuant& how : AllActQuants()) {
        SCOPED_TRACE(std::string(ActQuantKindName(how.kind)) + " " + std::to_string(cols));
        const auto run = [&](size_t num_threads) {
          ThreadPool pool(num_threads);
          Arena arena;
          ExecContext context{pool, arena};
          const QuantRows rows = QuantizeRows(context, ConstRows(x.data(), 50, cols), how);
          std::vector<std::byte> bytes;
          for (size_t i = 0; i < rows.rows; ++i) {
            bytes.insert(bytes.end(), rows.Row(i), rows.Row(i) + BytesOf(rows.dtype, cols));
            if (!rows.has_scale()) continue;
            bytes.insert(bytes.end(), rows.ScaleRow(i), rows.ScaleRow(i) + rows.ScaleRowBytes());
          }
          std::vector<float> back(x.size());
          DequantizeRows(context, rows, Rows(back.data(), 50, cols));
          const auto values = std::as_bytes(std::span(back));
          bytes.insert(bytes.end(), values.begin(), values.end());
          return bytes;
        };
        const std::vector<std::byte> expected = run(1);
        for (size_t num_threads : {2u, 3u})
          EXPECT_TRUE(run(num_threads) == expected) << num_threads << " threads";
      }
    }
  });
}

TEST_F(ActQuantTest, NoRowsAndNoColumns) {
  for (const ActQuant& how : AllActQuants()) {
    const std::vector<float> x(4);
    const QuantRows none = QuantizeRows(context_, ConstRows(x.data(), 0, 4), how);
    EXPECT_EQ(none.rows, 0u);
    DequantizeRows(context_, none, Rows(nullptr, 0, 4));
    const QuantRows empty = QuantizeRows(context_, ConstRows(x.data(), 4, 0), how);
    EXPECT_EQ(empty.cols, 0u);
    DequantizeRows(context_, empty, Rows(nullptr, 4, 0));
  }
}

TEST_F(ActQuantTest, DequantizesPlainRows) {
  const std::vector<BF16> brains = {ToBF16(1.5f), ToBF16(-2.0f)};
  QuantRows x;
  x.dtype = DType::kBF16;
  x.rows = 1;
  x.cols = 2;
  x.stride = 4;
  x.data = reinterpret_cast<const std::byte*>(brains.data());
  std::vector<float> out(2);
  DequantizeRows(context_, x, Rows(out.data(), 1, 2));
  EXPECT_EQ(out, (std::vector<float>{1.5f, -2.0f}));
  const std::vector<F16> halves = {ToF16(0.25f), ToF16(3.0f)};
  x.dtype = DType::kF16;
  x.data = reinterpret_cast<const std::byte*>(halves.data());
  DequantizeRows(context_, x, Rows(out.data(), 1, 2));
  EXPECT_EQ(out, (std::vector<float>{0.25f, 3.0f}));
}

TEST_F(ActQuantTest, RefusesBadSettings) {
  const std::vector<float> x(4, 1.0f);
  ActQuant how;
  for (float scale : {0.0f, -1.0f, kNan, kInf}) {
    how.kind = ActQuantKind::kFp8TensorStatic;
    how.scale = scale;
    testing::ExpectError(ErrorCode::kInvalidArgument, {"fp8_tensor_static", "scale"},
                         [&] { QuantizeRows(context_, ConstRows(x.data(), 1, 4), how); });
  }
  how.kind = ActQuantKind::kFp8Group;
  how.group = 0;
  testing::ExpectError(ErrorCode::kInvalidArgument, {"group"},
                       [&] { QuantizeRows(context_, ConstRows(x.data(), 1, 4), how); });
}

}  // namespace
}  // namespace switchyard::quant
