// Products with weights in panels, and the records of activations that they read, against f64 on
// every instruction set.
//
// The full product of formats, paths, sizes, batches and parts would take hours. What covers it:
// every format and path at one size for each kind of block; one format of each kind of codes and
// groups at all sizes. Of each, the largest batch is compared with f64; smaller ones, at any
// position, and parts of the panel have to be its bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/convert/convert.h"
#include "kernels/panels/multiply.h"
#include "kernels/panels/pack.h"
#include "kernels/panels/rows.h"
#include "switchyard/core/small_floats.h"
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

// --- Weights ---

// Numbers of the fields of a panel: one value for all, or random ones of a moderate size.
class FieldWriter {
 public:
  FieldWriter(const PanelFormat& format, const PanelLayout& layout, size_t rows, std::byte* panel)
      : format_(format), layout_(layout), rows_(rows), panel_(panel) {}

  // next: draws a scale; small integers (scales of super-blocks and zero points) are left alone.
  void Write(const std::function<float()>& next) const {
    switch (format_.scales) {
      case PanelScales::kNone: break;
      case PanelScales::kRow:
        for (size_t r = 0; r < rows_; ++r) Put(r, DType::kF32, next());
        break;
      case PanelScales::kGrid:
        for (size_t g = 0; g < layout_.groups; ++g) Put(g, DType::kF32, next());
        break;
      case PanelScales::kF16: Field(layout_.scales, layout_.groups, DType::kF16, next); break;
      case PanelScales::kBF16: Field(layout_.scales, layout_.groups, DType::kBF16, next); break;
      case PanelScales::kF32: Field(layout_.scales, layout_.groups, DType::kF32, next); break;
      case PanelScales::kE8M0: Exponents(next); break;
      case PanelScales::kE4M3: Put(0, DType::kF32, next()); break;
      case PanelScales::kSuperU8:
      case PanelScales::kSuperI8:
      case PanelScales::kSuperU4:
      case PanelScales::kSuperOdd: Field(layout_.d, Supers(), DType::kF16, next); break;
    }
    if (format_.offsets == PanelOffsets::kF16)
      Field(layout_.offsets, layout_.groups, DType::kF16, next);
    if (format_.offsets == PanelOffsets::kSuperMin)
      Field(layout_.dmin, Supers(), DType::kF16, next);
  }
  // The small integers that Write leaves alone.
  void WriteBytes(uint8_t scale, uint8_t offset) const {
    const bool has_scales = ScaleBytes(format_.scales) == 1 && format_.scales != PanelScales::kE8M0;
    for (size_t s = 0; s < layout_.num_slices(); ++s) {
      std::byte* slice = panel_ + layout_.SliceAt(s);
      if (has_scales)
        std::memset(slice + layout_.scales.at, scale, layout_.scales.count * kPanelRows);
      if (OffsetBytes(format_) == 1)
        std::memset(slice + layout_.offsets.at, offset, layout_.offsets.count * kPanelRows);
    }
  }

 private:
  size_t Supers() const { return layout_.cols / kSuperCols; }
  // Element i of the numbers that start at byte `from`.
  void Put(size_t i, DType dtype, float value, size_t from = 0) const {
    ConvertFromF32(&value, 1, dtype, panel_ + from + i * DTypeBytes(dtype));
  }
  void Field(const PanelField& field, size_t count, DType dtype,
             const std::function<float()>& next) const {
    for (size_t i = 0; i < count; ++i) {
      const size_t from = layout_.NumberAt(field, i, DTypeBytes(dtype));
      for (size_t r = 0; r < rows_; ++r) Put(r, dtype, next(), from);
    }
  }
  void Exponents(const std::function<float()>& next) const {
    for (size_t g = 0; g < layout_.groups; ++g) {
      for (size_t r = 0; r < rows_; ++r) {
        const int exponent = 127 + static_cast<int>(std::lround(std::log2(std::abs(next()))));
        panel_[layout_.NumberAt(layout_.scales, g, 1) + r] =
            static_cast<std::byte>(std::clamp(exponent, 110, 140));
      }
    }
  }

  const PanelFormat& format_;
  const PanelLayout& layout_;
  size_t rows_;
  std::byte* panel_;
};

// All codes of a panel.
void FillUnits(const PanelLayout& layout, uint8_t byte, std::byte* panel) {
  for (size_t u = 0; u < layout.num_units(); ++u)
    std::memset(panel + layout.UnitAt(u), byte, layout.unit_bytes);
}

