// Which NUMA node has which part of a weight matrix, and products cut so that its workers read it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>

#include "kernels/panels/panel.h"
#include "switchyard/core/exec_context.h"

namespace switchyard::quant {

// Of a matrix of `num_panels` panels of 32 rows each node has a range, all of about the same size:
// panel i belongs to node floor(i * num_nodes / num_panels). Workers of that node pack it, so that
// its memory holds it, and multiply with it.
// Returns the first panel that belongs to `node` or a node behind it; num_panels if none does.
constexpr size_t FirstPanelOf(size_t node, size_t num_panels, size_t num_nodes) {
  return (node * num_panels + num_nodes - 1) / num_nodes;
}

// Rows [begin, end) of a matrix.
struct RowRange {
  size_t begin = 0, end = 0;
};

// Rows to multiply with, of a matrix [num_rows, K].
struct ProductRows {
  RowRange rows;
  size_t num_rows;
};

// Those that belong to `node`; begin = end if none do.
inline RowRange RowsOfNode(const ProductRows& product, size_t node, size_t num_nodes) {
  const RowRange& rows = product.rows;
  const size_t num_panels = kernels::NumPanels(product.num_rows);
  const auto first_row = [&](size_t n) {
    const size_t row = FirstPanelOf(n, num_panels, num_nodes) * kernels::kPanelRows;
    return std::clamp(row, rows.begin, rows.end);
  };
  return {first_row(node), first_row(node + 1)};
}

// Rows of one of several matrices that a node multiplies with, and where its tiles are among those
// of all.
struct NodePiece {
  size_t matrix;
  RowRange rows;
  size_t first_tile;
};

// Outputs of several products, cut into tiles of at most tile_rows rows of a matrix.
//
//   node 0: [ matrix 0: tile, tile, .. | matrix 1: tile, .. | .. ]   node 1: [ matrix 0: .. ]
//
// rows_at(i) are the ProductRows of matrix i. Calls body(i, rows of the tile, worker) for each in
// parallel, first by workers of its node.
template <typename RowsAt, typename Body>
void ForEachNodeTile(ExecContext& context, size_t num_matrices, size_t tile_rows,
                     const RowsAt& rows_at, const Body& body) {
  const size_t num_nodes = context.pool.num_nodes();
  const std::span<NodePiece> pieces =
      context.arena.AllocateSpan<NodePiece>(num_nodes * num_matrices);
  const std::span<size_t> tiles_of_node = context.arena.AllocateSpan<size_t>(num_nodes);
  size_t num_tiles = 0;
  for (size_t node = 0; node < num_nodes; ++node) {
    const size_t before = num_tiles;
    for (size_t i = 0; i < num_matrices; ++i) {
      const RowRange rows = RowsOfNode(rows_at(i), node, num_nodes);
      pieces[node * num_matrices + i] = {i, rows, num_tiles};
      num_tiles += (rows.end - rows.begin + tile_rows - 1) / tile_rows;
    }
    tiles_of_node[node] = num_tiles - before;
  }
  context.pool.RunOnNodes(tiles_of_node, [&](size_t tile, size_t worker) {
    const auto next = std::ranges::upper_bound(pieces, tile, {}, &NodePiece::first_tile);
    const NodePiece& piece = *std::prev(next);
    const size_t begin = piece.rows.begin + (tile - piece.first_tile) * tile_rows;
    body(piece.matrix, RowRange{begin, std::min(begin + tile_rows, piece.rows.end)}, worker);
  });
}

}  // namespace switchyard::quant
