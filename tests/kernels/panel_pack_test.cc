// Weights in panels: which formats have them, how large they are, and that packing loses nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/panels/pack.h"
#include "kernels/panels/panel.h"
#include "testing/guarded.h"
#include "testing/panel_matrices.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::AllFormats;
using testing::CeilDiv;
using testing::GuardedBuffer;
using testing::kAll;
using testing::NameOf;
using testing::Plain;
using testing::RandomMatrix;
using testing::Scaled;

::testing::AssertionResult SameBits(float a, float b) {
  if (std::isnan(a) && std::isnan(b)) return ::testing::AssertionSuccess();
  if (std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << " is not " << b;
}

// The value by the definition of the row, in f64.
double ExactElement(const CodeRow& row, const std::vector<float>& decoded, size_t k) {
  if (IsGgmlBlock(row.dtype)) return double{decoded[k]};
  return (CodeAt(row.dtype, row.q, k) - double{ZeroOfColumn(row, k)}) *
         double{ScaleOfColumn(row, k)};
}

void CheckPackedRow(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                    size_t r, const CodeRow& row, GuardedBuffer<float>& out) {
  std::vector<float> expected(row.n);
  DecodeRow(row, expected.data());
  DecodePanelRow(format, layout, panel, r, row.n, out.data());
  for (size_t k = 0; k < row.n; ++k) {
    ASSERT_TRUE(SameBits(out[k], expected[k])) << "row " << r << " column " << k;
    const double element = PanelElement(format, layout, panel, r, k);
    const double exact = ExactElement(row, expected, k);
    if (!(std::isnan(element) && std::isnan(exact))) {
      ASSERT_EQ(element, exact) << "row " << r << " column " << k;
    }
  }
}

// What is beyond the last row and column is 0, but for columns of a group that has a zero point.
void CheckPadding(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                  size_t rows, size_t cols) {
  std::vector<float> out(layout.cols);
  size_t first = cols;
  if (format.offsets == PanelOffsets::kZero) first = CeilDiv(cols, format.group) * format.group;
  for (size_t r = 0; r < kPanelRows; ++r) {
    DecodePanelRow(format, layout, panel, r, layout.cols, out.data());
    for (size_t k = r < rows ? first : 0; k < layout.cols; ++k)
      ASSERT_EQ(out[k], 0.0f) << "row " << r << " column " << k;
  }
}

void CheckPanels(const MatrixFormat& matrix_format, const RandomMatrix& matrix, size_t rows,
                 size_t cols) {
  const auto format = FindPanelFormat(matrix_format, cols);
  ASSERT_TRUE(format.has_value());
  const PanelLayout layout = LayoutOf(*format, cols);
  ASSERT_GE(layout.cols, cols);
  ASSERT_EQ(PanelMatrixBytes(*format, rows, cols), CeilDiv(rows, 32) * layout.panel_bytes);
  for (size_t panel = 0; panel < NumPanels(rows); ++panel) {
    const std::vector<CodeRow> packed = matrix.PanelRows(panel);
    GuardedBuffer<std::byte> out(layout.panel_bytes);
    GuardedBuffer<std::byte> again(layout.panel_bytes);
    std::memset(out.data(), 0, out.size());
    std::memset(again.data(), 0xff, again.size());
    PackPanel(*format, layout, packed, out.data());
    PackPanel(*format, layout, packed, again.data());
    ASSERT_EQ(std::memcmp(out.data(), again.data(), out.size()), 0) << "not all is written";
    GuardedBuffer<float> decoded(cols);
    for (size_t r = 0; r < packed.size(); ++r) {
      CheckPackedRow(*format, layout, out.data(), r, packed[r], decoded);
      if (::testing::Test::HasFatalFailure()) return;
    }
    CheckPadding(*format, layout, out.data(), packed.size(), cols);
  }
}

std::vector<size_t> SomeColumns(const MatrixFormat& format) {
  const size_t block = DTypeBlock(format.dtype);
  if (block == 256) return {256, 512, 768};
  if (block == 32) return {32, 96, 192, 896};
  return {1, 5, 33, 48, 96, 127, 192};
}

TEST(PackPanel, EveryFormatComesBackBitByBit) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(81);
    for (const MatrixFormat& format : AllFormats()) {
      for (size_t rows : {1u, 31u, 33u}) {
        for (size_t cols : SomeColumns(format)) {
          if (!FindPanelFormat(format, cols)) continue;
          SCOPED_TRACE(NameOf(format, rows, cols));
          const RandomMatrix matrix(format, rows, cols, random);
          CheckPanels(format, matrix, rows, cols);
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(PackPanel, SizesOfModels) {
  auto random = testing::MakeRandom(82);
  for (const MatrixFormat& format : AllFormats()) {
    const size_t cols = DTypeBlock(format.dtype) == 256 ? 2816 : 2880;
    SCOPED_TRACE(NameOf(format, 32, cols));
    if (!FindPanelFormat(format, cols)) continue;
    const RandomMatrix matrix(format, 32, cols, random);
    CheckPanels(format, matrix, 32, cols);
    if (HasFatalFailure()) return;
  }
}

TEST(PackPanel, ExtremeCodes) {
  auto random = testing::MakeRandom(83);
  for (const MatrixFormat& format : AllFormats()) {
    for (const uint8_t byte : std::initializer_list<uint8_t>{0x00, 0xff, 0x80, 0x7f, 0x08, 0xf7}) {
      const size_t cols = 256;
      SCOPED_TRACE(NameOf(format, 32, cols) + " of " + std::to_string(byte));
      if (format.dtype == DType::kGgmlMxFp4 && byte == 0xff) continue;
      RandomMatrix matrix(format, 32, cols, random);
      std::ranges::fill(matrix.codes(), byte);
      if (!FindPanelFormat(format, cols)) continue;
      CheckPanels(format, matrix, 32, cols);
      if (HasFatalFailure()) return;
    }
  }
}

// The order of words that products rely on, written out for codes that count.
TEST(PackPanel, WordsOfBytesAndNibblesAndHalves) {
  std::vector<uint8_t> codes(64);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  const float scale = 1.0f;
  const auto pack = [&](DType dtype, const MatrixFormat& matrix_format) {
    const auto format = FindPanelFormat(matrix_format, 32);
    const PanelLayout layout = LayoutOf(*format, 32);
    std::vector<CodeRow> rows(32);
    for (CodeRow& row : rows) {
      row.dtype = dtype;
      row.q = codes.data();
      row.n = 32;
      row.group = 32;
      if (matrix_format.is_quantized()) row.scale = &scale;
    }
    GuardedBuffer<std::byte> panel(layout.panel_bytes);
    PackPanel(*format, layout, rows, panel.data());
    std::vector<uint32_t> words(UnitWords(format->codes));
    for (size_t i = 0; i < words.size(); ++i)  // of row 3
      std::memcpy(&words[i], panel.data() + layout.UnitAt(0) + i * kWordBytes + 12, 4);
    return words;
  };
  const auto bytes = pack(DType::kU8, Scaled(DType::kU8, DType::kF32, 1, 32));
  EXPECT_EQ(bytes[0], 0x03020100u);
  EXPECT_EQ(bytes[7], 0x1f1e1d1cu);
  const auto halves = pack(DType::kBF16, Plain(DType::kBF16));
  EXPECT_EQ(halves[0], 0x05040100u);
  EXPECT_EQ(halves[1], 0x07060302u);
  EXPECT_EQ(halves[15], 0x3f3e3b3au);
  for (size_t i = 0; i < 16; ++i)
    codes[i] = static_cast<uint8_t>((2 * i + 1) % 16 << 4 | 2 * i % 16);
  const auto nibbles = pack(DType::kU4, Scaled(DType::kU4, DType::kF32, 1, 32));
  EXPECT_EQ(nibbles[0], 0x33221100u);
  EXPECT_EQ(nibbles[3], 0xffeeddccu);
}

TEST(FindPanelFormat, WhatHasNoPanels) {
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kF32, DType::kF32, 1, 32), 64));
  EXPECT_FALSE(FindPanelFormat(Plain(DType::kI8), 64));
  EXPECT_FALSE(FindPanelFormat(Plain(DType::kBF16), 0));
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kBF16, DType::kF32, 1, 32), 64));
  // Groups of 24 columns, scales of 8 rows, of whole rows with zero points.
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kI8, DType::kF32, 1, 24), 64));
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kI8, DType::kF32, 8, 32), 64));
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kU4, DType::kF32, 1, kAll, true), 64));
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kU4, DType::kF32, 128, 32, true), 64));
  // A scale of the tensor beside others than e4m3.
  EXPECT_FALSE(FindPanelFormat(Scaled(DType::kI4, DType::kF16, 1, 32, false, true), 64));
  MatrixFormat by_column = Scaled(DType::kI4, DType::kF16, 1, 32);
  by_column.has_column_groups = true;
  EXPECT_FALSE(FindPanelFormat(by_column, 64));
}