// One panel of random weights of a size that f32 likes, and what it means.
struct Weights {
  Weights(const MatrixFormat& matrix_format, size_t num_rows, size_t num_cols,
          std::mt19937_64& random)
      : name(NameOf(matrix_format, num_rows, num_cols)),
        format(*FindPanelFormat(matrix_format, num_cols)),
        layout(LayoutOf(format, num_cols)),
        rows(num_rows),
        cols(num_cols),
        panel(layout.panel_bytes) {
    RandomMatrix matrix(matrix_format, rows, cols, random);
    std::span<uint8_t> codes = matrix.codes();
    const DType dtype = matrix_format.dtype;
    if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) {
      const std::vector<float> floats = testing::RandomFloats(random, rows * cols, 0.1f);
      ConvertFromF32(floats.data(), floats.size(), dtype, codes.data());
    }
    if (dtype == DType::kF8E4M3) {
      for (uint8_t& code : codes) code = (code & 0x7f) == 0x7f ? 0x38 : code;
    }
    PackPanel(format, layout, matrix.PanelRows(0), panel.data());
    std::normal_distribution<float> normal(0.0f, 0.1f);
    FieldWriter(format, layout, rows, panel.data()).Write([&] { return normal(random); });
    Read();
  }

  // After a change of the panel.
  void Read() {
    values.resize(kPanelRows * cols);
    magnitudes.resize(values.size());
    // With codes of 0, which are the smallest, an element is at least as large as what is added to
    // the products of its group. So |code * scale| + |offset| <= |w| + 2 |w of code 0|.
    std::vector<std::byte> lowest(panel.data(), panel.data() + panel.size());
    FillUnits(layout, 0, lowest.data());
    const bool has_offsets = format.offsets != PanelOffsets::kNone;
    for (size_t r = 0; r < kPanelRows; ++r) {
      for (size_t k = 0; k < cols; ++k) {
        const size_t at = r * cols + k;
        values[at] = PanelElement(format, layout, panel.data(), r, k);
        magnitudes[at] = std::abs(values[at]);
        if (has_offsets)
          magnitudes[at] += 2 * std::abs(PanelElement(format, layout, lowest.data(), r, k));
      }
    }
  }

  std::string name;
  PanelFormat format;
  PanelLayout layout;
  size_t rows, cols;
  GuardedBuffer<std::byte> panel;
  std::vector<double> values, magnitudes;  // [32][cols]
};

// --- Activations ---

// The arithmetic and the columns of a scale of the activations.
struct Way {
  PanelPath path = PanelPath::kF32;
  size_t act_group = 0;
};
std::string NameOf(const Way& way) {
  const char* names[] = {"int8", "bf16", "f32"};
  return std::string(names[static_cast<size_t>(way.path)]) + " activations in groups of " +
         std::to_string(way.act_group);
}

// Columns of a scale of activations: those of FP8 blocks, or what suits the groups of the weights.
size_t SomeActGroup(const PanelFormat& format) {
  return format.group == 0 || format.group % 128 == 0 || 128 % format.group == 0 ? 128 : 32;
}

// All that the instruction set in force can do with a format.
std::vector<Way> WaysOf(const PanelFormat& format) {
  std::vector<Way> ways;
  if (TakesPath(format, PanelPath::kInt8)) {
    ways.push_back({PanelPath::kInt8, FastGroupOf(format)});
    ways.push_back({PanelPath::kInt8, 0});
  }
  for (PanelPath path : {PanelPath::kBF16, PanelPath::kF32}) {
    if (!TakesPath(format, path)) continue;
    ways.push_back({path, 0});
    ways.push_back({path, SomeActGroup(format)});
    if (format.group == 0) ways.push_back({path, 96});
  }
  return ways;
}

std::vector<int8_t> ToCodes(const float* x, size_t n) {
  std::vector<int8_t> codes(n);
  for (size_t k = 0; k < n; ++k)
    codes[k] = static_cast<int8_t>(std::clamp(std::nearbyint(x[k] * 50.0f), -128.0f, 127.0f));
  return codes;
}

// Packs one row of values, which become integers where scales belong to the activations.
void PackRow(const Way& way, const PanelRowLayout& layout, const float* x, std::byte* record) {
  if (way.path == PanelPath::kInt8) {
    if (way.act_group != 0) return PackFastRow(layout, x, record);
    const std::vector<int8_t> codes = ToCodes(x, layout.cols);
    return PackInt8Row(layout, GuardedBuffer<int8_t>(codes).data(), record);
  }
  if (way.act_group == 0) return PackFloatRow(layout, x, record);
  const std::vector<int8_t> codes = ToCodes(x, layout.cols);
  const std::vector<float> floats(codes.begin(), codes.end());
  std::vector<float> scales(CeilDiv(layout.cols, way.act_group));
  for (size_t s = 0; s < scales.size(); ++s) scales[s] = 0.01f + 0.003f * static_cast<float>(s % 7);
  PackScaledRow(layout, floats.data(), GuardedBuffer<float>(scales).data(), way.act_group, record);
}

