// Ascend component "grouped matmul": every mode of the table of contract 4.1.3 against sums in f64,
// and the vendor's layouts against the canonical form, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/convert/convert.h"
#include "quant/act_quant.h"
#include "quant/expert_matmul.h"
#include "quant/packing.h"
#include "switchyard/moe/ascend/grouped_matmul.h"
#include "switchyard/moe/ascend/operands.h"
#include "testing/errors.h"
#include "testing/quant_formats.h"
#include "testing/random.h"

namespace switchyard::moe::ascend {
namespace {

using quant::WeightQuant;
using testing::ExpectError;

constexpr size_t kLayer = 2;

struct ModeCase {
  GroupedMatmulMode mode;
  WeightQuant weights;  // kUnquantized: format only
  ActQuantKind rows;
  size_t k_step;  // the vendor's layout wants multiples of it
};

std::vector<ModeCase> Modes() {
  WeightQuant f32;
  WeightQuant bf16;
  bf16.format.dtype = DType::kBF16;
  const WeightQuant mxfp8 = WeightQuant::MxFp8(MxScaleRule::kOcpFloor);
  const WeightQuant mxfp4 = WeightQuant::MxFp4(MxScaleRule::kCeil, MxRounding::kHalfToEven);
  return {
      {GroupedMatmulMode::kUnquantized, f32, ActQuantKind::kNone, 1},
      {GroupedMatmulMode::kUnquantized, bf16, ActQuantKind::kNone, 1},
      {GroupedMatmulMode::kW8A8, WeightQuant::Int8Channel(), ActQuantKind::kInt8Token, 1},
      {GroupedMatmulMode::kW4A8Int, WeightQuant::Int4Channel(), ActQuantKind::kInt8Token, 1},
      {GroupedMatmulMode::kW4A8Int, WeightQuant::Int4Group(32, DType::kF32),
       ActQuantKind::kInt8Token, 32},
      {GroupedMatmulMode::kW4A4Int, WeightQuant::Int4Channel(), ActQuantKind::kInt4Token, 1},
      {GroupedMatmulMode::kW4A16, WeightQuant::Uint4Group(32, DType::kF16), ActQuantKind::kNone,
       32},
      {GroupedMatmulMode::kMxFp8, mxfp8, ActQuantKind::kMxFp8, 64},
      {GroupedMatmulMode::kW4A8MxFp4, mxfp4, ActQuantKind::kMxFp8, 64},
      {GroupedMatmulMode::kW4A4MxFp4, mxfp4, ActQuantKind::kMxFp4, 64},
  };
}

quant::MatrixBank RandomBank(const ModeCase& mode, size_t experts, size_t n, size_t k,
                             std::mt19937_64& random) {
  std::vector<quant::QuantMatrix> matrices;
  for (size_t e = 0; e < experts; ++e) {
    std::vector<float> w = testing::RandomFloats(random, n * k, 0.3f);
    if (mode.mode == GroupedMatmulMode::kUnquantized) {
      quant::QuantMatrix matrix = quant::QuantMatrix::Make(mode.weights.format, n, k);
      kernels::ConvertFromF32(w.data(), w.size(), mode.weights.format.dtype, matrix.data.data());
      matrices.push_back(std::move(matrix));
      continue;
    }
    matrices.push_back(quant::QuantizeMatrix(ConstRows(w.data(), n, k), mode.weights));
  }
  return quant::MatrixBank(std::move(matrices));
}

class AscendGroupedMatmul : public ::testing::Test {
 protected:
  AscendGroupedMatmul() : random_(testing::MakeRandom(63)), pool_(2), context_{pool_, arena_} {}

  // x as the mode takes it; values of rows past `defined` are NaN.
  QuantRows RandomRows(size_t rows, size_t cols, ActQuantKind kind, size_t defined) {
    const Rows x = context_.arena.AllocateRows(rows, cols);
    const std::vector<float> values = testing::RandomFloats(random_, rows * cols);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t k = 0; k < cols; ++k) x.Row(i)[k] = i < defined ? values[i * cols + k] : NAN;
    }
    return quant::QuantizeRows(context_, x, {.kind = kind});
  }

  std::mt19937_64 random_;
  ThreadPool pool_;
  Arena arena_;
  ExecContext context_;
};

