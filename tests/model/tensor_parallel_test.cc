// Products shared by the ranks of a node, against those of one rank: the same bits.
#include "model/tensor_parallel.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "testing/ep_ranks.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::RunEp;

// Two matrices over the same activations, one of them with a bias.
struct Products {
  Products(size_t rows, size_t inner, size_t first_cols, size_t second_cols)
      : rows_(rows), inner_(inner), cols_{first_cols, second_cols} {
    auto random = testing::MakeRandom(rows * 7 + first_cols);
    x_ = testing::RandomFloats(random, rows * inner);
    for (size_t cols : cols_) w_.push_back(testing::RandomFloats(random, cols * inner));
    bias_ = testing::RandomFloats(random, first_cols);
  }

  // What a rank has of both after they were put together.
  std::vector<std::vector<float>> Run(ExecContext& context, TensorParallel& shared) const {
    std::vector<quant::LinearJob> jobs;
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < 2; ++i) out.emplace_back(rows_ * cols_[i], -1.0f);
    for (size_t i = 0; i < 2; ++i) {
      const auto* data = reinterpret_cast<const std::byte*>(w_[i].data());
      jobs.push_back({WeightMatrix::Dense(data, DType::kF32, cols_[i], inner_),
                      i == 0 ? bias_.data() : nullptr, Rows(out[i].data(), rows_, cols_[i])});
    }
    shared.RunLinears(context, ConstRows(x_.data(), rows_, inner_), jobs, 3);
    return out;
  }

 private:
  size_t rows_, inner_;
  std::vector<size_t> cols_;
  std::vector<float> x_, bias_;
  std::vector<std::vector<float>> w_;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectBitsOfOneRank(const EpSetup& setup, size_t expected_size, const Products& products,
                         size_t max_cols) {
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  TensorParallel alone(nullptr, max_cols);
  EXPECT_EQ(alone.size(), 1u);
  const auto expected = products.Run(context, alone);
  RunEp(setup, [&](EpRank& rank) {
    TensorParallel shared(&rank.ep, max_cols);
    ASSERT_EQ(shared.size(), expected_size);
    for (int step = 0; step < 3; ++step) {
      rank.arena.Reset();
      const auto found = products.Run(rank.context, shared);
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(SameBits(found[i], expected[i])) << "matrix " << i << ", step " << step;
    }
  });
}

TEST(TensorParallel, GivesTheBitsOfOneRank) {
  for (size_t ranks : {1u, 2u, 3u, 4u, 8u}) {
    EpSetup setup;
    setup.ranks = ranks;
    for (size_t rows : {1u, 5u, 33u}) {
      // Columns that no rank's share divides, and fewer than ranks.
      ExpectBitsOfOneRank(setup, ranks, Products(rows, 40, 72, 3), 75);
    }
  }
}

TEST(TensorParallel, RowsThatExceedAPlaceComeInTurns) {
  EpSetup setup;
  setup.ranks = 2;
  ExpectBitsOfOneRank(setup, 2, Products(600, 4, 1500, 96), 1596);
}

TEST(TensorParallel, SharesInsideANodeAlone) {
  EpSetup setup;
  setup.ranks = 4;
  setup.node_size = 2;
  ExpectBitsOfOneRank(setup, 2, Products(5, 40, 64, 32), 96);
  setup.node_size = 1;
  ExpectBitsOfOneRank(setup, 1, Products(5, 40, 64, 32), 96);
}

// Slices of units that stay together, as heads do; also with more ranks than units.
TEST(TensorParallel, GathersByUnits) {
  EpSetup setup;
  setup.ranks = 4;
  RunEp(setup, [&](EpRank& rank) {
    TensorParallel shared(&rank.ep, 3 * 8);
    const size_t units = 3, unit = 8, tokens = 2;
    std::vector<float> values(tokens * units * unit, -1.0f);
    const TensorParallel::Slice mine = shared.MySlice(units);
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t c = mine.first * unit; c < (mine.first + mine.count) * unit; ++c)
        values[t * units * unit + c] = static_cast<float>(t * 100 + c);
    }
    const TensorParallel::Matrix matrix{Rows(values.data(), tokens, units * unit), unit};
    shared.Gather(rank.context, {&matrix, 1}, 0);
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t c = 0; c < units * unit; ++c)
        EXPECT_EQ(values[t * units * unit + c], static_cast<float>(t * 100 + c));
    }
  });
}

TEST(TensorParallel, ARankThatDoesNotComeIsNamed) {
  EpSetup setup;
  setup.ranks = 2;
  setup.options.timeout = std::chrono::milliseconds(200);
  RunEp(setup, [&](EpRank& rank) {
    TensorParallel shared(&rank.ep, 64);
    if (rank.world.rank() == 0) {
      const Products products(1, 4, 16, 16);
      testing::ExpectError(ErrorCode::kUnavailable, {"rank 0, layer 3, step 0, attention:"},
                           [&] { products.Run(rank.context, shared); });
      // Who comes too late finds nobody: the next columns would be of another step.
      testing::ExpectError(ErrorCode::kUnavailable, {"step 0"},
                           [&] { products.Run(rank.context, shared); });
    }
  });
}

}  // namespace
}  // namespace switchyard