TEST(FindPanelFormat, KindsOfScales) {
  const auto scales = [](const MatrixFormat& format) {
    return FindPanelFormat(format, 256)->scales;
  };
  EXPECT_EQ(scales(Plain(DType::kBF16)), PanelScales::kNone);
  EXPECT_EQ(scales(Scaled(DType::kI8, DType::kF32, 1, 256)), PanelScales::kRow);
  EXPECT_EQ(scales(Scaled(DType::kF8E4M3, DType::kF32, 64, 256)), PanelScales::kRow);
  EXPECT_EQ(scales(Scaled(DType::kF8E4M3, DType::kF32, 128, 128)), PanelScales::kGrid);
  EXPECT_EQ(scales(Scaled(DType::kI4, DType::kBF16, 1, 32)), PanelScales::kBF16);
  EXPECT_EQ(scales(Scaled(DType::kF4E2M1, DType::kF8E4M3, 1, 16)), PanelScales::kE4M3);
}

struct BlockSize {
  MatrixFormat format;
  size_t cols;
  size_t bytes;
};

// One block of each format, computed by hand: the words of 32 rows, then fields in lines of 64.
TEST(LayoutOf, BytesOfOneBlock) {
  const BlockSize sizes[] = {
      {Plain(DType::kBF16), 32, kPanelRows * 64},
      {Plain(DType::kF16), 32, kPanelRows * 64},
      {Plain(DType::kGgmlQ40), 32, kPanelRows * 18},
      {Plain(DType::kGgmlQ41), 32, kPanelRows * 20},
      {Plain(DType::kGgmlQ50), 32, kPanelRows * 22},
      {Plain(DType::kGgmlQ51), 32, kPanelRows * 24},
      {Plain(DType::kGgmlQ80), 32, kPanelRows * 34},
      {Plain(DType::kGgmlIq4Nl), 32, kPanelRows * 18},
      {Plain(DType::kGgmlMxFp4), 32, kPanelRows * 17},
      {Plain(DType::kGgmlQ2K), 256, kPanelRows * 84},
      {Plain(DType::kGgmlQ3K), 256, kPanelRows * (96 + 16 + 2)},
      {Plain(DType::kGgmlQ4K), 256, 4736},
      {Plain(DType::kGgmlQ5K), 256, kPanelRows * (160 + 16 + 4)},
      {Plain(DType::kGgmlQ6K), 256, kPanelRows * 210},
      {Plain(DType::kGgmlIq4Xs), 256, kPanelRows * (128 + 8 + 2)},
      {Plain(DType::kGgmlIq3S), 256, kPanelRows * 110},
      {Plain(DType::kGgmlIq3Xxs), 256, kPanelRows * (98 + 4)},
      {Plain(DType::kGgmlIq2S), 256, kPanelRows * 82},
      {Plain(DType::kGgmlIq2Xs), 256, kPanelRows * (74 + 4)},
      {Plain(DType::kGgmlIq2Xxs), 256, kPanelRows * (66 + 4)},
      {Plain(DType::kGgmlIq1S), 256, kPanelRows * (50 + 4)},
      {Plain(DType::kGgmlIq1M), 256, kPanelRows * (56 + 2)},
      {Plain(DType::kGgmlTq10), 256, kPanelRows * 54},
      {Plain(DType::kGgmlTq20), 256, kPanelRows * 66},
      {Scaled(DType::kI4, DType::kF16, 1, 32), 32, kPanelRows * 18},
      {Scaled(DType::kI8, DType::kF32, 1, 32), 32, kPanelRows * 36},
      {Scaled(DType::kU4, DType::kF16, 1, 128, true), 128, kPanelRows * (64 + 2 + 1)},
      {Scaled(DType::kU4, DType::kBF16, 1, 16), 32, kPanelRows * 20},
      {Scaled(DType::kF4E2M1, DType::kF8E8M0, 1, 32), 32, kPanelRows * 17},
      {Scaled(DType::kF4E2M1, DType::kF8E4M3, 1, 16), 32, kPanelRows * 18},
      {Scaled(DType::kF8E4M3, DType::kF8E8M0, 1, 96), 96, kPanelRows * 97},
      {Scaled(DType::kF8E4M3, DType::kF32, 128, 128), 128, kPanelRows * 128},
      {Scaled(DType::kI8, DType::kF32, 1, kAll), 32, kPanelRows * 32},
  };
  for (const BlockSize& size : sizes) {
    SCOPED_TRACE(NameOf(size.format, 64, size.cols));
    const auto format = FindPanelFormat(size.format, 1024);
    ASSERT_TRUE(format.has_value());
    EXPECT_EQ(format->block, size.cols);
    // Eight blocks, so that all fields are whole cache lines.
    const PanelLayout layout = LayoutOf(*format, 8 * size.cols);
    EXPECT_EQ(layout.panel_bytes, layout.header_bytes + 8 * size.bytes);
    EXPECT_EQ(layout.panel_bytes, layout.SliceAt(layout.num_slices()));
    EXPECT_EQ(layout.slice_bytes, layout.units_at + layout.slice_units() * layout.unit_bytes);
  }
}

