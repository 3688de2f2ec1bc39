// Encoders of ggml's blocks: their error against plain encodings of the same values, and rows that
// are hard to scale.
#include "quant/ggml_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/decode/decode.h"
#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"
#include "testing/errors.h"
#include "testing/goldens.h"
#include "testing/guarded.h"
#include "testing/random.h"

namespace switchyard::quant {
namespace {

constexpr DType kTypes[] = {DType::kGgmlQ40, DType::kGgmlQ41, DType::kGgmlQ50,   DType::kGgmlQ51,
                            DType::kGgmlQ80, DType::kGgmlQ2K, DType::kGgmlQ3K,   DType::kGgmlQ4K,
                            DType::kGgmlQ5K, DType::kGgmlQ6K, DType::kGgmlIq4Nl, DType::kGgmlMxFp4};

std::vector<float> Decode(DType dtype, const std::byte* bytes, size_t n) {
  std::vector<float> values(n);
  kernels::DecodeRow({dtype, bytes, n, DType::kF32, nullptr, nullptr, 1}, values.data());
  return values;
}

std::vector<float> RoundTrip(DType dtype, std::span<const float> x) {
  testing::GuardedBuffer<std::byte> bytes(BytesOf(dtype, x.size()));
  EncodeGgmlRow(dtype, x, bytes.span());
  return Decode(dtype, bytes.data(), x.size());
}

double Rmse(std::span<const float> x, std::span<const float> y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i)
    sum += (static_cast<double>(x[i]) - static_cast<double>(y[i])) *
           (static_cast<double>(x[i]) - static_cast<double>(y[i]));
  return std::sqrt(sum / static_cast<double>(x.size()));
}

double Norm(std::span<const float> x) { return Rmse(x, std::vector<float>(x.size())); }

// What the relative error of a format is of values without outliers.
double Tolerance(DType dtype) {
  const double steps = std::pow(2.0, std::floor(BitsPerElement(dtype)) - 1);
  return 1.2 / steps;
}

TEST(EncodeGgmlRow, ErrsLessThanAPlainEncoder) {
  const auto files = ModelFiles::OpenFolder(testing::LocalGoldenDir());
  const SafetensorsFile golden = SafetensorsFile::Parse("", files->Map("ggml_blocks.safetensors"));
  for (DType dtype : kTypes) {
    ASSERT_TRUE(CanEncodeGgml(dtype));
    const std::string name(DTypeName(dtype));
    const TensorInfo* x_info = golden.Find(name + ".gauss.x");
    const TensorInfo* bytes_info = golden.Find(name + ".gauss.bytes");
    ASSERT_TRUE(x_info != nullptr && bytes_info != nullptr) << name;
    const TensorView view = golden.View(*x_info);
    const TensorView bytes = golden.View(*bytes_info);
    const std::span<const float> x(reinterpret_cast<const float*>(view.data), view.NumElements());
    const double plain = Rmse(x, Decode(dtype, bytes.data, x.size()));
    const double ours = Rmse(x, RoundTrip(dtype, x));
    EXPECT_LE(ours, plain * 1.001) << name << ": " << ours / Norm(x) << " of the values";
  }
}

TEST(EncodeGgmlRow, ZerosStayZeros) {
  const std::vector<float> zeros(512);
  for (DType dtype : kTypes) EXPECT_EQ(RoundTrip(dtype, zeros), zeros) << DTypeName(dtype);
}

TEST(EncodeGgmlRow, ConstantsAreKept) {
  for (DType dtype : kTypes) {
    for (float value : {1.0f, -1.0f, 0.37f, -250.0f, 1e-3f}) {
      const std::vector<float> x(512, value);
      const std::vector<float> y = RoundTrip(dtype, x);
      EXPECT_LT(Rmse(x, y), 0.08 * std::fabs(static_cast<double>(value)))
          << DTypeName(dtype) << " " << value;
    }
  }
}

TEST(EncodeGgmlRow, ErrorIsTheSameAtEveryMagnitude) {
  auto random = testing::MakeRandom(72);
  std::vector<float> x = testing::RandomFloats(random, 1024);
  for (DType dtype : kTypes) {
    for (float magnitude : {1e-2f, 1.0f, 1e4f}) {
      std::vector<float> scaled = x;
      for (float& value : scaled) value *= magnitude;
      EXPECT_LT(Rmse(scaled, RoundTrip(dtype, scaled)), Tolerance(dtype) * Norm(scaled))
          << DTypeName(dtype) << " " << magnitude;
    }
  }
}

// One value far from the rest takes its block, but no other.
TEST(EncodeGgmlRow, OneHugeValueSpoilsItsBlockOnly) {
  auto random = testing::MakeRandom(73);
  for (DType dtype : kTypes) {
    std::vector<float> x = testing::RandomFloats(random, 1024);
    x[5] = 3e4f;
    const std::vector<float> y = RoundTrip(dtype, x);
    EXPECT_NEAR(y[5], x[5], 0.17 * 3e4) << DTypeName(dtype);
    const std::span<const float> rest(x.data() + 256, 768);
    EXPECT_LT(Rmse(rest, std::span(y).subspan(256)), Tolerance(dtype) * Norm(rest))
        << DTypeName(dtype);
  }
}

TEST(EncodeGgmlRow, EveryFiniteRowGivesFiniteValues) {
  constexpr float kLimit = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  for (DType dtype : kTypes) {
    for (float huge : {kLimit, -kLimit, 1e30f, 7e4f, 1e-6f, 1e-38f, 1e-42f, kTiny, -kTiny}) {
      std::vector<float> x(256, 0.0f);
      x[3] = huge;
      x[40] = -huge / 2;
      for (float value : RoundTrip(dtype, x)) {
        EXPECT_TRUE(std::isfinite(value)) << DTypeName(dtype) << " " << huge;
        EXPECT_LE(std::fabs(value), std::fabs(huge) * 1.34f + 1e-7f) << DTypeName(dtype);
      }
    }
  }
}

TEST(EncodeGgmlRow, EncodingTwiceChangesLittle) {
  auto random = testing::MakeRandom(74);
  const std::vector<float> x = testing::RandomFloats(random, 512);
  for (DType dtype : kTypes) {
    const std::vector<float> once = RoundTrip(dtype, x);
    EXPECT_LT(Rmse(once, RoundTrip(dtype, once)), 0.6 * Rmse(x, once)) << DTypeName(dtype);
    EXPECT_EQ(RoundTrip(dtype, x), once) << "not deterministic: " << DTypeName(dtype);
  }
}

TEST(EncodeGgmlRow, NaNInfinityAndOtherTypesAreRefused) {
  std::vector<std::byte> out(1024);
  for (DType dtype : kTypes) {
    const std::span<std::byte> bytes(out.data(), BytesOf(dtype, 256));
    for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x(256);
      x[77] = bad;
      testing::ExpectError(ErrorCode::kInvalidArgument, {DTypeName(dtype), "element 77 of a row"},
                           [&] { EncodeGgmlRow(dtype, x, bytes); });
    }
  }
  EXPECT_FALSE(CanEncodeGgml(DType::kGgmlIq2S));
  EXPECT_FALSE(CanEncodeGgml(DType::kBF16));
  testing::ExpectError(ErrorCode::kUnsupported, {"IQ2_S"},
                       [&] { EncodeGgmlRow(DType::kGgmlIq2S, std::vector<float>(256), out); });
}

}  // namespace
}  // namespace switchyard::quant