template <class T>
T ReadAt(const std::byte* from, size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

// The word of column k, without a scale.
double CodeOfRecord(const PanelRowLayout& layout, const std::byte* record, size_t k) {
  switch (layout.path) {
    case PanelPath::kInt8: return ReadAt<int8_t>(record, k);
    case PanelPath::kBF16: {
      const size_t word = k / 4 * 2 + k % 2;
      return double{ToFloat(BF16{ReadAt<uint16_t>(record, 2 * word + k % 4 / 2)})};
    }
    case PanelPath::kF32: return double{ReadAt<float>(record, k)};
  }
  return 0;
}
// The value that column k stands for.
double ValueOfRecord(const PanelRowLayout& layout, const std::byte* record, size_t k) {
  const double code = CodeOfRecord(layout, record, k);
  if (!layout.has_scales) return code;
  return code * double{ReadAt<float>(record + layout.scales_at, k / layout.segment)};
}

// Records of some rows, packed over bytes of 0xff.
class Records {
 public:
  Records(const Weights& weights, const Way& way, size_t num_rows, const std::vector<float>& x)
      : layout_(RowLayoutOf(weights.format, weights.cols, way.path, way.act_group)),
        bytes_(num_rows * layout_.bytes) {
    std::memset(bytes_.data(), 0xff, bytes_.size());
    GuardedBuffer<float> row(weights.cols);
    for (size_t m = 0; m < num_rows; ++m) {
      std::copy_n(x.data() + m * weights.cols, weights.cols, row.data());
      std::byte* record = bytes_.data() + m * layout_.bytes;
      PackRow(way, layout_, row.data(), record);
      rows_.push_back(record);
      for (size_t k = 0; k < weights.cols; ++k)
        values_.push_back(ValueOfRecord(layout_, record, k));
    }
  }
  const PanelRowLayout& layout() const { return layout_; }
  const std::byte* const* rows() const { return rows_.data(); }
  size_t num_rows() const { return rows_.size(); }
  const double* Values(size_t m) const { return values_.data() + m * layout_.cols; }

 private:
  PanelRowLayout layout_;
  GuardedBuffer<std::byte> bytes_;
  std::vector<const std::byte*> rows_;
  std::vector<double> values_;
};

// --- Products ---

// Rows [m, m + num_rows) of the records and [first, first + count) of the panel.
struct Part {
  size_t m = 0, num_rows = 0, first = 0, count = kPanelRows;
};

// [num_rows][count]. The scratch is full of 0xff and ends at an unreadable page; nothing else of
// the output is written.
std::vector<float> Multiply(const Weights& weights, const Records& records, const Part& part,
                            const float* row_scale) {
  const size_t scratch_bytes =
      PanelScratchBytes(weights.format, weights.layout, records.layout().path, part.num_rows);
  static GuardedBuffer<std::byte> memory(size_t{4} << 20);
  EXPECT_LE(scratch_bytes, memory.size());
  std::byte* scratch = memory.data() + memory.size() - scratch_bytes;
  std::memset(scratch, 0xff, scratch_bytes);
  constexpr float kUntouched = 12345.0f;
  const size_t stride = part.count + 3;
  std::vector<float> padded(part.num_rows * stride, kUntouched);

  PanelProduct product;
  product.format = &weights.format;
  product.layout = &weights.layout;
  product.rows_layout = &records.layout();
  product.rows = records.rows() + part.m;
  product.row_scale = row_scale == nullptr ? nullptr : row_scale + part.m;
  product.num_rows = part.num_rows;
  product.panel = weights.panel.data();
  product.first = part.first;
  product.count = part.count;
  product.scratch = scratch;
  product.out = padded.data();
  product.out_stride = stride;
  MultiplyPanel(product);

  std::vector<float> out;
  for (size_t m = 0; m < part.num_rows; ++m) {
    const float* row = padded.data() + m * stride;
    out.insert(out.end(), row, row + part.count);
    for (size_t j = part.count; j < stride; ++j) EXPECT_EQ(row[j], kUntouched) << "written";
  }
  return out;
}

std::vector<float> MultiplyAll(const Weights& weights, const Records& records,
                               const float* row_scale = nullptr) {
  return Multiply(weights, records, {0, records.num_rows()}, row_scale);
}

// Roundings that a term of the sum passes at most: products and sums of a group (without FMA two
// for each column), scales of segments and their sums, those of groups and offsets and theirs, the
// scale itself (of a super-block or tensor), the scale of the row, and of the reference, which is
// f32 for blocks of ggml.
double Roundings(const PanelRowLayout& layout) {
  const size_t parts = layout.segments / layout.groups;
  return static_cast<double>(2 * layout.group() + 2 * parts + 4 * layout.groups + 12);
}

void CheckAgainstF64(const Weights& weights, const Records& records, const float* row_scale,
                     const std::vector<float>& out) {
  const double n = Roundings(records.layout()) * 0x1p-24;
  const double relative = n / (1 - n);
  for (size_t m = 0; m < records.num_rows(); ++m) {
    const double* a = records.Values(m);
    const double scale = row_scale == nullptr ? 1.0 : double{row_scale[m]};
    for (size_t j = 0; j < kPanelRows; ++j) {
      const double* w = weights.values.data() + j * weights.cols;
      const double* magnitude = weights.magnitudes.data() + j * weights.cols;
      double sum = 0;
      double norm = 0;
      for (size_t k = 0; k < weights.cols; ++k) {
        sum += a[k] * w[k];
        norm += std::abs(a[k]) * magnitude[k];
      }
      ASSERT_NEAR(out[m * kPanelRows + j], sum * scale, relative * norm * std::abs(scale))
          << "row " << m << " output " << j;
    }
  }
}

void CheckPart(const Weights& weights, const Records& records, const float* row_scale,
               const std::vector<float>& all, const Part& part) {
  const std::vector<float> out = Multiply(weights, records, part, row_scale);
  for (size_t m = 0; m < part.num_rows; ++m) {
    const float* expected = all.data() + (part.m + m) * kPanelRows + part.first;
    ASSERT_EQ(std::memcmp(out.data() + m * part.count, expected, part.count * sizeof(float)), 0)
        << "row " << m << " of " << part.num_rows << " from " << part.m << ", outputs "
        << part.first << " to " << part.first + part.count;
  }
}

constexpr Part kParts[] = {{0, 0, 0, 32}, {0, 0, 5, 2}, {0, 0, 31, 1}, {0, 0, 0, 1}, {0, 0, 7, 25}};

// `batches`: numbers of rows; the first is compared with f64, the others with its bits.
void CheckProducts(const Weights& weights, const std::vector<size_t>& batches,
                   std::mt19937_64& random) {
  const size_t num_rows = batches.front();
  const std::vector<float> x = testing::RandomFloats(random, num_rows * weights.cols);
  const std::vector<float> scales = testing::RandomFloats(random, num_rows);
  for (const Way& way : WaysOf(weights.format)) {
    SCOPED_TRACE(weights.name + ", " + NameOf(way));
    const Records records(weights, way, num_rows, x);
    const float* row_scale = random() % 2 == 0 ? nullptr : scales.data();
    const std::vector<float> all = MultiplyAll(weights, records, row_scale);
    CheckAgainstF64(weights, records, row_scale, all);
    if (::testing::Test::HasFatalFailure()) return;
    for (size_t i = 1; i < batches.size(); ++i) {
      Part part = kParts[(i + random()) % std::size(kParts)];
      part.num_rows = batches[i];
      part.m = random() % (num_rows - part.num_rows + 1);
      CheckPart(weights, records, row_scale, all, part);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

void ForEachTargetAndWeights(std::deque<Weights>& all, const std::function<void(Weights&)>& check) {
  testing::ForEachTarget([&] {
    for (Weights& weights : all) {
      SCOPED_TRACE(weights.name);
      check(weights);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

bool IsOfSuperBlocks(const MatrixFormat& format) { return DTypeBlock(format.dtype) == 256; }

// 192 columns are not whole groups of 128 activations.
std::deque<Weights> OneOfEveryFormat(size_t rows, std::mt19937_64& random) {
  std::deque<Weights> all;
  for (const MatrixFormat& format : AllFormats())
    all.emplace_back(format, rows, IsOfSuperBlocks(format) ? 512 : 192, random);
  return all;
}

// One format of each kind of codes and size of groups.
std::vector<MatrixFormat> SomeFormats() {
  std::set<std::tuple<PanelCodes, PanelValues, bool, size_t>> seen;
  std::vector<MatrixFormat> some;
  for (const MatrixFormat& format : AllFormats()) {
    const PanelFormat panels = *FindPanelFormat(format, 256);
    if (seen.insert({panels.codes, panels.values, IsSuper(panels.scales), panels.group}).second)
      some.push_back(format);
  }
  return some;
}

// One format of each shape of the sums.
std::vector<MatrixFormat> FewFormats() {
  return {Plain(DType::kBF16),
          Plain(DType::kGgmlQ40),
          Plain(DType::kGgmlQ41),
          Plain(DType::kGgmlIq4Nl),
          Plain(DType::kGgmlQ2K),
          Plain(DType::kGgmlQ4K),
          Plain(DType::kGgmlQ6K),
          Plain(DType::kGgmlIq3S),
          Plain(DType::kGgmlIq2Xs),
          Plain(DType::kGgmlIq1M),
          Plain(DType::kGgmlTq10),
          Scaled(DType::kI8, DType::kF32, 1, kAll),
          Scaled(DType::kU4, DType::kF16, 1, 32, true),
          Scaled(DType::kU4, DType::kF16, 1, 96, true),
          Scaled(DType::kF4E2M1, DType::kF8E4M3, 1, 16),
          Scaled(DType::kF8E4M3, DType::kF32, 128, 128)};
}

TEST(MultiplyPanel, EveryFormatOnEveryPath) {
  auto random = testing::MakeRandom(91);
  std::deque<Weights> all = OneOfEveryFormat(31, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    CheckProducts(weights, {13, 1, 2, 3, 4, 5, 6, 7, 9, 12}, random);
  });
}

TEST(MultiplyPanel, AllSizesOfBatches) {
  auto random = testing::MakeRandom(92);
  std::deque<Weights> all;
  for (const MatrixFormat& format : SomeFormats())
    all.emplace_back(format, 32, IsOfSuperBlocks(format) ? 256 : 96, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    CheckProducts(weights, {65, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 24, 25, 64}, random);
  });
}

TEST(MultiplyPanel, OneBlockAndSizesOfModels) {
  auto random = testing::MakeRandom(93);
  std::deque<Weights> all;
  for (const MatrixFormat& format : SomeFormats()) {
    const bool is_super = IsOfSuperBlocks(format);
    const std::vector<size_t> super_sizes = {768, 2816};
    const std::vector<size_t> sizes = {32, 896, 2880};
    for (size_t cols : is_super ? super_sizes : sizes) {
      all.emplace_back(format, 32, cols, random);
    }
  }
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    CheckProducts(weights, {10, 1, 4, 8, 9}, random);
  });
}

// More columns than are unpacked at a time, on every path, few rows and many.
TEST(MultiplyPanel, ManyColumns) {
  auto random = testing::MakeRandom(104);
  std::deque<Weights> all;
  for (const MatrixFormat& format : FewFormats()) all.emplace_back(format, 32, 8448, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    CheckProducts(weights, {9, 1, 4, 5}, random);
  });
}

TEST(MultiplyPanel, ColumnsThatAreNotWholeUnits) {
  auto random = testing::MakeRandom(94);
  std::deque<Weights> all;
  for (const MatrixFormat& format : AllFormats()) {
    if (DTypeBlock(format.dtype) > 2) continue;
    if (format.scale_dtype != DType::kF32 && format.scale_dtype != DType::kF8E4M3) continue;
    for (size_t cols : {1u, 5u, 33u}) {
      if (FindPanelFormat(format, cols)) all.emplace_back(format, 32, cols, random);
    }
  }
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    CheckProducts(weights, {7, 1, 5}, random);
  });
}

// A row that is 1 in one column and 0 elsewhere picks a weight, rounded once: every code of every
// table, exact where nothing is added.
TEST(MultiplyPanel, OneColumnPicksItsWeight) {
  auto random = testing::MakeRandom(95);
  std::deque<Weights> all = OneOfEveryFormat(32, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    if (weights.format.offsets != PanelOffsets::kNone) return;
    std::vector<float> x(weights.cols * weights.cols, 0.0f);
    for (size_t k = 0; k < weights.cols; ++k) x[k * weights.cols + k] = 0.02f;
    std::vector<float> ones(x.size());
    for (size_t i = 0; i < x.size(); ++i) ones[i] = x[i] == 0.0f ? 0.0f : 1.0f;
    for (const Way& way : WaysOf(weights.format)) {
      if (way.act_group != 0) continue;
      SCOPED_TRACE(NameOf(way));
      const Records records(weights, way, weights.cols,
                            way.path == PanelPath::kInt8 ? x : ones);  // a code of 1
      const std::vector<float> out = MultiplyAll(weights, records);
      for (size_t k = 0; k < weights.cols; ++k) {
        for (size_t j = 0; j < kPanelRows; ++j) {
          ASSERT_EQ(out[k * kPanelRows + j],
                    static_cast<float>(weights.values[j * weights.cols + k]))
              << "column " << k << " output " << j;
        }
      }
    }
  });
}

