// Weights move into panels: nothing changes but where they lie.
#include "model/weight_packer.h"

#include <gtest/gtest.h>

#include <latch>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "quant/expert_matmul.h"
#include "quant/matrix.h"
#include "quant/node_tiles.h"
#include "quant/panel_matmul.h"
#include "testing/random.h"

namespace switchyard {
namespace {

constexpr size_t kRows = 40;
constexpr size_t kCols = 64;

// bf16 numbers.
std::vector<BF16> Numbers(size_t count, uint64_t seed) {
  auto random = testing::MakeRandom(seed);
  std::vector<BF16> numbers;
  for (float value : testing::RandomFloats(random, count)) numbers.push_back(ToBF16(value));
  return numbers;
}

WeightMatrix Matrix(const std::vector<BF16>& numbers, size_t first = 0, size_t step = 1) {
  WeightMatrix matrix =
      WeightMatrix::Dense(reinterpret_cast<const std::byte*>(numbers.data() + first * kCols),
                          DType::kBF16, kRows, kCols);
  matrix.stride = step * kCols;
  return matrix;
}

std::vector<double> Values(const ExpertMatrices& matrix, size_t expert) {
  std::vector<double> values;
  for (size_t n = 0; n < matrix.rows; ++n) {
    for (size_t k = 0; k < matrix.cols; ++k)
      values.push_back(quant::MatrixElement(matrix, expert, n, k));
  }
  return values;
}

class WeightPacker : public ::testing::Test {
 protected:
  WeightPacker() : pool_(2) { weights_.layers.resize(1); }

  void Pack(size_t available = 0) {
    const auto prepare = [this](const std::byte* data, size_t bytes) {
      const std::lock_guard lock(mutex_);
      prepared_[data] = bytes;
    };
    const auto release = [this](const std::byte* data, size_t bytes) {
      const std::lock_guard lock(mutex_);
      released_[data] = bytes;
    };
    panels_ = PackWeights(weights_, pool_, {prepare, release}, available);
  }

