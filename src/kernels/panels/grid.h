// Codes that lie by super-blocks of 8 units: indices into codebooks and digits of base 3.
//
//   super-block  [ indices of units 0 .. 7 | signs of units 0 .. 7 | high bits of units 0 .. 7 ]
//
//   indices    of entries of 8 columns (4 in IQ3), one word a unit (two): byte b of word j = the
//   low
//              8 bits of index 4j + b
//   signs      one word a unit: bit i of byte b = column 8b + i is negative; not in IQ1
//   high bits  IQ2_XS        4 bits a unit, bit i = bit 8 of index i; one byte for units 2v (the
//   low
//                            nibble) and 2v + 1
//              IQ2_S, IQ3_S  a byte a unit: 2 bits for each index; 1 bit
//              IQ1           a half a unit: nibble i = bits 8 .. 10 of index i, and a bit that is
//              set
//                            if the delta is negative
//
// The files lack the eighth sign of IQ2_XXS, IQ2_XS and IQ3_XXS, which is the parity of the others,
// and IQ1_S has one delta and one scale for 4 entries: there panels are 4 to 8 % larger.
//
// kTernary is 13 words for each super-block, bytes of 5 digits as TQ1_0 has them: byte b holds
//   word j < 8        columns 32 i + 4 j + b of digit i
//   word 8 + j < 12   columns 160 + 16 i + 4 j + b
//   word 12           columns 240 + 4 i + b, i < 4
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "kernels/ggml/grids.h"
#include "kernels/panels/panel.h"

namespace switchyard::kernels {

inline constexpr size_t kSuperUnits = kSuperCols / kUnitCols;
inline constexpr size_t kTernaryWords = 13;

struct GridLayout {
  size_t index_words = 0;  // of a unit; 0 for codes that are no indices
  size_t high_bits = 0;    // of a unit of one row
  bool has_signs = true;

  constexpr size_t entries() const { return 4 * index_words; }  // of a unit
  constexpr size_t signs_at() const { return kSuperUnits * index_words * kWordBytes; }
  constexpr size_t highs_at() const {
    return signs_at() + (has_signs ? kSuperUnits * kWordBytes : 0);
  }
  constexpr size_t super_bytes() const {
    return highs_at() + kSuperUnits * high_bits / 8 * kPanelRows;
  }
};

constexpr GridLayout GridOf(PanelCodes codes) {
  switch (codes) {
    case PanelCodes::kIq1: return {1, 16, false};
    case PanelCodes::kIq2Xxs: return {1, 0};
    case PanelCodes::kIq2Xs: return {1, 4};
    case PanelCodes::kIq2S: return {1, 8};
    case PanelCodes::kIq3Xxs: return {2, 0};
    case PanelCodes::kIq3S: return {2, 8};
    default: return {};
  }
}
constexpr bool IsGrid(PanelCodes codes) { return GridOf(codes).index_words != 0; }
constexpr bool LiesBySupers(PanelCodes codes) {
  return codes == PanelCodes::kTernary || IsGrid(codes);
}

// Where digit `digit` of a word of a super-block of kTernary is: columns 4 i .. 4 i + 3 for the i
// that this gives.
constexpr size_t TernaryLine(size_t word, size_t digit) {
  if (word < 8) return 8 * digit + word;
  return word < 12 ? 40 + 4 * digit + (word - 8) : 60 + digit;
}
constexpr size_t TernaryDigits(size_t word) { return word < 12 ? 5 : 4; }

// Biases of the bytes that the values of a codebook become. A value of IQ1 is 8 times the sum of
// the ternary one and the delta, an eighth.
inline constexpr uint8_t kSignedBias = 64;
inline constexpr uint8_t kIq1Bias = 16;

namespace internal {

template <size_t kSize>
constexpr std::array<uint8_t, kSize> GridBytes(const std::array<int8_t, kSize>& grid, int factor,
                                               int bias) {
  std::array<uint8_t, kSize> bytes{};
  for (size_t i = 0; i < kSize; ++i) bytes[i] = static_cast<uint8_t>(grid[i] * factor + bias);
  return bytes;
}

}  // namespace internal

// Entries as bytes: the magnitude and kSignedBias; of IQ1 the value for a positive delta and
// kIq1Bias.
alignas(64) inline constexpr auto kIq1Bytes = internal::GridBytes(ggml::kIq1Grid, 8, kIq1Bias + 1);
alignas(64) inline constexpr auto kIq2XxsBytes = internal::GridBytes(ggml::kIq2XxsGrid, 1,
                                                                     kSignedBias);
alignas(64) inline constexpr auto kIq2XsBytes = internal::GridBytes(ggml::kIq2XsGrid, 1,
                                                                    kSignedBias);
alignas(64) inline constexpr auto kIq2SBytes = internal::GridBytes(ggml::kIq2SGrid, 1, kSignedBias);
alignas(64) inline constexpr auto kIq3XxsBytes = internal::GridBytes(ggml::kIq3XxsGrid, 1,
                                                                     kSignedBias);
alignas(64) inline constexpr auto kIq3SBytes = internal::GridBytes(ggml::kIq3SGrid, 1, kSignedBias);

constexpr const uint8_t* GridBytesOf(PanelCodes codes) {
  switch (codes) {
    case PanelCodes::kIq1: return kIq1Bytes.data();
    case PanelCodes::kIq2Xxs: return kIq2XxsBytes.data();
    case PanelCodes::kIq2Xs: return kIq2XsBytes.data();
    case PanelCodes::kIq2S: return kIq2SBytes.data();
    case PanelCodes::kIq3Xxs: return kIq3XxsBytes.data();
    case PanelCodes::kIq3S: return kIq3SBytes.data();
    default: return nullptr;
  }
}

// Of a codebook: how many entries it has; of one with signs, the entries as codes of their columns,
// 2 bits (3 in IQ3) each from the lowest on, and what such a code stands for.
constexpr size_t GridEntries(PanelCodes codes) {
  switch (codes) {
    case PanelCodes::kIq1: return std::size(ggml::packed::kIq1S);
    case PanelCodes::kIq2Xxs: return std::size(ggml::packed::kIq2Xxs);
    case PanelCodes::kIq2Xs: return std::size(ggml::packed::kIq2Xs);
    case PanelCodes::kIq2S: return std::size(ggml::packed::kIq2S);
    case PanelCodes::kIq3Xxs: return std::size(ggml::packed::kIq3Xxs);
    case PanelCodes::kIq3S: return std::size(ggml::packed::kIq3S);
    default: return 0;
  }
}
constexpr const uint16_t* GridCodes(PanelCodes codes) {
  switch (codes) {
    case PanelCodes::kIq2Xxs: return ggml::packed::kIq2Xxs;
    case PanelCodes::kIq2Xs: return ggml::packed::kIq2Xs;
    case PanelCodes::kIq2S: return ggml::packed::kIq2S;
    case PanelCodes::kIq3Xxs: return ggml::packed::kIq3Xxs;
    case PanelCodes::kIq3S: return ggml::packed::kIq3S;
    default: return nullptr;
  }
}
constexpr int GridValue(PanelCodes codes, size_t code) {
  switch (codes) {
    case PanelCodes::kIq3Xxs: return ggml::kIq3XxsValues[code];
    case PanelCodes::kIq3S: return ggml::kIq3SValues[code];
    default: return code < 3 ? ggml::kIq2Values[code] : 0;
  }
}

}  // namespace switchyard::kernels