// Whole rows of int8: one conversion and two products.
TEST(MultiplyPanel, WholeRowsOfInt8AreExact) {
  auto random = testing::MakeRandom(96);
  std::deque<Weights> all;
  for (const MatrixFormat& format : AllFormats()) {
    if (format.scale_cols == kAll && format.dtype != DType::kF8E4M3)
      all.emplace_back(format, 32, 2880, random);
  }
  ASSERT_FALSE(all.empty());
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    const size_t num_rows = 5;
    const auto x = testing::RandomFloats(random, num_rows * weights.cols);
    const auto row_scale = testing::RandomFloats(random, num_rows);
    const Records records(weights, {PanelPath::kInt8, 0}, num_rows, x);
    const auto out = MultiplyAll(weights, records, row_scale.data());
    for (size_t m = 0; m < num_rows; ++m) {
      for (size_t j = 0; j < kPanelRows; ++j) {
        const float scale = ReadAt<float>(weights.panel.data(), j);
        ASSERT_NE(scale, 0.0f);
        double sum = 0;  // of integers, or halves of them
        for (size_t k = 0; k < weights.cols; ++k)
          sum += records.Values(m)[k] * (weights.values[j * weights.cols + k] / double{scale});
        ASSERT_EQ(out[m * kPanelRows + j], static_cast<float>(sum) * (row_scale[m] * scale));
      }
    }
  });
}