// out[m, column + n] against the f64 sum, relative to the size of its terms.
void ExpectRow(const float* out, const QuantRows& x, size_t m, const ExpertMatrices& w,
               size_t expert, double bound, const std::string& what) {
  for (size_t n = 0; n < w.rows; ++n) {
    double sum = 0;
    double size = 1e-9;
    for (size_t k = 0; k < w.cols; ++k) {
      const double term = testing::RowElement(x, m, k) * quant::MatrixElement(w, expert, n, k);
      sum += term;
      size += std::fabs(term);
    }
    if (!w.bias.empty()) sum += w.bias[expert][n * w.bias_stride];
    ASSERT_NEAR(out[n], sum, bound * size) << what << " row " << m << " channel " << n;
  }
}

TEST_F(AscendGroupedMatmul, EveryModeAgainstF64) {
  struct Size {
    size_t n, k;
    std::vector<int64_t> counts;
    size_t spare;
  };
  const std::vector<Size> sizes = {{5, 7, {3, 0, 2}, 2},
                                   {24, 96, {0, 0, 9}, 0},
                                   {33, 65, {1, 1, 1, 1}, 1},
                                   {16, 64, {0, 0}, 3},
                                   {40, 130, {70, 3, 0}, 0}};
  for (const ModeCase& mode : Modes()) {
    for (const Size& size : sizes) {
      const quant::MatrixBank bank = RandomBank(mode, size.counts.size(), size.n, size.k, random_);
      const quant::MatrixBank other = RandomBank(mode, size.counts.size(), 3, size.k, random_);
      std::vector<float> bias_values = testing::RandomFloats(random_, 3 * size.counts.size());
      std::vector<const float*> bias;
      for (size_t e = 0; e < size.counts.size(); ++e) bias.push_back(&bias_values[3 * e]);
      ExpertMatrices weights[2] = {bank.View(), other.View()};
      weights[1].bias = bias;
      size_t defined = 0;
      std::vector<int64_t> ends;
      for (int64_t count : size.counts) {
        defined += static_cast<size_t>(count);
        ends.push_back(static_cast<int64_t>(defined));
      }
      const QuantRows x = RandomRows(defined + size.spare, size.k, mode.rows, defined);
      GroupedMatmulArgs args;
      args.x = x;
      args.weights = weights;
      const std::string what(GroupedMatmulModeName(mode.mode));
      for (GroupListType type : {GroupListType::kCounts, GroupListType::kCumulative}) {
        args.group_list = {type == GroupListType::kCounts ? size.counts : ends, type};
        const Rows out = GroupedMatmul(kLayer).Run(context_, args);
        ASSERT_EQ(out.cols, size.n + 3);
        size_t row = 0;
        for (size_t e = 0; e < size.counts.size(); ++e) {
          for (int64_t i = 0; i < size.counts[e]; ++i, ++row) {
            ExpectRow(out.Row(row), x, row, weights[0], e, 2e-6, what);
            ExpectRow(out.Row(row) + size.n, x, row, weights[1], e, 2e-6, what);
          }
        }
      }
    }
  }
}

// Plain rows are quantised by the kernel itself, to the codes that a dispatcher would send.
TEST_F(AscendGroupedMatmul, QuantisesItsOwnInput) {
  const std::vector<int64_t> counts = {4, 3};
  for (const ModeCase& mode : Modes()) {
    const quant::MatrixBank bank = RandomBank(mode, 2, 9, 64, random_);
    const ExpertMatrices w = bank.View();
    const std::vector<float> values = testing::RandomFloats(random_, 7 * 64);
    const ConstRows x(values.data(), 7, 64);
    GroupedMatmulArgs args;
    args.weights = {&w, 1};
    args.group_list = {counts, GroupListType::kCounts};
    args.act.kind = mode.rows;
    args.x = QuantRows::Plain(x);
    const Rows plain = GroupedMatmul(kLayer).Run(context_, args);
    args.x = quant::QuantizeRows(context_, x, args.act);
    const Rows codes = GroupedMatmul(kLayer).Run(context_, args);
    for (size_t i = 0; i < 7; ++i)
      ASSERT_EQ(std::memcmp(plain.Row(i), codes.Row(i), 9 * sizeof(float)), 0)
          << GroupedMatmulModeName(mode.mode);
  }
}

