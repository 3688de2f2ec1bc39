// The expert product: every weight format with every kind of activations against f64.
#include "quant/expert_matmul.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "kernels/convert/convert.h"
#include "quant/act_quant.h"
#include "testing/guarded.h"
#include "testing/quant_formats.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::quant {
namespace {

using testing::GuardedBuffer;

// A bank of dense matrices.
QuantMatrix Dense(ConstRows w, DType dtype) {
  QuantMatrix matrix = QuantMatrix::Make({dtype, DType::kF32, 0, 0, false}, w.rows, w.cols);
  for (size_t n = 0; n < w.rows; ++n) {
    kernels::ConvertFromF32(w.Row(n), w.cols, dtype,
                            matrix.data.data() + BytesOf(dtype, n * matrix.stride));
  }
  return matrix;
}

// Two experts in every format.
std::vector<std::pair<std::string, MatrixBank>> Banks(size_t rows, size_t cols,
                                                      std::mt19937_64& random) {
  std::vector<std::pair<std::string, MatrixBank>> banks;
  const auto add = [&](const std::string& name, const auto& make) {
    std::vector<QuantMatrix> matrices;
    for (int expert = 0; expert < 2; ++expert) {
      const std::vector<float> w = testing::RandomFloats(random, rows * cols, 0.1f);
      matrices.push_back(make(ConstRows(w.data(), rows, cols)));
    }
    banks.emplace_back(name, MatrixBank(std::move(matrices)));
  };
  for (const auto& [name, how] : testing::AllWeightQuants())
    add(name, [&how = how](ConstRows w) { return QuantizeMatrix(w, how); });
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    add(std::string(DTypeName(dtype)), [dtype](ConstRows w) { return Dense(w, dtype); });
  return banks;
}

class ExpertMatmulTest : public ::testing::Test {
 protected:
  std::vector<float> Multiply(const ActRows& x, const ExpertMatrices& w, size_t expert, size_t n0,
                              size_t n) {
    GuardedBuffer<float> scratch(ExpertScratchFloats(w, n));
    GuardedBuffer<float> out(x.rows.size() * n);
    MultiplyExpert(x, w, expert, n0, n, scratch.span(), out.data(), n);
    return {out.data(), out.data() + out.size()};
  }

  // The product in f64 of the same codes.
  std::vector<double> Oracle(const QuantRows& x, const ExpertMatrices& w, size_t expert) {
    std::vector<double> matrix(w.rows * w.cols);
    for (size_t n = 0; n < w.rows; ++n) {
      for (size_t k = 0; k < w.cols; ++k) matrix[n * w.cols + k] = MatrixElement(w, expert, n, k);
    }
    std::vector<double> out;
    for (size_t m = 0; m < x.rows; ++m) {
      std::vector<double> row(w.cols);
      for (size_t k = 0; k < w.cols; ++k) row[k] = testing::RowElement(x, m, k);
      for (size_t n = 0; n < w.rows; ++n) {
        double sum = 0;
        for (size_t k = 0; k < w.cols; ++k) sum += row[k] * matrix[n * w.cols + k];
        out.push_back(sum);
      }
    }
    return out;
  }