// The largest products of int8 codes, pairs of which do not fit 16 bits where codes are 8 bits. All
// scales are 1, so that the sums are integers that f32 holds.
TEST(MultiplyPanel, ExtremesOfInt8DoNotSaturate) {
  auto random = testing::MakeRandom(97);
  std::deque<Weights> all = OneOfEveryFormat(32, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    if (!TakesPath(weights.format, PanelPath::kInt8)) return;
    if (weights.format.scales == PanelScales::kE8M0) return;  // covered by the others
    const bool is_e4m3 = weights.format.scales == PanelScales::kE4M3;
    const FieldWriter writer(weights.format, weights.layout, kPanelRows, weights.panel.data());
    writer.Write([] { return 1.0f; });
    writer.WriteBytes(is_e4m3                                          ? 0x38
                      : weights.format.scales == PanelScales::kSuperU4 ? 0x11
                                                                       : 1,
                      1);
    if (weights.format.scales == PanelScales::kSuperU4) writer.WriteBytes(0x11, 0x11);
    const size_t num_rows = 5;
    std::vector<float> x(num_rows * weights.cols);
    for (size_t k = 0; k < weights.cols; ++k) {
      x[k] = -3.0f;  // code -128
      x[weights.cols + k] = 3.0f;
      x[2 * weights.cols + k] = k % 2 == 0 ? 3.0f : -3.0f;
      x[3 * weights.cols + k] = k % 3 == 0 ? 3.0f : -3.0f;
    }
    for (const uint8_t byte : std::initializer_list<uint8_t>{0xff, 0x00, 0xf0, 0x55}) {
      FillUnits(weights.layout, byte, weights.panel.data());
      weights.Read();
      const Records records(weights, {PanelPath::kInt8, 0}, num_rows, x);
      ASSERT_EQ(records.Values(0)[0], -128.0);
      ASSERT_EQ(records.Values(1)[0], 127.0);
      const auto all_rows = MultiplyAll(weights, records);
      const auto few_rows = Multiply(weights, records, {0, 4}, nullptr);
      ASSERT_EQ(std::memcmp(all_rows.data(), few_rows.data(), few_rows.size() * sizeof(float)), 0);
      for (size_t m = 0; m < num_rows; ++m) {
        for (size_t j = 0; j < kPanelRows; ++j) {
          double sum = 0;
          for (size_t k = 0; k < weights.cols; ++k)
            sum += records.Values(m)[k] * weights.values[j * weights.cols + k];
          ASSERT_EQ(all_rows[m * kPanelRows + j], sum) << "row " << m << " codes " << int{byte};
        }
      }
    }
  });
}