TEST_F(AscendGroupedMatmul, TheSameBitsForEveryThreadCountAndBatch) {
  const std::vector<int64_t> counts = {5, 0, 4};
  for (const ModeCase& mode : Modes()) {
    const quant::MatrixBank bank = RandomBank(mode, 3, 70, 64, random_);
    const ExpertMatrices w = bank.View();
    const QuantRows x = RandomRows(9, 64, mode.rows, 9);
    GroupedMatmulArgs args;
    args.weights = {&w, 1};
    args.x = x;
    args.group_list = {counts, GroupListType::kCounts};
    const Rows expected = GroupedMatmul(kLayer).Run(context_, args);
    for (size_t threads : {1u, 3u}) {
      ThreadPool pool(threads);
      ExecContext context{pool, arena_};
      const Rows out = GroupedMatmul(kLayer).Run(context, args);
      ASSERT_EQ(std::memcmp(out.data, expected.data, 9 * 70 * sizeof(float)), 0);
    }
    // Row 7 alone, an expert's second.
    const std::vector<int64_t> one = {0, 0, 1};
    args.x = x.Slice(7, 1);
    args.group_list = {one, GroupListType::kCounts};
    const Rows alone = GroupedMatmul(kLayer).Run(context_, args);
    ASSERT_EQ(std::memcmp(alone.data, expected.Row(7), 70 * sizeof(float)), 0)
        << GroupedMatmulModeName(mode.mode);
  }
}

// --- vendor layouts

