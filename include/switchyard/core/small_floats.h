// Floats of 8 and 4 bits, one at a time: the definition that every kernel is tested against.
// Source: the OCP 8-bit floating point and microscaling (MX) specifications; contract 4.1.2, 5.10.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace switchyard {

// Largest finite values.
inline constexpr float kE4M3Max = 448.0f;
inline constexpr float kE5M2Max = 57344.0f;
inline constexpr float kE2M1Max = 6.0f;

// What e2m1 does with a value that lies halfway between two codes.
enum class MxRounding : uint8_t {
  kHalfToEven,  // 0.75 -> 1, 2.5 -> 2: the OCP rule ("nearest_even")
  kHalfToZero   // only what lies strictly above the middle goes up ("half_to_zero")
};

namespace internal {

// Exponent and mantissa bits of a non-negative finite `magnitude`, rounded to nearest even, for a
// float of kMantissa mantissa bits and this exponent bias. Too large values run on into codes
// beyond the format.
template <int kMantissa, int kBias>
constexpr uint32_t RoundMagnitude(float magnitude) {
  constexpr auto kDropped = static_cast<uint32_t>(23 - kMantissa);
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  if (bits < static_cast<uint32_t>(128 - kBias) << 23) {
    // Below the smallest normal value: the f32 adder rounds at the spacing of the subnormals.
    constexpr auto kAnchor =
        std::bit_cast<float>(static_cast<uint32_t>(151 - kBias - kMantissa) << 23);
    return std::bit_cast<uint32_t>(magnitude + kAnchor) - std::bit_cast<uint32_t>(kAnchor);
  }
  const uint32_t rounded = bits + ((1u << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1u);
  return (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
}

// The value of exponent and mantissa bits that are no special code.
template <int kMantissa, int kBias>
constexpr float MagnitudeOf(uint32_t code) {
  constexpr uint32_t kMantissaOne = 1u << kMantissa;
  if (code < kMantissaOne) {
    constexpr auto kSpacing =
        std::bit_cast<float>(static_cast<uint32_t>(128 - kBias - kMantissa) << 23);
    return static_cast<float>(code) * kSpacing;
  }
  return std::bit_cast<float>((code << (23 - kMantissa)) +
                              (static_cast<uint32_t>(127 - kBias) << 23));
}

inline float WithSignOf(uint8_t code, float magnitude) {
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

inline uint8_t SignBit(float value) {
  return static_cast<uint8_t>((std::bit_cast<uint32_t>(value) >> 24) & 0x80u);
}

}  // namespace internal

// e4m3fn: the exact value; NaN for 0x7f and 0xff.
inline float DecodeE4M3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return internal::WithSignOf(code, internal::MagnitudeOf<3, 7>(magnitude));
}

// To nearest, ties to even, saturating at 448 (infinities too). A NaN becomes 0x7f.
inline uint8_t EncodeE4M3(float value) {
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::min(std::fabs(value), kE4M3Max);
  return static_cast<uint8_t>(internal::SignBit(value) | internal::RoundMagnitude<3, 7>(magnitude));
}

// e5m2: the exact value; 0x7c is infinity, the codes above it are NaN.
inline float DecodeE5M2(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude > 0x7c) return std::numeric_limits<float>::quiet_NaN();
  if (magnitude == 0x7c) return internal::WithSignOf(code, std::numeric_limits<float>::infinity());
  return internal::WithSignOf(code, internal::MagnitudeOf<2, 15>(magnitude));
}

// To nearest, ties to even; values too large become infinity, a NaN becomes 0x7f.
inline uint8_t EncodeE5M2(float value) {
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::min(std::fabs(value), 65536.0f);
  return static_cast<uint8_t>(internal::SignBit(value) |
                              internal::RoundMagnitude<2, 15>(magnitude));
}

// e8m0: 2^(code - 127), exact (2^-127 is a subnormal f32); NaN for 255.
inline float DecodeE8M0(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  if (code == 0) return 0x1p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

// The code of 2^exponent, which is clamped to [-127, 127].
inline uint8_t EncodeE8M0(int exponent) {
  return static_cast<uint8_t>(std::clamp(exponent, -127, 127) + 127);
}

// e2m1: 0 .5 1 1.5 2 3 4 6, bit 3 is the sign. Only the low 4 bits of `code` count.
inline float DecodeE2M1(uint8_t code) {
  constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return kValues[code & 15u];
}

// To nearest, saturating at 6 (infinities too). e2m1 has no NaN: a NaN becomes 0, so the scale of
// its block has to show it.
inline uint8_t EncodeE2M1(float value, MxRounding rounding) {
  if (std::isnan(value)) return 0;
  const float magnitude = std::fabs(value);
  // The middle above each code. Halfway values go up where they do and the upper code is even.
  constexpr float kMiddle[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  uint32_t code = 0;
  for (uint32_t i = 0; i < 7; ++i) {
    const bool half_up = rounding == MxRounding::kHalfToEven && i % 2 == 1;
    if (magnitude > kMiddle[i] || (half_up && magnitude == kMiddle[i])) code = i + 1;
  }
  return static_cast<uint8_t>((internal::SignBit(value) >> 4) | code);
}

}  // namespace switchyard
