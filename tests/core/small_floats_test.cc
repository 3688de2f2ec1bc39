// The 8- and 4-bit floats: every code, and every f32 near a place where the rounding changes.
#include "switchyard/core/small_floats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "switchyard/core/quant_format.h"

namespace switchyard {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// Codes whose values are 0 = v0 < v1 < …: positive and finite.
struct Positive {
  uint8_t first, last;
  std::function<float(uint8_t)> decode;
  std::function<uint8_t(float)> encode;
};

// Between each two neighbours, the middle goes where `tie_up` says, the floats just beside it to
// their own sides.
void CheckMiddles(const Positive& format, const std::function<bool(uint8_t lower)>& tie_up) {
  for (uint8_t code = format.first; code < format.last; ++code) {
    const auto upper = static_cast<uint8_t>(code + 1);
    const float middle = (format.decode(code) + format.decode(upper)) / 2;  // exact
    EXPECT_EQ(format.encode(middle), tie_up(code) ? upper : code) << middle;
    EXPECT_EQ(format.encode(std::nextafter(middle, 0.0f)), code) << middle;
    EXPECT_EQ(format.encode(std::nextafter(middle, kInf)), upper) << middle;
    EXPECT_EQ(format.encode(std::nextafter(format.decode(code), kInf)), code);
    EXPECT_EQ(format.encode(std::nextafter(format.decode(upper), 0.0f)), upper);
  }
}
bool ToEven(uint8_t lower) { return lower % 2 == 1; }

TEST(E4M3, EveryCodeComesBack) {
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<uint8_t>(i);
    const float value = DecodeE4M3(code);
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(EncodeE4M3(value), 0x7f);
      continue;
    }
    const int exponent = (code >> 3) & 15;
    const double expected =
        exponent == 0 ? std::ldexp(code & 7, -9) : std::ldexp(8 + (code & 7), exponent - 10);
    EXPECT_EQ(value, code < 128 ? expected : -expected) << i;
    EXPECT_EQ(std::signbit(value), code >= 128);
    EXPECT_EQ(EncodeE4M3(value), code);
  }
}

TEST(E4M3, RoundsToEvenAndSaturates) {
  CheckMiddles({0, 0x7e, DecodeE4M3, EncodeE4M3}, ToEven);
  for (float large : {449.0f, 464.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(EncodeE4M3(large), 0x7e);
    EXPECT_EQ(EncodeE4M3(-large), 0xfe);
  }
  EXPECT_EQ(EncodeE4M3(0x1p-10f), 0);  // half the smallest value
  EXPECT_EQ(EncodeE4M3(-0x1p-140f), 0x80);
}

TEST(E5M2, EveryCodeComesBack) {
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<uint8_t>(i);
    const float value = DecodeE5M2(code);
    if ((code & 0x7f) > 0x7c) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(EncodeE5M2(value), 0x7f);
      continue;
    }
    EXPECT_EQ(value, ToFloat(F16{static_cast<uint16_t>(code << 8)})) << i;  // the upper byte of f16
    EXPECT_EQ(EncodeE5M2(value), code);
  }
}

TEST(E5M2, RoundsToEvenAndOverflowsToInfinity) {
  CheckMiddles({0, 0x7b, DecodeE5M2, EncodeE5M2}, ToEven);
  EXPECT_EQ(EncodeE5M2(61439.0f), 0x7b);
  for (float large : {61440.0f, 1e30f, kInf}) {
    EXPECT_EQ(EncodeE5M2(large), 0x7c);
    EXPECT_EQ(EncodeE5M2(-large), 0xfc);
  }
}

TEST(E8M0, EveryCodeComesBack) {
  for (int i = 0; i < 255; ++i) {
    const auto code = static_cast<uint8_t>(i);
    EXPECT_EQ(DecodeE8M0(code), std::ldexp(1.0, i - 127));
    EXPECT_EQ(EncodeE8M0(i - 127), code);
  }
  EXPECT_TRUE(std::isnan(DecodeE8M0(255)));
  EXPECT_EQ(EncodeE8M0(-150), 0);
  EXPECT_EQ(EncodeE8M0(128), 254);
}

TEST(E2M1, EveryCodeComesBack) {
  for (MxRounding rounding : {MxRounding::kHalfToEven, MxRounding::kHalfToZero}) {
    for (uint8_t code = 0; code < 16; ++code) {
      EXPECT_EQ(EncodeE2M1(DecodeE2M1(code), rounding), code);
      EXPECT_EQ(std::signbit(DecodeE2M1(code)), code >= 8);
    }
  }
}

TEST(E2M1, RoundsBothWaysAndSaturates) {
  const auto encode = [](MxRounding rounding) {
    return [rounding](float value) { return EncodeE2M1(value, rounding); };
  };
  CheckMiddles({0, 7, DecodeE2M1, encode(MxRounding::kHalfToEven)}, ToEven);
  CheckMiddles({0, 7, DecodeE2M1, encode(MxRounding::kHalfToZero)}, [](uint8_t) { return false; });
  for (MxRounding rounding : {MxRounding::kHalfToEven, MxRounding::kHalfToZero}) {
    EXPECT_EQ(EncodeE2M1(kInf, rounding), 7);
    EXPECT_EQ(EncodeE2M1(-7.5f, rounding), 15);
    EXPECT_EQ(EncodeE2M1(-0.1f, rounding), 8);
    EXPECT_EQ(EncodeE2M1(kNan, rounding), 0);
  }
}

TEST(ActQuant, KindsHaveNames) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(ActQuantKind::kMxFp4); ++kind)
    names.emplace(ActQuantKindName(static_cast<ActQuantKind>(kind)));
  EXPECT_EQ(names.size(), static_cast<size_t>(ActQuantKind::kMxFp4) + 1);
  EXPECT_TRUE(names.contains("fp8_tensor_static"));
  EXPECT_FALSE(names.contains("?"));
}

}  // namespace
}  // namespace switchyard