template <typename T>
std::vector<std::byte> Bytes(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A vendor's tensor that owns its bytes.
struct Tensor {
  std::vector<std::byte> bytes;
  DType dtype = DType::kU8;
  Shape shape;
  TensorView View() const { return {bytes.data(), dtype, shape}; }
};

uint8_t CodeAt(const quant::QuantMatrix& matrix, size_t n, size_t k) {
  const size_t at = n * matrix.stride + k;
  if (DTypeBits(matrix.format.dtype) == 4) {
    const auto byte = std::to_integer<uint8_t>(matrix.data[at / 2]);
    return at % 2 == 0 ? byte & 15 : byte >> 4;
  }
  return std::to_integer<uint8_t>(matrix.data[at]);
}

float ScaleAt(const quant::QuantMatrix& matrix, size_t n, size_t j) {
  return kernels::ScaleAt(matrix.format.scale_dtype, matrix.scale.data(),
                          n * matrix.scale_stride + j);
}

// The layouts of operands.h, element by element from the canonical matrices.
struct Vendor {
  Tensor weight, scale, offset;
  bool transposed;

  Vendor(GroupedMatmulMode mode, const quant::MatrixBank& bank, bool transposed_in)
      : transposed(transposed_in) {
    const size_t experts = bank.size();
    const size_t n = bank.matrix(0).rows;
    const size_t k = bank.matrix(0).cols;
    const size_t groups = bank.matrix(0).scale_stride;
    const DType dtype = bank.matrix(0).format.dtype;
    const bool int4 = dtype == DType::kI4 || dtype == DType::kU4;
    const bool fp4 = dtype == DType::kF4E2M1;
    const size_t width = mode == GroupedMatmulMode::kUnquantized ? DTypeBytes(dtype) : 1;
    for (size_t e = 0; e < experts; ++e) {
      const quant::QuantMatrix& matrix = bank.matrix(e);
      const auto put = [&](size_t row, size_t col) {
        if (int4) {  // row = pair of channels
          const int flip = dtype == DType::kU4 ? 8 : 0;
          const auto low = static_cast<unsigned>(CodeAt(matrix, 2 * row, col) ^ flip);
          const auto high = static_cast<unsigned>(CodeAt(matrix, 2 * row + 1, col) ^ flip);
          weight.bytes.push_back(static_cast<std::byte>(high << 4 | low));
        } else if (fp4) {  // col = pair of inputs
          const unsigned low = CodeAt(matrix, row, 2 * col);
          const unsigned high = CodeAt(matrix, row, 2 * col + 1);
          weight.bytes.push_back(static_cast<std::byte>(high << 4 | low));
        } else {
          const std::byte* at = matrix.data.data() + (row * matrix.stride + col) * width;
          weight.bytes.insert(weight.bytes.end(), at, at + width);
        }
      };
      const size_t rows = int4 ? n / 2 : n;
      const size_t cols = fp4 ? k / 2 : k;
      for (size_t i = 0; i < (transposed ? cols : rows); ++i) {
        for (size_t j = 0; j < (transposed ? rows : cols); ++j)
          put(transposed ? j : i, transposed ? i : j);
      }
    }
    weight.dtype = int4 ? (transposed ? DType::kI32 : DType::kI8) : fp4 ? DType::kU8 : dtype;
    const size_t stored_n = int4 ? (transposed ? n / 8 : n / 2) : n;
    const size_t stored_k = fp4 ? k / 2 : k;
    weight.shape =
        transposed ? Shape{experts, stored_k, stored_n} : Shape{experts, stored_n, stored_k};
    if (mode != GroupedMatmulMode::kUnquantized) MakeScale(mode, bank, experts, n, k, groups);
  }

  void MakeScale(GroupedMatmulMode mode, const quant::MatrixBank& bank, size_t experts, size_t n,
                 size_t k, size_t groups) {
    if (bank.matrix(0).format.scale_dtype == DType::kF8E8M0) {
      scale.shape = Shape{experts, k / 64, n, 2};
      for (size_t e = 0; e < experts; ++e) {
        for (size_t pair = 0; pair < k / 64; ++pair) {
          for (size_t row = 0; row < n; ++row) {
            for (size_t i : {0u, 1u})
              scale.bytes.push_back(bank.matrix(e).scale[row * groups + 2 * pair + i]);
          }
        }
      }
      return;
    }
    const bool bits = mode == GroupedMatmulMode::kW4A8Int || mode == GroupedMatmulMode::kW4A4Int;
    const bool antiquant = mode == GroupedMatmulMode::kW4A16;
    std::vector<float> scales, offsets;
    for (size_t e = 0; e < experts; ++e) {
      for (size_t j = 0; j < groups; ++j) {
        for (size_t row = 0; row < n; ++row) {
          scales.push_back(ScaleAt(bank.matrix(e), row, j));
          if (antiquant)
            offsets.push_back(8.0f -
                              std::to_integer<uint8_t>(bank.matrix(e).zero[row * groups + j]));
        }
      }
    }
    scale.shape = groups == 1 && !bits ? Shape{experts, n} : Shape{experts, groups, n};
    scale.dtype = bits ? DType::kI64 : antiquant ? DType::kF16 : DType::kF32;
    scale.bytes = bits ? Bytes(quant::WidenScaleBits(scales)) : Bytes(scales);
    if (!antiquant) return;
    for (const auto& [tensor, values] : {std::pair{&scale, &scales}, {&offset, &offsets}}) {
      std::vector<F16> halves;
      for (float value : *values) halves.push_back(ToF16(value));
      tensor->bytes = Bytes(halves);
      tensor->dtype = DType::kF16;
    }
    offset.shape = scale.shape;
  }

  AscendOperands Operands() const {
    AscendOperands operands;
    operands.weight = weight.View();
    if (!scale.bytes.empty()) operands.weight_scale = scale.View();
    if (!offset.bytes.empty()) operands.weight_offset = offset.View();
    operands.transposed = transposed;
    return operands;
  }
};

TEST_F(AscendGroupedMatmul, VendorLayoutsGiveTheSameBits) {
  const std::vector<int64_t> counts = {4, 0, 3};
  for (const ModeCase& mode : Modes()) {
    const size_t k = 128;
    const quant::MatrixBank bank = RandomBank(mode, 3, 24, k, random_);
    const QuantRows x = RandomRows(7, k, mode.rows, 7);
    const ExpertMatrices canonical = bank.View();
    GroupedMatmulArgs args;
    args.x = x;
    args.group_list = {counts, GroupListType::kCounts};
    args.weights = {&canonical, 1};
    const Rows expected = GroupedMatmul(kLayer).Run(context_, args);
    for (bool transposed : {true, false}) {
      const Vendor vendor(mode.mode, bank, transposed);
      const CanonicalWeights imported = ImportOperands(mode.mode, vendor.Operands(), "w13", kLayer);
      const ExpertMatrices w = imported.View();
      args.weights = {&w, 1};
      const Rows out = GroupedMatmul(kLayer).Run(context_, args);
      EXPECT_EQ(std::memcmp(out.data, expected.data, 7 * 24 * sizeof(float)), 0)
          << GroupedMatmulModeName(mode.mode) << (transposed ? " transposed" : "");
    }
  }
}

// Biases: scale_bias before weight_bias; the i32 one goes into the sums.
TEST_F(AscendGroupedMatmul, BiasesOfTheVendor) {
  const ModeCase w8a8 = Modes()[2];
  const quant::MatrixBank bank = RandomBank(w8a8, 2, 8, 20, random_);
  const Vendor vendor(w8a8.mode, bank, true);
  const QuantRows x = RandomRows(5, 20, ActQuantKind::kInt8Token, 5);
  const std::vector<int64_t> counts = {2, 3};
  std::vector<int32_t> sums(16);
  for (int32_t& sum : sums) sum = static_cast<int32_t>(random_() % 2001) - 1000;
  const std::vector<float> floats = testing::RandomFloats(random_, 16);
  const Tensor int_bias{Bytes(sums), DType::kI32, Shape{2, 8}};
  const Tensor float_bias{Bytes(floats), DType::kF32, Shape{2, 8}};
  const auto run = [&](const AscendOperands& operands) {
    const CanonicalWeights imported = ImportOperands(w8a8.mode, operands, "w2", kLayer);
    const ExpertMatrices w = imported.View();
    GroupedMatmulArgs args;
    args.x = x;
    args.group_list = {counts, GroupListType::kCounts};
    args.weights = {&w, 1};
    args.int_bias = imported.int_bias();
    return GroupedMatmul(kLayer).Run(context_, args);
  };
  AscendOperands operands = vendor.Operands();
  const Rows plain = run(operands);
  operands.weight_bias = float_bias.View();
  const Rows with_float = run(operands);
  operands.scale_bias = int_bias.View();
  const Rows with_int = run(operands);
  for (size_t i = 0; i < 5; ++i) {
    const size_t e = i < 2 ? 0 : 1;
    for (size_t n = 0; n < 8; ++n) {
      const double scale = double{*reinterpret_cast<const float*>(x.scale + 4 * i)} *
                           double{ScaleAt(bank.matrix(e), n, 0)};
      EXPECT_FLOAT_EQ(with_float.Row(i)[n], plain.Row(i)[n] + floats[e * 8 + n]);
      EXPECT_NEAR(with_int.Row(i)[n], plain.Row(i)[n] + sums[e * 8 + n] * scale, 1e-5);
    }
  }
}

TEST_F(AscendGroupedMatmul, ScaleBiasOfW4A8IsAChecksum) {
  const ModeCase w4a8 = Modes()[3];
  const quant::MatrixBank bank = RandomBank(w4a8, 2, 8, 24, random_);
  const Vendor vendor(w4a8.mode, bank, true);
  std::vector<float> checksum;
  for (size_t e = 0; e < 2; ++e) {
    for (size_t n = 0; n < 8; ++n) {
      double sum = 0;
      for (size_t k = 0; k < 24; ++k) sum += quant::MatrixElement(bank.View(), e, n, k);
      checksum.push_back(static_cast<float>(8 * sum));
    }
  }
  AscendOperands operands = vendor.Operands();
  const Tensor good{Bytes(checksum), DType::kF32, Shape{2, 8}};
  operands.scale_bias = good.View();
  const CanonicalWeights imported = ImportOperands(w4a8.mode, operands, "w13", kLayer);
  EXPECT_TRUE(imported.View().bias.empty()) << "it is not added";
  checksum[11] += 40.0f;
  const Tensor bad{Bytes(checksum), DType::kF32, Shape{2, 8}};
  operands.scale_bias = bad.View();
  ExpectError(ErrorCode::kCorruptData, {"layer 2", "w13", "scale_bias", "expert 1"},
              [&] { ImportOperands(w4a8.mode, operands, "w13", kLayer); });
}

TEST_F(AscendGroupedMatmul, BadOperandsAreRefusedByName) {
  const ModeCase w8a8 = Modes()[2];
  const quant::MatrixBank bank = RandomBank(w8a8, 2, 8, 24, random_);
  const Vendor vendor(w8a8.mode, bank, true);
  AscendOperands operands = vendor.Operands();
  operands.weight_scale = {};
  ExpectError(ErrorCode::kInvalidArgument, {"layer 2", "w13 (W8A8) weight_scale", "missing"},
              [&] { ImportOperands(w8a8.mode, operands, "w13", kLayer); });
  operands = vendor.Operands();
  operands.weight_scale.shape = Shape{2, 4};
  ExpectError(ErrorCode::kInvalidArgument, {"weight_scale", "[2, 8]", "[2, 4]"},
              [&] { ImportOperands(w8a8.mode, operands, "w13", kLayer); });
  operands = vendor.Operands();
  operands.transposed = false;  // [E, 24, 8] read as N = 24
  ExpectError(ErrorCode::kInvalidArgument, {"weight_scale", "[2, 24]", "[2, 8]"},
              [&] { ImportOperands(w8a8.mode, operands, "w13", kLayer); });
  operands = vendor.Operands();
  operands.weight.dtype = DType::kU8;
  ExpectError(ErrorCode::kInvalidArgument, {"weight", "i8", "U8"},
              [&] { ImportOperands(w8a8.mode, operands, "w13", kLayer); });

  const ModeCase w4a16 = Modes()[6];
  const quant::MatrixBank awq = RandomBank(w4a16, 1, 8, 32, random_);
  Vendor fraction(w4a16.mode, awq, true);
  const F16 half = ToF16(0.5f);
  std::memcpy(fraction.offset.bytes.data() + 6, &half, 2);
  ExpectError(ErrorCode::kCorruptData, {"weight_offset", "0.5"},
              [&] { ImportOperands(w4a16.mode, fraction.Operands(), "w13", kLayer); });

  const ExpertMatrices w = bank.View();
  const std::vector<int64_t> counts = {1, 1};
  GroupedMatmulArgs args;
  args.x = RandomRows(2, 24, ActQuantKind::kInt4Token, 2);
  args.group_list = {counts, GroupListType::kCounts};
  args.weights = {&w, 1};
  ExpectError(ErrorCode::kUnsupported, {"layer 2", "int4_token", "I8", "--moe-runner aiter"},
              [&] { GroupedMatmul(kLayer).Run(context_, args); });
  args.x = RandomRows(2, 25, ActQuantKind::kInt8Token, 2);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 2", "25 columns", "[8, 24]"},
              [&] { GroupedMatmul(kLayer).Run(context_, args); });
  args.x = RandomRows(1, 24, ActQuantKind::kInt8Token, 1);
  ExpectError(ErrorCode::kInvalidArgument, {"need 2 rows", "there are 1"},
              [&] { GroupedMatmul(kLayer).Run(context_, args); });
  const std::vector<int64_t> three = {1, 0, 0};
  args.group_list.values = three;
  ExpectError(ErrorCode::kInvalidArgument, {"expected 2 entries", "found 3"},
              [&] { GroupedMatmul(kLayer).Run(context_, args); });
}

