// Every matrix product of kernels.def against the scalar reference, on every instruction set.
#include "kernels/matmul/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::GuardedBuffer;

// Random values of a dtype in a guarded buffer.
class Operand {
 public:
  Operand(DType dtype, const std::vector<float>& values)
      : dtype_(dtype), bytes_(values.size() * DTypeBytes(dtype)) {
    for (size_t i = 0; i < values.size(); ++i) {
      std::byte* at = bytes_.data() + i * DTypeBytes(dtype);
      const BF16 bf16 = ToBF16(values[i]);
      const F16 f16 = ToF16(values[i]);
      switch (dtype) {
        case DType::kBF16: std::memcpy(at, &bf16, 2); break;
        case DType::kF16: std::memcpy(at, &f16, 2); break;
        default: std::memcpy(at, &values[i], 4); break;
      }
    }
  }
  const std::byte* at(size_t element) const { return bytes_.data() + element * DTypeBytes(dtype_); }

 private:
  DType dtype_;
  GuardedBuffer<std::byte> bytes_;
};

struct Problem {
  size_t m, n, k;
};

// Below, at and beyond the tile in every dimension; primes; and the sizes of real models along K.
std::vector<Problem> Problems() {
  std::vector<Problem> problems;
  for (size_t m : {1u, 2u, 3u, 5u, 6u, 7u, 12u, 13u}) {
    for (size_t n : {1u, 3u, 4u, 5u, 8u, 11u}) {
      for (size_t k : {1u, 7u, 16u, 31u, 32u, 33u, 64u, 97u, 256u}) problems.push_back({m, n, k});
    }
  }
  problems.push_back({0, 5, 64});
  problems.push_back({4, 0, 64});
  problems.push_back({3, 5, 0});
  problems.push_back({64, 20, 2048});
  problems.push_back({150, 9, 2048});  // more rows than stay in L2
  problems.push_back({5, 6, 2880});
  problems.push_back({1, 1, 2880});
  problems.push_back({7, 192, 896});
  problems.push_back({3, 1, 192});
  return problems;
}

void RunProblem(const MatmulKernel& kernel, const Problem& problem, std::mt19937_64& random) {
  SCOPED_TRACE(std::string(kernel.name) + " m=" + std::to_string(problem.m) +
               " n=" + std::to_string(problem.n) + " k=" + std::to_string(problem.k));
  const Operand a(kernel.a_dtype, testing::RandomFloats(random, problem.m * problem.k));
  const Operand w(kernel.w_dtype, testing::RandomFloats(random, problem.n * problem.k));
  std::vector<const void*> rows;
  for (size_t m = 0; m < problem.m; ++m) rows.push_back(a.at(m * problem.k));
  GuardedBuffer<float> out(problem.m * problem.n);
  std::vector<float> expected(problem.m * problem.n);

  MatmulArgs args;
  args.a_rows = rows.data();
  args.num_rows = problem.m;
  args.w = w.at(0);
  args.w_stride = problem.k;
  args.n = problem.n;
  args.k = problem.k;
  args.out = out.data();
  args.out_stride = problem.n;
  kernel.run(args);
  MatmulArgs reference = args;
  reference.out = expected.data();
  MatmulReference(reference, kernel.a_dtype, kernel.w_dtype);

  // |error| <= (k + 2) eps * sum |a w|; the sum of k products of unit normals' magnitudes is close
  // to 0.64 k. Pair products are rounded once more in hardware, hence the factor 2.
  const double bound = 2.0 * 0x1p-24 * (static_cast<double>(problem.k) + 2) *
                       (0.7 * static_cast<double>(problem.k) + 8);
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(out[i], expected[i], bound) << "element " << i;
}

TEST(Matmul, EveryRowOfTheTableMatchesTheReference) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(1);
    for (const MatmulKernel& kernel : AllMatmulKernels()) {
      for (const Problem& problem : Problems()) RunProblem(kernel, problem, random);
    }
  });
}

// The promise that everything rests on: one row gives the same bits alone, in any batch, and in any
// split of n.
TEST(Matmul, BitsDoNotDependOnBatchOrSplit) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(2);
    for (const MatmulKernel& kernel : AllMatmulKernels()) {
      SCOPED_TRACE(kernel.name);
      for (size_t k : {33u, 256u, 2048u}) {
        const size_t m = 23;
        const size_t n = 22;
        const Operand a(kernel.a_dtype, testing::RandomFloats(random, m * k));
        const Operand w(kernel.w_dtype, testing::RandomFloats(random, n * k));
        std::vector<const void*> rows;
        for (size_t i = 0; i < m; ++i) rows.push_back(a.at(i * k));
        std::vector<float> whole(m * n);
        MatmulArgs args{rows.data(), m, w.at(0), k, n, k, whole.data(), n};
        kernel.run(args);
        std::vector<float> parts(m * n);
        for (size_t m0 = 0; m0 < m;) {
          const size_t rows_now = std::min<size_t>(1 + random() % 7, m - m0);
          for (size_t n0 = 0; n0 < n;) {
            const size_t n_now = std::min<size_t>(1 + random() % 9, n - n0);
            kernel.run({rows.data() + m0, rows_now, w.at(n0 * k), k, n_now, k,
                        parts.data() + m0 * n + n0, n});
            n0 += n_now;
          }
          m0 += rows_now;
        }
        ASSERT_EQ(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)), 0)
            << "k=" << k;
      }
    }
  });
}

TEST(Matmul, SpecialValuesPassThrough) {
  testing::ForEachTarget([] {
    const float inf = std::numeric_limits<float>::infinity();
    for (const MatmulKernel& kernel : AllMatmulKernels()) {
      SCOPED_TRACE(kernel.name);
      const Operand a(kernel.a_dtype, {1.0f, 2.0f, 0.0f});
      const Operand w(kernel.w_dtype, {inf, 1.0f, 1.0f, NAN, 1.0f, 1.0f, 3.0f, 4.0f, inf});
      const void* row = a.at(0);
      float out[3];
      kernel.run({&row, 1, w.at(0), 3, 3, 3, out, 3});
      EXPECT_EQ(out[0], inf);
      EXPECT_TRUE(std::isnan(out[1]));
      EXPECT_TRUE(std::isnan(out[2])) << "0 * infinity";
    }
  });
}

TEST(Matmul, LookupKnowsItsPairs) {
  EXPECT_NE(FindMatmul(DType::kF32, DType::kBF16), nullptr);
  EXPECT_EQ(FindMatmul(DType::kF16, DType::kF16), nullptr);
}

}  // namespace
}  // namespace switchyard::kernels
