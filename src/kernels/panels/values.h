// What codes stand for, as tables.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/panels/panel.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::kernels {

// Source: ggml's kvalues_iq4nl.
inline constexpr std::array<int8_t, 16> kIq4NlValues = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                        1,    13,   25,  38,  53,  69,  89,  113};
// Twice e2m1.
inline constexpr std::array<int8_t, 16> kE2M1Values = {0, 1,  2,  3,  4,  6,  8,  12,
                                                       0, -1, -2, -3, -4, -6, -8, -12};

// What a value of the tables is multiplied with to be that of the code.
constexpr float TableFactor(const PanelFormat& format) {
  switch (format.codes) {
    case PanelCodes::kIq1:
    case PanelCodes::kIq2Xxs:
    case PanelCodes::kIq2Xs:
    case PanelCodes::kIq2S: return 0.125f;
    case PanelCodes::kIq3Xxs: return 0.25f;
    default: break;
  }
  return format.values == PanelValues::kE2M1 ? 0.5f : 1.0f;
}

// What is added to values to make them unsigned bytes.
constexpr uint8_t ByteBias(const PanelFormat& format) {
  switch (format.values) {
    case PanelValues::kLinear: return format.bias;
    case PanelValues::kIq4Nl: return 128;
    case PanelValues::kE2M1: return 12;
  }
  return 0;
}

namespace internal {

constexpr std::array<uint8_t, 16> Biased(const std::array<int8_t, 16>& values, int bias) {
  std::array<uint8_t, 16> bytes{};
  for (size_t i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(values[i] + bias);
  return bytes;
}
alignas(16) inline constexpr std::array<uint8_t, 16> kIq4NlBytes = Biased(kIq4NlValues, 128);
alignas(16) inline constexpr std::array<uint8_t, 16> kE2M1Bytes = Biased(kE2M1Values, 12);

constexpr uint16_t BF16BitsOf(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}
using Shorts = std::array<uint16_t, 64>;
constexpr Shorts LinearShorts(int bias) {
  Shorts shorts{};
  for (size_t i = 0; i < 64; ++i)
    shorts[i] = BF16BitsOf(static_cast<float>(static_cast<int>(i) - bias));
  return shorts;
}
constexpr Shorts TableShorts(const std::array<int8_t, 16>& values) {
  Shorts shorts{};
  for (size_t i = 0; i < 64; ++i) shorts[i] = BF16BitsOf(static_cast<float>(values[i % 16]));
  return shorts;
}
inline constexpr Shorts kLinear0 = LinearShorts(0), kLinear1 = LinearShorts(1),
                        kLinear4 = LinearShorts(4), kLinear8 = LinearShorts(8),
                        kLinear16 = LinearShorts(16), kLinear32 = LinearShorts(32),
                        kIq4NlShorts = TableShorts(kIq4NlValues),
                        kE2M1Shorts = TableShorts(kE2M1Values);

constexpr std::array<uint16_t, 128> E4M3Shorts() {
  std::array<uint16_t, 128> shorts{};
  for (uint32_t i = 0; i < 127; ++i)
    shorts[i] = BF16BitsOf(switchyard::internal::MagnitudeOf<3, 7>(i));
  shorts[127] = 0x7fc0;
  return shorts;
}

}  // namespace internal

// 16 bytes, value + ByteBias of each code; not read with kLinear.
constexpr const uint8_t* BytesTable(const PanelFormat& format) {
  return format.values == PanelValues::kIq4Nl ? internal::kIq4NlBytes.data()
                                              : internal::kE2M1Bytes.data();
}

// 64 values in bf16, of codes of up to 6 bits.
inline const uint16_t* ShortValues(const PanelFormat& format) {
  if (format.values == PanelValues::kIq4Nl) return internal::kIq4NlShorts.data();
  if (format.values == PanelValues::kE2M1) return internal::kE2M1Shorts.data();
  switch (format.bias) {
    case 0: return internal::kLinear0.data();
    case 1: return internal::kLinear1.data();
    case 4: return internal::kLinear4.data();
    case 8: return internal::kLinear8.data();
    case 16: return internal::kLinear16.data();
    case 32: return internal::kLinear32.data();
    default: SY_CHECK(false && "a bias of small codes"); return nullptr;
  }
}

// Magnitudes of e4m3 in bf16.
inline constexpr std::array<uint16_t, 128> kE4M3AsBF16 = internal::E4M3Shorts();

}  // namespace switchyard::kernels