TEST_F(AscendGroupedMatmul, W4A4Packings) {
  const ModeCase w4a4 = Modes()[5];
  const quant::MatrixBank bank = RandomBank(w4a4, 2, 6, 10, random_);
  std::vector<int8_t> old_codes, new_codes;
  std::vector<float> scales;
  for (size_t e = 0; e < 2; ++e) {
    for (size_t n = 0; n < 6; ++n) {
      scales.push_back(ScaleAt(bank.matrix(e), n, 0));
      for (size_t k = 0; k < 10; ++k) {
        const int code = CodeAt(bank.matrix(e), n, k);
        old_codes.push_back(static_cast<int8_t>(code < 8 ? code : code - 16));
      }
    }
    for (size_t n = 0; n < 6; n += 2) {
      for (size_t k = 0; k < 10; ++k) {
        const unsigned low = CodeAt(bank.matrix(e), n, k);
        const unsigned high = CodeAt(bank.matrix(e), n + 1, k);
        new_codes.push_back(static_cast<int8_t>(static_cast<uint8_t>(high << 4 | low)));
      }
    }
  }
  const Tensor old_file{Bytes(old_codes), DType::kI8, Shape{2, 6, 10}};
  const Tensor new_file{Bytes(new_codes), DType::kI8, Shape{2, 3, 10}};
  const Tensor scale{Bytes(scales), DType::kF32, Shape{2, 6, 1}};
  for (W4A4Packing packing : {W4A4Packing::kOld, W4A4Packing::kNew}) {
    const bool is_new = packing == W4A4Packing::kNew;
    const CanonicalWeights imported = ImportW4A4Checkpoint(
        packing, (is_new ? new_file : old_file).View(), scale.View(), "w13", kLayer);
    for (size_t e = 0; e < 2; ++e) {
      for (size_t n = 0; n < 6; ++n) {
        for (size_t k = 0; k < 10; ++k)
          ASSERT_EQ(quant::MatrixElement(imported.View(), e, n, k),
                    quant::MatrixElement(bank.View(), e, n, k));
      }
    }
    ExpectError(ErrorCode::kInvalidArgument,
                {"layer 2", "w13", "SGLANG_NPU_W4A4_NEW_PACKING", is_new ? "is 1" : "is 0",
                 is_new ? "[2, 6, 10]" : "[2, 3, 10]"},
                [&] {
                  ImportW4A4Checkpoint(packing, (is_new ? old_file : new_file).View(), scale.View(),
                                       "w13", kLayer);
                });
  }
  Settings settings;
  EXPECT_EQ(W4A4PackingOf(settings), W4A4Packing::kOld);
  settings.Set("moe-w4a4-new-packing", "1", "test");
  EXPECT_EQ(W4A4PackingOf(settings), W4A4Packing::kNew);
  setenv("SGLANG_NPU_W4A4_NEW_PACKING", "1", 1);
  EXPECT_EQ(W4A4PackingOf(Settings::FromEnvironment()), W4A4Packing::kNew);
  unsetenv("SGLANG_NPU_W4A4_NEW_PACKING");
  EXPECT_EQ(W4A4PackingOf(Settings::FromEnvironment()), W4A4Packing::kOld);
}