  ThreadPool pool_{2};
  Arena arena_;
  ExecContext context_{pool_, arena_};
  std::mt19937_64 random_ = testing::MakeRandom(61);
};

double RelativeL2(const std::vector<float>& values, const std::vector<double>& expected) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(double{values[i]} - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}

TEST_F(ExpertMatmulTest, EveryPairAgreesWithF64) {
  testing::ForEachTarget([&] {
    for (size_t cols : {1u, 33u, 128u, 333u}) {
      const std::vector<float> x = testing::RandomFloats(random_, 5 * cols);
      for (const auto& [name, bank] : Banks(7, cols, random_)) {
        const ExpertMatrices w = bank.View();
        for (const ActQuant& how : testing::AllActQuants()) {
          SCOPED_TRACE(name + " x " + std::string(ActQuantKindName(how.kind)) + " K " +
                       std::to_string(cols));
          ArenaScope scope(arena_);
          const QuantRows codes = QuantizeRows(context_, ConstRows(x.data(), 5, cols), how);
          const std::vector<double> expected = Oracle(codes, w, 1);
          const ActRows rows = PrepareExpertRows(context_, codes, {}, w.format, DType::kF32);
          EXPECT_LE(RelativeL2(Multiply(rows, w, 1, 0, 7), expected), 2e-6);
          // Plain rows with the same quantiser give the very same product.
          const ActRows quantized = PrepareExpertRows(
              context_, QuantRows::Plain(ConstRows(x.data(), 5, cols)), how, w.format, DType::kF32);
          EXPECT_EQ(Multiply(quantized, w, 1, 0, 7), Multiply(rows, w, 1, 0, 7));
        }
      }
    }
  });
}

// One output, and rows as long as those of models.
TEST_F(ExpertMatmulTest, SizesOfModels) {
  testing::ForEachTarget([&] {
    for (size_t cols : {192u, 896u, 2880u}) {
      const std::vector<float> x = testing::RandomFloats(random_, 2 * cols);
      for (const auto& [name, bank] : Banks(1, cols, random_)) {
        const ExpertMatrices w = bank.View();
        for (ActQuantKind kind :
             {ActQuantKind::kNone, ActQuantKind::kInt8Token, ActQuantKind::kFp8Group}) {
          SCOPED_TRACE(name + " x " + std::string(ActQuantKindName(kind)) + " K " +
                       std::to_string(cols));
          ArenaScope scope(arena_);
          const QuantRows codes =
              QuantizeRows(context_, ConstRows(x.data(), 2, cols), {.kind = kind});
          const ActRows rows = PrepareExpertRows(context_, codes, {}, w.format, DType::kF32);
          EXPECT_LE(RelativeL2(Multiply(rows, w, 1, 0, 1), Oracle(codes, w, 1)), 1e-5);
        }
      }
    }
  });
}

TEST_F(ExpertMatmulTest, IntegersMultiplyIntegers) {
  const std::vector<float> x = testing::RandomFloats(random_, 3 * 64);
  const QuantRows plain = QuantRows::Plain(ConstRows(x.data(), 3, 64));
  ActQuant how;
  how.kind = ActQuantKind::kInt8Token;
  const auto dtype_for = [&](const WeightQuant& weights) {
    const QuantMatrix matrix = QuantizeMatrix(ConstRows(x.data(), 3, 64), weights);
    return PrepareExpertRows(context_, plain, how, matrix.format, DType::kF32).dtype;
  };
  EXPECT_EQ(dtype_for(WeightQuant::Int8Channel()), DType::kI8);
  EXPECT_EQ(dtype_for(WeightQuant::Int4Channel()), DType::kI8);
  EXPECT_EQ(dtype_for(WeightQuant::Int4Group(32, DType::kF32)), DType::kF32);
  EXPECT_EQ(dtype_for(WeightQuant::Fp8Channel()), DType::kF32);
}

// The promise that batches, tiles, threads and ranks rest on.
TEST_F(ExpertMatmulTest, BitsDoNotDependOnTheSplit) {
  testing::ForEachTarget([&] {
    const size_t cols = 2049;  // so wide that tiles are cut inside a call
    const size_t rows = 70;
    const std::vector<float> x = testing::RandomFloats(random_, 9 * cols);
    for (const auto& [name, bank] : Banks(rows, cols, random_)) {
      const ExpertMatrices w = bank.View();
      for (ActQuantKind kind :
           {ActQuantKind::kNone, ActQuantKind::kInt8Token, ActQuantKind::kMxFp8}) {
        SCOPED_TRACE(name + " x " + std::string(ActQuantKindName(kind)));
        ArenaScope scope(arena_);
        ActQuant how;
        how.kind = kind;
        const ActRows all = PrepareExpertRows(
            context_, QuantRows::Plain(ConstRows(x.data(), 9, cols)), how, w.format, DType::kF32);
        const std::vector<float> whole = Multiply(all, w, 0, 0, rows);
        const std::vector<uint32_t> picked = {8, 0, 3, 3};
        const ActRows some = GatherRows(arena_, all, picked);
        for (const auto& [n0, n] : {std::pair{0u, 1u}, {5u, 3u}, {2u, 40u}, {69u, 1u}, {3u, 0u}}) {
          const std::vector<float> part = Multiply(some, w, 0, n0, n);
          for (size_t m = 0; m < picked.size(); ++m) {
            for (size_t j = 0; j < n; ++j)
              ASSERT_EQ(part[m * n + j], whole[picked[m] * rows + n0 + j]) << m << " " << j;
          }
        }
        const std::vector<float> slice = Multiply(all.Slice(4, 1), w, 0, 0, rows);
        EXPECT_EQ(std::memcmp(slice.data(), whole.data() + 4 * rows, rows * 4), 0);
      }
    }
  });
}

TEST_F(ExpertMatmulTest, NoRows) {
  for (const auto& [name, bank] : Banks(5, 40, random_)) {
    const ActRows none = PrepareExpertRows(context_, QuantRows::Plain(ConstRows(nullptr, 0, 40)),
                                           {}, bank.View().format, DType::kF32);
    EXPECT_TRUE(Multiply(none, bank.View(), 0, 0, 5).empty());
  }
}

// Plain rows are rounded to bf16 only where a kernel multiplies bf16 with the weights as they are.
TEST_F(ExpertMatmulTest, NarrowActivationsForDenseWeightsOnly) {
  const std::vector<float> x = testing::RandomFloats(random_, 2 * 40);
  std::vector<BF16> narrow(x.size());
  kernels::ConvertFromF32(x.data(), x.size(), DType::kBF16, narrow.data());
  QuantRows plain;
  plain.dtype = DType::kBF16;
  plain.rows = 2;
  plain.cols = 40;
  plain.stride = 80;
  plain.data = reinterpret_cast<const std::byte*>(narrow.data());
  for (const auto& [name, bank] : Banks(4, 40, random_)) {
    SCOPED_TRACE(name);
    const ExpertMatrices w = bank.View();
    const ActRows rows = PrepareExpertRows(context_, plain, {}, w.format, DType::kBF16);
    EXPECT_EQ(rows.dtype, name == "BF16" ? DType::kBF16 : DType::kF32);
    if (name == "BF16") {
      EXPECT_EQ(rows.rows[1], plain.Row(1));  // no copy
    }
    EXPECT_LE(RelativeL2(Multiply(rows, w, 0, 0, 4), Oracle(plain, w, 0)), 1e-5);
    const ActRows rounded = PrepareExpertRows(
        context_, QuantRows::Plain(ConstRows(x.data(), 2, 40)), {}, w.format, DType::kBF16);
    EXPECT_EQ(rounded.dtype, rows.dtype);
  }
}

// Every second row of a bank: gate and up rows that alternate.
TEST_F(ExpertMatmulTest, AlternatingRows) {
  const size_t cols = 50;
  const std::vector<float> x = testing::RandomFloats(random_, 2 * cols);
  for (const auto& [name, bank] : Banks(8, cols, random_)) {
    const ExpertMatrices w = bank.View();
    if (w.format.scale_rows > 1) continue;  // blocks and tensors hold rows of both
    SCOPED_TRACE(name);
    ExpertMatrices odd = w;
    odd.rows = 4;
    odd.stride *= 2;
    odd.scale_stride *= 2;
    std::vector<const std::byte*> data, scale, zero;
    for (const std::byte* p : w.data) data.push_back(p + BytesOf(w.format.dtype, w.stride));
    for (const std::byte* p : w.scale)
      scale.push_back(p + w.scale_stride * DTypeBytes(w.format.scale_dtype));
    for (const std::byte* p : w.zero) zero.push_back(p + w.scale_stride);
    odd.data = data;
    odd.scale = scale;
    odd.zero = zero;
    const ActRows rows = PrepareExpertRows(context_, QuantRows::Plain(ConstRows(x.data(), 2, cols)),
                                           {}, w.format, DType::kF32);
    const std::vector<float> whole = Multiply(rows, w, 1, 0, 8);
    const std::vector<float> half = Multiply(rows, odd, 1, 0, 4);
    for (size_t m = 0; m < 2; ++m) {
      for (size_t j = 0; j < 4; ++j) EXPECT_EQ(half[m * 4 + j], whole[m * 8 + 2 * j + 1]);
    }
  }
}

TEST_F(ExpertMatmulTest, ElementsAreWhatTheProductDecodes) {
  for (const auto& [name, bank] : Banks(6, 77, random_)) {
    const ExpertMatrices w = bank.View();
    std::vector<float> row(77);
    for (size_t n = 0; n < 6; ++n) {
      DecodeMatrixRow(w, 1, n, row.data());
      for (size_t k = 0; k < 77; ++k)
        ASSERT_EQ(row[k], static_cast<float>(MatrixElement(w, 1, n, k))) << name;
    }
  }
}

// Linear layers of every format, one matrix of a single row among them: work is shared out by
// outputs, whatever the threads.
TEST_F(ExpertMatmulTest, LinearLayersHaveTheSameBitsForAnyThreads) {
  testing::ForEachTarget([&] {
    const size_t cols = 192;
    const std::vector<float> x = testing::RandomFloats(random_, 5 * cols);
    for (size_t rows : {1u, 133u}) {
      for (const auto& [name, bank] : Banks(rows, cols, random_)) {
        for (ActQuantKind kind :
             {ActQuantKind::kNone, ActQuantKind::kInt8Token, ActQuantKind::kMxFp4}) {
          SCOPED_TRACE(name + " x " + std::string(ActQuantKindName(kind)) + " N " +
                       std::to_string(rows));
          WeightMatrix weight = bank.matrix(0).View();
          weight.act.kind = kind;
          const auto run = [&, rows = rows](size_t num_threads) {
            ThreadPool pool(num_threads);
            Arena arena;
            ExecContext context{pool, arena};
            std::vector<float> out(5 * rows);
            const LinearJob job{weight, nullptr, Rows(out.data(), 5, rows)};
            RunLinears(context, ConstRows(x.data(), 5, cols), {&job, 1});
            return out;
          };
          const std::vector<float> expected = run(1);
          for (size_t num_threads : {2u, 3u})
            EXPECT_TRUE(run(num_threads) == expected) << num_threads << " threads";
        }
      }
    }
  });
}

// Linear layers of fp8 blocks sum codes group by group: within the rounding of a few f32 additions
// of the exact product of both codes, whatever the batch and the threads.
TEST(RunLinears, SumsCodesOfFp8GroupsAlmostExactly) {
  auto random = testing::MakeRandom(91);
  for (const auto& [rows, cols, count] :
       {std::array<size_t, 3>{40, 72, 1}, {130, 256, 5}, {17, 300, 200}, {1, 128, 3}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const std::vector<float> w = testing::RandomFloats(random, rows * cols, 0.1f);
    const std::vector<float> x = testing::RandomFloats(random, count * cols);
    const QuantMatrix matrix =
        QuantizeMatrix(ConstRows(w.data(), rows, cols), WeightQuant::Fp8Block(128, 128));
    WeightMatrix view = matrix.View();
    view.act.kind = ActQuantKind::kFp8Group;
    view.act.group = 128;
    testing::ForEachTarget([&, rows = rows, cols = cols, count = count] {
      const auto run = [&](size_t first, size_t num, size_t threads) {
        ThreadPool pool(threads);
        Arena arena;
        ExecContext context{pool, arena};
        std::vector<float> out(num * rows);
        const LinearJob job{view, nullptr, Rows(out.data(), num, rows)};
        RunLinears(context, ConstRows(x.data() + first * cols, num, cols), {&job, 1});
        return out;
      };
      const std::vector<float> all = run(0, count, 1);
      EXPECT_EQ(run(0, count, 3), all);
      const std::vector<float> last = run(count - 1, 1, 2);
      EXPECT_EQ(last, std::vector<float>(all.end() - static_cast<std::ptrdiff_t>(rows), all.end()));
      ThreadPool pool(1);
      Arena arena;
      ExecContext context{pool, arena};
      const QuantRows codes = QuantizeRows(context, ConstRows(x.data(), count, cols), view.act);
      for (size_t t = 0; t < count; ++t) {
        for (size_t n = 0; n < rows; ++n) {
          double exact = 0, size = 0;
          for (size_t k = 0; k < cols; ++k) {
            const double term =
                testing::RowElement(codes, t, k) * MatrixElement(view.AsBank(), 0, n, k);
            exact += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(all[t * rows + n], exact, 2e-7 * size) << t << ", " << n;
        }
      }
    });
  }
}

}  // namespace
}  // namespace switchyard::quant