  ThreadPool pool_;
  TransformerWeights weights_;
  std::shared_ptr<const MappedMemory> panels_;
  std::mutex mutex_;
  std::map<const std::byte*, size_t> prepared_, released_;
};

TEST_F(WeightPacker, ValuesStayAndTheSourceIsReleased) {
  const std::vector<BF16> q = Numbers(kRows * kCols, 1), head = Numbers(kRows * kCols, 2),
                          embedding = Numbers(kRows * kCols, 3);
  weights_.layers[0].attention.q = Matrix(q);
  weights_.head = Matrix(head);
  weights_.embedding = Matrix(embedding);
  const std::vector<double> before = Values(weights_.layers[0].attention.q.AsBank(), 0);
  Pack();
  ASSERT_NE(panels_, nullptr);
  const WeightMatrix& packed = weights_.layers[0].attention.q;
  EXPECT_TRUE(packed.format.in_panels);
  EXPECT_TRUE(weights_.head.format.in_panels);
  EXPECT_FALSE(weights_.embedding.format.in_panels);
  EXPECT_EQ(Values(packed.AsBank(), 0), before);
  EXPECT_EQ(released_.size(), 2u);
  EXPECT_EQ(released_[reinterpret_cast<const std::byte*>(q.data())], kRows * kCols * 2);
  EXPECT_TRUE(prepared_.contains(reinterpret_cast<const std::byte*>(head.data())));
  EXPECT_GE(packed.data, panels_->data());
  EXPECT_LT(packed.data, panels_->data() + panels_->size());
}

// Blocks of ggml with codebooks, whose panels take no more than a tenth more than they.
TEST_F(WeightPacker, BlocksOfCodebooksGoToo) {
  constexpr size_t kBlockCols = 512;
  for (DType dtype : {DType::kGgmlIq3S, DType::kGgmlIq3Xxs, DType::kGgmlIq2S, DType::kGgmlIq2Xs,
                      DType::kGgmlIq2Xxs, DType::kGgmlIq1S, DType::kGgmlIq1M, DType::kGgmlTq10,
                      DType::kGgmlTq20}) {
    SCOPED_TRACE(DTypeName(dtype));
    std::vector<uint8_t> blocks(BytesOf(dtype, kRows * kBlockCols));
    auto random = testing::MakeRandom(10);
    for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random() & 0x3b);  // finite scales
    const WeightMatrix source = WeightMatrix::Dense(
        reinterpret_cast<const std::byte*>(blocks.data()), dtype, kRows, kBlockCols);
    WeightMatrix& matrix = weights_.layers[0].attention.q;
    matrix = source;
    Pack();
    ASSERT_TRUE(matrix.format.in_panels);
    EXPECT_EQ(released_[source.data], blocks.size());
    EXPECT_LE(quant::PanelBytes(matrix.format, 64, kBlockCols) * 10,
              BytesOf(dtype, 64 * kBlockCols) * 11);
    std::vector<float> expected(kBlockCols), row(kBlockCols);
    for (size_t n = 0; n < kRows; ++n) {
      quant::DecodeMatrixRow(source.AsBank(), 0, n, expected.data());
      quant::DecodeMatrixRow(matrix.AsBank(), 0, n, row.data());
      ASSERT_EQ(row, expected) << n;
    }
  }
}

TEST_F(WeightPacker, ALargeMatrixGoesPieceByPiece) {
  constexpr size_t kManyRows = 100'000;  // 12.8 MB, and no whole panels
  const std::vector<BF16> q = Numbers(kManyRows * kCols, 9);
  WeightMatrix matrix = Matrix(q);
  matrix.rows = kManyRows;
  weights_.layers[0].attention.q = matrix;
  Pack();
  ASSERT_GT(released_.size(), 2u);
  EXPECT_GT(prepared_.size(), released_.size());
  for (const auto* told : {&prepared_, &released_}) {
    const auto* next = reinterpret_cast<const std::byte*>(q.data());
    for (const auto& [data, bytes] : *told) {
      EXPECT_EQ(data, next);
      next += bytes;
    }
    EXPECT_EQ(next, reinterpret_cast<const std::byte*>(q.data() + q.size()));
  }
  const ExpertMatrices packed = weights_.layers[0].attention.q.AsBank();
  for (size_t n = 0; n < kManyRows; n += 999) {
    for (size_t k : {0u, 63u})
      ASSERT_EQ(quant::MatrixElement(packed, 0, n, k), double{ToFloat(q[n * kCols + k])}) << n;
  }
}

// Of every worker's thread: no task ends before each worker has one.
std::map<std::thread::id, size_t> NodesOfThreads(ThreadPool& pool) {
  std::map<std::thread::id, size_t> nodes;
  std::mutex mutex;
  std::latch all(static_cast<std::ptrdiff_t>(pool.num_threads()));
  pool.Run(pool.num_threads(), [&](size_t, size_t worker) {
    {
      const std::lock_guard lock(mutex);
      nodes[std::this_thread::get_id()] = pool.NodeOf(worker);
    }
    all.arrive_and_wait();
  });
  return nodes;
}

// Whoever packs panels releases their rows. Products take the same share of each node
// (node_tiles.h).
TEST(WeightPackerNodes, PanelsArePackedByWorkersOfTheirNode) {
  for (const std::vector<size_t>& nodes :
       {std::vector<size_t>{0, 0}, {0, 1}, {1, 0, 0}, {0, 1, 2, 3}}) {
    ThreadPool pool(nodes);
    const std::map<std::thread::id, size_t> node_of = NodesOfThreads(pool);
    for (size_t num_rows : {20u, 70u, 100'000u}) {  // one panel, three, and 3125
      const std::vector<BF16> numbers = Numbers(num_rows * kCols, 12);
      TransformerWeights weights;
      WeightMatrix& matrix = weights.layers.emplace_back().attention.q = Matrix(numbers);
      matrix.rows = num_rows;
      const std::byte* source = matrix.data;
      std::mutex mutex;
      std::vector<int> count(num_rows, 0);
      const auto release = [&](const std::byte* data, size_t bytes) {
        const std::lock_guard lock(mutex);
        constexpr size_t kRowBytes = kCols * sizeof(BF16);
        const auto first = static_cast<size_t>(data - source) / kRowBytes;
        const size_t node = node_of.at(std::this_thread::get_id());
        const quant::RowRange own =
            quant::RowsOfNode({{0, num_rows}, num_rows}, node, pool.num_nodes());
        EXPECT_GE(first, own.begin);
        EXPECT_LE(first + bytes / kRowBytes, own.end);
        for (size_t n = first; n < first + bytes / kRowBytes; ++n) ++count[n];
      };
      const auto prepare = [](const std::byte*, size_t) {};
      const auto panels = PackWeights(weights, pool, {prepare, release}, 0);
      ASSERT_NE(panels, nullptr);
      EXPECT_EQ(count, std::vector<int>(num_rows, 1));
      for (size_t n = 0; n < num_rows; n += 19) {
        ASSERT_EQ(quant::MatrixElement(matrix.AsBank(), 0, n, 63),
                  double{ToFloat(numbers[n * kCols + 63])});
      }
    }
  }
}

TEST_F(WeightPacker, ATiedHeadStaysWithItsEmbedding) {
  const std::vector<BF16> embedding = Numbers(kRows * kCols, 4);
  weights_.embedding = weights_.head = Matrix(embedding);
  Pack();
  EXPECT_EQ(panels_, nullptr);
  EXPECT_FALSE(weights_.head.format.in_panels);
  EXPECT_TRUE(released_.empty());
}

TEST_F(WeightPacker, ExpertsWithRowsInTurnAndCopiesOfOne) {
  const std::vector<BF16> gate_up = Numbers(2 * kRows * kCols, 5),
                          other = Numbers(2 * kRows * kCols, 6);
  const auto bank = [](const WeightMatrix& a, const WeightMatrix& b) {
    moe::ExpertBank bank;
    bank.format = a.format;
    bank.rows = kRows;
    bank.cols = kCols;
    bank.stride = a.stride;
    bank.data = {a.data, b.data, a.data};  // slot 2 is a copy of slot 0
    return bank;
  };
  moe::ExpertWeights& experts = weights_.layers[0].experts;
  experts.w1 = bank(Matrix(gate_up, 0, 2), Matrix(other, 0, 2));
  experts.w3 = bank(Matrix(gate_up, 1, 2), Matrix(other, 1, 2));
  std::vector<std::vector<double>> before;
  for (const moe::ExpertBank* one : {&experts.w1, &experts.w3}) {
    for (size_t e = 0; e < 3; ++e) before.push_back(Values(one->View(), e));
  }
  Pack();
  size_t i = 0;
  for (const moe::ExpertBank* one : {&experts.w1, &experts.w3}) {
    EXPECT_TRUE(one->format.in_panels);
    EXPECT_EQ(one->data[0], one->data[2]);
    for (size_t e = 0; e < 3; ++e) EXPECT_EQ(Values(one->View(), e), before[i++]);
  }
  EXPECT_EQ(released_.size(), 4u);
}

TEST_F(WeightPacker, CopiesThatHaveServedGo) {
  MatrixFormat format;
  format.dtype = DType::kI8;
  format.scale_dtype = DType::kF32;
  format.scale_rows = 1;
  format.scale_cols = 32;
  quant::QuantMatrix codes = quant::QuantMatrix::Make(format, kRows, kCols);
  auto random = testing::MakeRandom(7);
  for (std::byte& code : codes.data) code = static_cast<std::byte>(random());
  for (size_t n = 0; n < kRows; ++n) {
    for (size_t group : {0u, 1u}) codes.SetScale(n, group, 0.25f * static_cast<float>(n + group));
  }
  WeightMemory memory;
  weights_.layers[0].dense.gate = memory.Keep(std::move(codes));
  weights_.owned = memory.Take();
  const std::weak_ptr<const void> copy = weights_.owned[0].memory;
  const std::vector<double> before = Values(weights_.layers[0].dense.gate.AsBank(), 0);
  Pack();
  EXPECT_TRUE(copy.expired());
  EXPECT_TRUE(weights_.owned.empty());
  EXPECT_EQ(weights_.owned_bytes, 0u);
  EXPECT_EQ(Values(weights_.layers[0].dense.gate.AsBank(), 0), before);
  EXPECT_TRUE(released_.empty());
}

TEST_F(WeightPacker, WithoutRoomAllStaysWhereItIs) {
  const std::vector<BF16> q = Numbers(kRows * kCols, 8);
  weights_.layers[0].attention.q = Matrix(q);
  const size_t needed = size_t{2} * 32 * kCols * sizeof(BF16);  // two panels
  Pack(needed - 1);
  EXPECT_EQ(panels_, nullptr);
  EXPECT_FALSE(weights_.layers[0].attention.q.format.in_panels);
  EXPECT_TRUE(released_.empty());
  Pack(needed);
  EXPECT_TRUE(weights_.layers[0].attention.q.format.in_panels);
}

}  // namespace
}  // namespace switchyard