// gemm1, Swiglu and mxfp8 in one is the three in turn; counts are summed inside.
TEST_F(AscendGroupedMatmul, FusedSwigluQuant) {
  const std::vector<int64_t> counts = {3, 0, 2};
  const std::vector<int64_t> ends = {3, 3, 5};
  for (size_t at : {7u, 8u}) {
    const ModeCase mode = Modes()[at];
    const quant::MatrixBank gate = RandomBank(mode, 3, 40, 64, random_);
    const quant::MatrixBank up = RandomBank(mode, 3, 40, 64, random_);
    const ExpertMatrices w[2] = {gate.View(), up.View()};
    const QuantRows x = RandomRows(6, 64, ActQuantKind::kMxFp8, 5);
    GroupedMatmulSwigluQuant::Options options;
    options.requant.kind = ActQuantKind::kMxFp8;
    options.layer_id = kLayer;
    const GroupedMatmulSwigluQuant fused(options);
    GroupedMatmulArgs args;
    args.x = x;
    args.weights = w;
    std::vector<QuantRows> results;
    for (GroupListType type : {GroupListType::kCounts, GroupListType::kCumulative}) {
      args.group_list = {type == GroupListType::kCounts ? counts : ends, type};
      results.push_back(fused.Run(context_, args));
    }
    const Rows gate_up = GroupedMatmul(kLayer).Run(context_, args);
    const Rows y = context_.arena.AllocateRows(5, 40);
    for (size_t i = 0; i < 5; ++i) {
      for (size_t k = 0; k < 40; ++k) {
        const double g = gate_up.Row(i)[k];
        y.Row(i)[k] = static_cast<float>(g / (1 + std::exp(-g)) * gate_up.Row(i)[40 + k]);
      }
    }
    for (const QuantRows& result : results) {
      ASSERT_EQ(result.rows, 5u);
      ASSERT_EQ(result.kind, ActQuantKind::kMxFp8);
      for (size_t i = 0; i < 5; ++i) {
        for (size_t block = 0; block < 2; ++block) {
          double amax = 0;
          const size_t end = std::min<size_t>(40, block * 32 + 32);
          for (size_t k = block * 32; k < end; ++k)
            amax = std::max(amax, std::fabs(double{y.Row(i)[k]}));
          for (size_t k = block * 32; k < end; ++k)
            EXPECT_NEAR(testing::RowElement(result, i, k), y.Row(i)[k], amax / 8);
        }
      }
    }
    args.x = RandomRows(6, 64, ActQuantKind::kNone, 5);
    ExpectError(ErrorCode::kUnsupported, {"layer 2", "mxfp8 rows", "none"},
                [&] { fused.Run(context_, args); });
    options.swiglu_limit = 10.0f;
    ExpectError(ErrorCode::kUnsupported, {"layer 2", "cannot clamp", "10", "aiter"},
                [&] { GroupedMatmulSwigluQuant clamped(options); });
  }
}

}  // namespace
}  // namespace switchyard::moe::ascend
