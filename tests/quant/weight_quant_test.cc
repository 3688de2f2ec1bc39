// Quantisers of weights: exact codes where they can be said, bounds elsewhere.
#include "quant/weight_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "quant/expert_matmul.h"
#include "testing/errors.h"
#include "testing/quant_formats.h"
#include "testing/random.h"

namespace switchyard::quant {
namespace {

// The whole matrix in f64.
std::vector<double> Values(const QuantMatrix& matrix) {
  std::vector<QuantMatrix> one;
  one.push_back(matrix);
  const MatrixBank bank(std::move(one));
  std::vector<double> values;
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k) values.push_back(MatrixElement(bank.View(), 0, n, k));
  }
  return values;
}

double RelativeL2(const std::vector<double>& values, const std::vector<float>& expected) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    error += std::pow(values[i] - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  return std::sqrt(error / size);
}

TEST(QuantizeMatrix, ErrorsFitTheFormat) {
  auto random = testing::MakeRandom(51);
  for (const auto& [name, how] : testing::AllWeightQuants()) {
    for (size_t cols : {1u, 31u, 64u, 130u, 385u}) {
      SCOPED_TRACE(name + " " + std::to_string(cols));
      const std::vector<float> w = testing::RandomFloats(random, 200 * cols, 0.1f);
      const QuantMatrix matrix = QuantizeMatrix(ConstRows(w.data(), 200, cols), how);
      const bool four_bits = DTypeBits(matrix.format.dtype) == 4;
      const double bound = four_bits ? 0.17 : matrix.format.dtype == DType::kI8 ? 0.012 : 0.04;
      EXPECT_LE(RelativeL2(Values(matrix), w), bound);
    }
  }
}

// The values of the codes quantise to the same values: nothing drifts.
TEST(QuantizeMatrix, IsIdempotent) {
  auto random = testing::MakeRandom(52);
  for (const auto& [name, how] : testing::AllWeightQuants()) {
    if (how.format.has_zero) continue;  // its range is rounded once more
    SCOPED_TRACE(name);
    const std::vector<float> w = testing::RandomFloats(random, 5 * 130);
    const QuantMatrix once = QuantizeMatrix(ConstRows(w.data(), 5, 130), how);
    const std::vector<double> exact = Values(once);
    const std::vector<float> values(exact.begin(), exact.end());
    EXPECT_LE(RelativeL2(Values(QuantizeMatrix(ConstRows(values.data(), 5, 130), how)), values),
              how.format.scale_dtype == DType::kF32 ? 1e-6 : 0.1);
  }
}

TEST(QuantizeMatrix, Int4PerRowIsTheQuarkRule) {
  const std::vector<float> w = {7.0f, -3.4f, 0.5f, -7.0f, 1.5f, 2.5f};
  const QuantMatrix matrix = QuantizeMatrix(ConstRows(w.data(), 1, 6), WeightQuant::Int4Channel());
  EXPECT_EQ(Values(matrix), (std::vector<double>{7, -3, 0, -7, 2, 2}));  // ties to even
}

TEST(QuantizeMatrix, ZeroPointsCoverOneSidedRanges) {
  std::vector<float> w(64);
  for (size_t i = 0; i < 64; ++i) w[i] = 1.0f + static_cast<float>(i % 16) / 15.0f;
  const QuantMatrix matrix =
      QuantizeMatrix(ConstRows(w.data(), 1, 64), WeightQuant::Uint4Group(32, DType::kF32));
  EXPECT_EQ(matrix.zero[0], std::byte{0});  // the range is widened to hold 0
  const std::vector<double> values = Values(matrix);
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(values[i], w[i], 1.0001 / 15.0);  // half a step
}

TEST(QuantizeMatrix, ZeroAndNonFiniteCells) {
  for (const auto& [name, how] : testing::AllWeightQuants()) {
    SCOPED_TRACE(name);
    std::vector<float> w(3 * 64, 0.0f);
    for (double value : Values(QuantizeMatrix(ConstRows(w.data(), 3, 64), how)))
      EXPECT_EQ(value, 0.0);
    w[64] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(std::isnan(Values(QuantizeMatrix(ConstRows(w.data(), 3, 64), how))[64]));
  }
}

TEST(QuantizeMatrix, RefusesFloatTypes) {
  const float w = 1.0f;
  WeightQuant how;
  testing::ExpectError(ErrorCode::kUnsupported, {"F32"},
                       [&] { QuantizeMatrix(ConstRows(&w, 1, 1), how); });
}

TEST(MatrixBank, RefusesDifferentMatrices) {
  std::vector<QuantMatrix> matrices;
  matrices.push_back(QuantMatrix::Make({DType::kI8, DType::kF32, 1, 0, false}, 4, 8));
  matrices.push_back(QuantMatrix::Make({DType::kI8, DType::kF32, 1, 0, false}, 4, 9));
  testing::ExpectError(ErrorCode::kInvalidArgument, {"4 x 8", "4 x 9"},
                       [&] { MatrixBank bank(std::move(matrices)); });
}

}  // namespace
}  // namespace switchyard::quant