// 256 columns, or whole groups next to it; one slice without fields; fewer columns in the last.
TEST(LayoutOf, Slices) {
  const auto slices = [](const MatrixFormat& format, size_t cols) {
    const PanelLayout layout = LayoutOf(*FindPanelFormat(format, cols), cols);
    return std::vector<size_t>{layout.slice_cols, layout.num_slices()};
  };
  using S = std::vector<size_t>;
  EXPECT_EQ(slices(Plain(DType::kGgmlQ80), 1024), (S{256, 4}));
  EXPECT_EQ(slices(Plain(DType::kGgmlQ40), 2880), (S{256, 12}));
  EXPECT_EQ(slices(Plain(DType::kGgmlQ40), 192), (S{192, 1}));
  EXPECT_EQ(slices(Plain(DType::kGgmlQ4K), 512), (S{256, 2}));
  EXPECT_EQ(slices(Scaled(DType::kI4, DType::kF16, 1, 96), 384), (S{192, 2}));
  EXPECT_EQ(slices(Scaled(DType::kI4, DType::kF16, 1, 512), 1024), (S{512, 2}));
  EXPECT_EQ(slices(Plain(DType::kBF16), 1024), (S{1024, 1}));
  EXPECT_EQ(slices(Scaled(DType::kF8E4M3, DType::kF32, 128, 128), 1024), (S{1024, 1}));
  const PanelFormat q40 = *FindPanelFormat(Plain(DType::kGgmlQ40), 320);
  const PanelLayout layout = LayoutOf(q40, 320);
  EXPECT_EQ(layout.UnitAt(8), size_t{512 + 8 * 512 + 512});
  EXPECT_EQ(layout.NumberAt(layout.scales, 9, 2), size_t{512 + 8 * 512 + 64});
  EXPECT_EQ(layout.panel_bytes, layout.UnitAt(10));
}

