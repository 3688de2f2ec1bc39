// Which node has which panels, and products that are cut so.
#include "quant/node_tiles.h"

#include <gtest/gtest.h>

#include <latch>
#include <mutex>
#include <utility>
#include <vector>

namespace switchyard::quant {
namespace {

TEST(NodeTiles, EveryPanelBelongsToOneNode) {
  for (size_t nodes : {1u, 2u, 3u, 4u, 8u}) {
    for (size_t panels : {0u, 1u, 2u, 3u, 4u, 5u, 7u, 64u, 1000u}) {
      EXPECT_EQ(FirstPanelOf(0, panels, nodes), 0u);
      EXPECT_EQ(FirstPanelOf(nodes, panels, nodes), panels);
      for (size_t node = 0; node < nodes; ++node) {
        const size_t end = FirstPanelOf(node + 1, panels, nodes);
        for (size_t i = FirstPanelOf(node, panels, nodes); i < end; ++i)
          ASSERT_EQ(i * nodes / panels, node) << "panel " << i << " of " << panels;
      }
    }
  }
}

TEST(NodeTiles, OddMatricesLeaveNodesWithoutRows) {
  const auto rows = [](RowRange range, size_t num_rows, size_t node) {
    const RowRange found = RowsOfNode({range, num_rows}, node, 4);
    return std::pair(found.begin, found.end);
  };
  const std::pair<size_t, size_t> one[] = {{0, 20}, {20, 20}, {20, 20}, {20, 20}};
  const std::pair<size_t, size_t> three[] = {{0, 32}, {32, 64}, {64, 70}, {70, 70}};
  const std::pair<size_t, size_t> some[] = {{30, 32}, {32, 60}, {60, 60}, {60, 60}};
  for (size_t node = 0; node < 4; ++node) {
    EXPECT_EQ(rows({0, 20}, 20, node), one[node]);
    EXPECT_EQ(rows({0, 70}, 70, node), three[node]);
    EXPECT_EQ(rows({30, 60}, 70, node), some[node]);
  }
}

struct Seen {
  size_t matrix, begin, end, worker;
};

// Matrices of these rows.
std::vector<Seen> Tiles(ThreadPool& pool, const std::vector<size_t>& rows, size_t tile_rows) {
  Arena arena;
  ExecContext context{pool, arena};
  std::vector<Seen> seen;
  std::mutex mutex;
  ForEachNodeTile(
      context, rows.size(), tile_rows,
      [&](size_t i) {
        return ProductRows{{0, rows[i]}, rows[i]};
      },
      [&](size_t matrix, RowRange tile, size_t worker) {
        const std::lock_guard lock(mutex);
        seen.push_back({matrix, tile.begin, tile.end, worker});
      });
  return seen;
}

TEST(NodeTiles, EveryRowIsInOneTileOfItsNode) {
  const std::vector<size_t> rows = {1, 0, 32, 96, 100, 1024, 31};
  for (const std::vector<size_t>& nodes : {std::vector<size_t>{0}, {0, 0}, {0, 1}, {0, 1, 2, 3}}) {
    ThreadPool pool(nodes);
    for (size_t tile_rows : {32u, 64u}) {
      std::vector<std::vector<int>> count;
      for (size_t n : rows) count.emplace_back(n, 0);
      for (const Seen& tile : Tiles(pool, rows, tile_rows)) {
        ASSERT_LT(tile.begin, tile.end);
        EXPECT_LE(tile.end - tile.begin, tile_rows);
        const size_t panels = kernels::NumPanels(rows[tile.matrix]);
        const auto node_of = [&](size_t row) { return row / 32 * pool.num_nodes() / panels; };
        EXPECT_EQ(node_of(tile.begin), node_of(tile.end - 1));
        for (size_t n = tile.begin; n < tile.end; ++n) ++count[tile.matrix][n];
      }
      for (size_t i = 0; i < rows.size(); ++i)
        EXPECT_EQ(count[i], std::vector<int>(rows[i], 1)) << "matrix " << i;
    }
  }
}

TEST(NodeTiles, OnOneNodeTilesComeInTheOrderOfTheirRows) {
  ThreadPool pool(1);
  const std::vector<Seen> tiles = Tiles(pool, {100, 40}, 64);
  ASSERT_EQ(tiles.size(), 3u);
  const size_t expected[][3] = {{0, 0, 64}, {0, 64, 100}, {1, 0, 40}};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(tiles[i].matrix, expected[i][0]);
    EXPECT_EQ(tiles[i].begin, expected[i][1]);
    EXPECT_EQ(tiles[i].end, expected[i][2]);
  }
}

// No worker goes on before all have begun a tile: that is one of their own node.
TEST(NodeTiles, WorkersStartWithTheRowsOfTheirNode) {
  constexpr size_t kRows = 1024;
  const std::vector<size_t> nodes = {0, 1, 1, 3, 2};
  ThreadPool pool(nodes);
  Arena arena;
  ExecContext context{pool, arena};
  std::latch all(static_cast<std::ptrdiff_t>(nodes.size()));
  std::vector<size_t> first(nodes.size(), kRows);
  ForEachNodeTile(
      context, 3, 32,
      [&](size_t) {
        return ProductRows{{0, kRows}, kRows};
      },
      [&](size_t, RowRange tile, size_t worker) {
        if (first[worker] != kRows) return;
        first[worker] = tile.begin;
        all.arrive_and_wait();
      });
  for (size_t w = 0; w < nodes.size(); ++w) EXPECT_EQ(first[w] * 4 / kRows, nodes[w]) << w;
}

}  // namespace
}  // namespace switchyard::quant