// --- Special values ---

std::deque<Weights> FewWeights(size_t cols, std::mt19937_64& random) {
  std::deque<Weights> all;
  for (const MatrixFormat& format : FewFormats())
    all.emplace_back(format, 32, IsOfSuperBlocks(format) ? 256 : cols, random);
  return all;
}
// Those that take values as they come.
std::vector<Way> WaysOfValues(const PanelFormat& format) {
  std::vector<Way> ways = WaysOf(format);
  std::erase_if(ways, [&](const Way& way) {
    return way.act_group != (way.path == PanelPath::kInt8 ? FastGroupOf(format) : 0);
  });
  return ways;
}

TEST(MultiplyPanel, NotANumberStaysInItsRow) {
  auto random = testing::MakeRandom(98);
  std::deque<Weights> all = FewWeights(192, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    for (const Way& way : WaysOfValues(weights.format)) {
      SCOPED_TRACE(NameOf(way));
      for (size_t num_rows : {3u, 13u}) {
        for (const float special :
             {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
          auto x = testing::RandomFloats(random, num_rows * weights.cols);
          const auto before = MultiplyAll(weights, Records(weights, way, num_rows, x));
          const size_t bad = random() % num_rows;
          x[bad * weights.cols + random() % weights.cols] = special;
          const auto after = MultiplyAll(weights, Records(weights, way, num_rows, x));
          for (size_t i = 0; i < after.size(); ++i) {
            if (i / kPanelRows != bad) {
              ASSERT_EQ(after[i], before[i]) << i;
            } else if (way.path == PanelPath::kInt8 || std::isnan(special)) {
              ASSERT_TRUE(std::isnan(after[i])) << i;
            } else {
              ASSERT_FALSE(std::isfinite(after[i])) << i;
            }
          }
        }
      }
    }
  });
}

TEST(MultiplyPanel, ZerosAndTinyValues) {
  auto random = testing::MakeRandom(99);
  std::deque<Weights> all = FewWeights(192, random);
  ForEachTargetAndWeights(all, [&](Weights& weights) {
    for (const Way& way : WaysOfValues(weights.format)) {
      SCOPED_TRACE(NameOf(way));
      const std::vector<float> zeros(weights.cols, 0.0f);
      for (float value : MultiplyAll(weights, Records(weights, way, 1, zeros)))
        ASSERT_EQ(value, 0.0f);
      for (const float size : {0x1p-149f, 1e-44f, 1e-42f, 1e-39f, 2e-38f, 1e-37f, 1e-36f}) {
        const auto tiny = testing::RandomFloats(random, weights.cols, size);
        double sum = 0;
        for (float value : tiny) sum += std::abs(double{value});
        // No weight of these tests reaches 1000.
        for (float value : MultiplyAll(weights, Records(weights, way, 1, tiny)))
          ASSERT_LE(std::abs(double{value}), 2000 * sum) << size;
      }
    }
  });
}