TEST(LayoutOf, Headers) {
  const auto header = [](const MatrixFormat& format, size_t cols) {
    return LayoutOf(*FindPanelFormat(format, cols), cols).header_bytes;
  };
  EXPECT_EQ(header(Plain(DType::kBF16), 1024), 0u);
  EXPECT_EQ(header(Scaled(DType::kI8, DType::kF32, 1, kAll), 1024), 128u);
  EXPECT_EQ(header(Scaled(DType::kF8E4M3, DType::kF32, 128, 128), 1024), 64u);
  EXPECT_EQ(header(Scaled(DType::kF8E4M3, DType::kF32, 128, 128), 2176), 128u);
  EXPECT_EQ(header(Scaled(DType::kF4E2M1, DType::kF8E4M3, 1, 16), 1024), 64u);
  EXPECT_EQ(header(Scaled(DType::kF4E2M1, DType::kF8E8M0, 1, 32), 1024), 0u);
}

TEST(LayoutOf, ColumnsAreWholeBlocksAndFieldsWholeLines) {
  const PanelFormat mxfp4 = *FindPanelFormat(Plain(DType::kGgmlMxFp4), 96);
  const PanelLayout layout = LayoutOf(mxfp4, 96);
  EXPECT_EQ(layout.cols, 96u);
  EXPECT_EQ(layout.groups, 3u);
  EXPECT_EQ(layout.units_at, 128u);  // three groups of 32 bytes
  EXPECT_EQ(PanelMatrixBytes(mxfp4, 33, 96), size_t{2} * (128 + 3 * 512));
  const PanelFormat wide = *FindPanelFormat(Scaled(DType::kI4, DType::kF16, 1, 128), 192);
  EXPECT_EQ(LayoutOf(wide, 192).cols, 256u);
  EXPECT_EQ(LayoutOf(*FindPanelFormat(Plain(DType::kBF16), 1), 1).cols, 32u);
}

}  // namespace
}  // namespace switchyard::kernels
