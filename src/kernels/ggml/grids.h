// The codebooks of ggml's IQ types: what values a code of several elements stands for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace switchyard::kernels::ggml {

namespace packed {
#include "kernels/ggml/grids.inc"
}  // namespace packed

// Entry i of a codebook is the kWidth values from i * kWidth on. `values` are those that the 2- or
// 3-bit indices of the packed form stand for.
template <size_t kWidth, size_t kEntries, size_t kValues>
constexpr std::array<int8_t, kEntries * kWidth> Unpack(const uint16_t (&entries)[kEntries],
                                                       const int8_t (&values)[kValues]) {
  constexpr unsigned kBits = kValues > 4 ? 3 : 2;
  std::array<int8_t, kEntries * kWidth> grid{};
  for (size_t i = 0; i < grid.size(); ++i) {
    const unsigned shift = kBits * static_cast<unsigned>(i % kWidth);
    grid[i] = values[(entries[i / kWidth] >> shift) & ((1u << kBits) - 1)];
  }
  return grid;
}

inline constexpr int8_t kIq2Values[3] = {8, 25, 43};
inline constexpr int8_t kIq3XxsValues[8] = {4, 12, 20, 28, 36, 44, 52, 62};
inline constexpr int8_t kIq3SValues[8] = {1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr int8_t kIq1Values[3] = {-1, 0, 1};

inline constexpr auto kIq2XxsGrid = Unpack<8>(packed::kIq2Xxs, kIq2Values);
inline constexpr auto kIq2XsGrid = Unpack<8>(packed::kIq2Xs, kIq2Values);
inline constexpr auto kIq2SGrid = Unpack<8>(packed::kIq2S, kIq2Values);
inline constexpr auto kIq3XxsGrid = Unpack<4>(packed::kIq3Xxs, kIq3XxsValues);
inline constexpr auto kIq3SGrid = Unpack<4>(packed::kIq3S, kIq3SValues);
inline constexpr auto kIq1Grid = Unpack<8>(packed::kIq1S, kIq1Values);  // also of IQ1_M

// The values of the 4-bit codes of IQ4_NL and IQ4_XS, and twice those of MXFP4 (e2m1).
inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kE2M1Doubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace switchyard::kernels::ggml