// A weight that is not a number reaches its output alone.
TEST(MultiplyPanel, NotANumberAmongTheWeights) {
  auto random = testing::MakeRandom(100);
  for (const MatrixFormat& format :
       {Plain(DType::kBF16), Plain(DType::kF16), Scaled(DType::kF8E4M3, DType::kF32, 1, kAll),
        Scaled(DType::kF8E4M3, DType::kF32, 128, 128)}) {
    std::deque<Weights> all;
    all.emplace_back(format, 32, 256, random);
    ForEachTargetAndWeights(all, [&](Weights& weights) {
      std::byte* unit = weights.panel.data() + weights.layout.UnitAt(0);
      std::memset(unit + 3 * kWordBytes + size_t{9} * 4, 0x7f,
                  4);  // bf16: NaN only if above 0x7f80
      const bool is_half = format.dtype == DType::kBF16;
      if (is_half) std::memset(unit + 3 * kWordBytes + size_t{9} * 4, 0xff, 4);
      const auto x = testing::RandomFloats(random, 5 * weights.cols);
      for (const Way& way : WaysOfValues(weights.format)) {
        SCOPED_TRACE(NameOf(way));
        for (size_t num_rows : {1u, 5u}) {
          const auto out = MultiplyAll(weights, Records(weights, way, num_rows, x));
          for (size_t i = 0; i < out.size(); ++i)
            ASSERT_EQ(std::isnan(out[i]), i % kPanelRows == 9) << i;
        }
      }
    });
  }
}

// --- Records ---

bool SameBytes(const std::byte* a, const std::byte* b, size_t at, size_t bytes) {
  return std::memcmp(a + at, b + at, bytes) == 0;
}

// Every part of a record is written, whatever was there before.
void CheckAllIsWritten(const PanelRowLayout& layout, const std::byte* a, const std::byte* b) {
  const size_t units = layout.padded_cols / kUnitCols;
  ASSERT_TRUE(SameBytes(a, b, 0, units * WordsOfUnit(layout.path) * 4)) << "words";
  if (layout.has_scales) {
    ASSERT_TRUE(SameBytes(a, b, layout.scales_at, layout.segments * 4)) << "scales";
  }
  if (layout.has_starts) {
    ASSERT_TRUE(SameBytes(a, b, layout.starts_at, layout.segments * 4)) << "starts";
  }
  if (layout.has_sums) {
    ASSERT_TRUE(SameBytes(a, b, layout.sums_at, layout.groups * 4)) << "sums";
  }
}

// Starts are exact. Sums have the bits of plain loops: columns of a segment in their order, then
// segments of a group in theirs.
void CheckSums(const PanelRowLayout& layout, const std::byte* record) {
  for (size_t s = 0; layout.has_starts && s < layout.segments; ++s) {
    double sum = 0;
    for (size_t k = s * layout.segment; k < (s + 1) * layout.segment; ++k)
      sum += CodeOfRecord(layout, record, k);
    ASSERT_EQ(ReadAt<int32_t>(record + layout.starts_at, s),
              -static_cast<double>(layout.bias) * sum);
  }
  const size_t per_group = layout.segments / layout.groups;
  for (size_t g = 0; layout.has_sums && g < layout.groups; ++g) {
    float total = 0;
    for (size_t s = g * per_group; s < (g + 1) * per_group; ++s) {
      float sum = 0;
      for (size_t k = s * layout.segment; k < (s + 1) * layout.segment; ++k)
        sum += static_cast<float>(CodeOfRecord(layout, record, k));
      total += layout.has_scales && per_group != 1
                   ? sum * ReadAt<float>(record + layout.scales_at, s)
                   : sum;
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(ReadAt<float>(record + layout.sums_at, g)),
              std::bit_cast<uint32_t>(total))
        << "group " << g;
  }
}

TEST(PanelRows, AllIsWrittenAndPaddingIsZero) {
  auto random = testing::MakeRandom(101);
  testing::ForEachTarget([&] {
    for (const MatrixFormat& matrix_format : FewFormats()) {
      const size_t block = DTypeBlock(matrix_format.dtype);
      for (size_t cols : {1u, 5u, 33u, 127u, 200u, 2880u}) {
        if (block > 2) cols = CeilDiv(cols, block) * block;
        const auto format = FindPanelFormat(matrix_format, cols);
        if (!format) continue;
        for (const Way& way : WaysOf(*format)) {
          SCOPED_TRACE(NameOf(matrix_format, 1, cols) + ", " + NameOf(way));
          const PanelRowLayout layout = RowLayoutOf(*format, cols, way.path, way.act_group);
          ASSERT_EQ(layout.bytes % 64, 0u);
          ASSERT_EQ(layout.segment * layout.segments, layout.padded_cols);
          ASSERT_EQ(layout.padded_cols % layout.groups, 0u);
          GuardedBuffer<std::byte> a(layout.bytes);
          GuardedBuffer<std::byte> b(layout.bytes);
          std::memset(a.data(), 0, a.size());
          std::memset(b.data(), 0xff, b.size());
          const GuardedBuffer<float> x(testing::RandomFloats(random, cols));
          PackRow(way, layout, x.data(), a.data());
          PackRow(way, layout, x.data(), b.data());
          CheckAllIsWritten(layout, a.data(), b.data());
          CheckSums(layout, b.data());
          for (size_t k = cols; k < layout.padded_cols; ++k)
            ASSERT_EQ(CodeOfRecord(layout, b.data(), k), 0.0) << k;
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(PanelRows, ValuesOfFloatsAndCodes) {
  auto random = testing::MakeRandom(102);
  testing::ForEachTarget([&] {
    const PanelFormat format = *FindPanelFormat(Scaled(DType::kI8, DType::kF32, 1, kAll), 200);
    const GuardedBuffer<float> x(testing::RandomFloats(random, 200));
    const std::vector<int8_t> codes = ToCodes(x.data(), 200);
    for (const Way& way : WaysOf(format)) {
      if (way.path == PanelPath::kInt8 && way.act_group != 0) continue;
      SCOPED_TRACE(NameOf(way));
      const PanelRowLayout layout = RowLayoutOf(format, 200, way.path, way.act_group);
      GuardedBuffer<std::byte> record(layout.bytes);
      PackRow(way, layout, x.data(), record.data());
      for (size_t k = 0; k < 200; ++k) {
        const double value = ValueOfRecord(layout, record.data(), k);
        if (way.path == PanelPath::kInt8) {
          ASSERT_EQ(value, codes[k]);
        } else if (way.act_group != 0) {
          const float scale = 0.01f + 0.003f * static_cast<float>(k / way.act_group % 7);
          ASSERT_EQ(value, codes[k] * double{scale}) << k;
        } else if (way.path == PanelPath::kBF16) {
          ASSERT_EQ(value, ToFloat(ToBF16(x.data()[k]))) << k;
        } else {
          ASSERT_EQ(value, x.data()[k]) << k;
        }
      }
    }
  });
}

// By plain C++: the scale amax / 127 and codes x * (127 / amax) rounded half to even.
void CheckFastGroup(const float* x, const int8_t* codes, float scale) {
  float amax = 0;
  for (size_t k = 0; k < kFastGroup; ++k) amax = std::max(amax, std::abs(x[k]));
  ASSERT_EQ(scale, amax / 127.0f);
  const float inverse = amax == 0.0f ? 0.0f : 127.0f / amax;
  for (size_t k = 0; k < kFastGroup; ++k) {
    const float code = std::isfinite(inverse) ? std::nearbyint(x[k] * inverse) : 0.0f;
    ASSERT_EQ(static_cast<float>(codes[k]), code) << x[k] << " of " << amax;
    ASSERT_GE(codes[k], -127);
  }
}

TEST(PackFastRow, ScalesAndCodes) {
  auto random = testing::MakeRandom(103);
  testing::ForEachTarget([&] {
    const size_t groups = 64;
    const PanelFormat format = *FindPanelFormat(Plain(DType::kGgmlQ40), groups * kFastGroup);
    const PanelRowLayout layout =
        RowLayoutOf(format, groups * kFastGroup, PanelPath::kInt8, kFastGroup);
    const size_t copies = kFastGroup / layout.segment;
    ASSERT_EQ(layout.scale_segments, copies);
    GuardedBuffer<float> x(layout.cols);
    for (size_t g = 0; g < groups; ++g) {
      const auto values = testing::RandomFloats(random, kFastGroup,
                                                std::ldexp(1.0f, static_cast<int>(4 * g) - 140));
      std::copy(values.begin(), values.end(), x.data() + g * kFastGroup);
    }
    std::fill_n(x.data() + 5 * kFastGroup, kFastGroup, 0.0f);
    for (size_t k = 0; k < kFastGroup; ++k) {  // halves between codes, with a scale of 1
      x[40 * kFastGroup + k] = k == 0 ? -127.0f : static_cast<float>(k) - 15.5f;
    }
    x[41 * kFastGroup + 3] = std::numeric_limits<float>::quiet_NaN();
    x[42 * kFastGroup + 31] = -std::numeric_limits<float>::infinity();
    GuardedBuffer<std::byte> record(layout.bytes);
    std::memset(record.data(), 0xff, record.size());
    PackFastRow(layout, x.data(), record.data());
    const auto* codes = reinterpret_cast<const int8_t*>(record.data());
    for (size_t g = 0; g < groups; ++g) {
      SCOPED_TRACE("group " + std::to_string(g));
      const float scale = ReadAt<float>(record.data() + layout.scales_at, g * copies);
      for (size_t s = 1; s < copies; ++s) {
        ASSERT_TRUE(SameBytes(record.data() + layout.scales_at + g * copies * 4,
                              record.data() + layout.scales_at + (g * copies + s) * 4, 0, 4));
      }
      if (g == 41 || g == 42) {
        ASSERT_TRUE(std::isnan(scale));
        for (size_t k = 0; k < kFastGroup; ++k) ASSERT_EQ(codes[g * kFastGroup + k], 0);
        continue;
      }
      CheckFastGroup(x.data() + g * kFastGroup, codes + g * kFastGroup, scale);
      if (HasFatalFailure()) return;
    }
  });
}

}  // namespace
}  // namespace switchyard::kernels
