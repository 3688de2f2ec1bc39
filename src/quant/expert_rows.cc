#include "quant/expert_rows.h"

#include "kernels/convert/convert.h"
#include "quant/node_tiles.h"

namespace switchyard::quant {
namespace {

// Rows whose products wait in cache for the next step.
constexpr size_t kRowsPerPass = 96;

void AddBias(const ExpertMatrices& w, size_t expert, size_t n0, Rows out) {
  if (w.bias.empty()) return;
  for (size_t m = 0; m < out.rows; ++m) {
    float* row = out.Row(m);
    for (size_t n = 0; n < out.cols; ++n) row[n] += w.bias[expert][(n0 + n) * w.bias_stride];
  }
}

// Columns [n0, n0 + n) of the products of the rows [begin, end) with one expert's matrix.
struct Tile {
  size_t expert;
  size_t begin, end;
  size_t n0, n;
  std::span<float> decode;  // scratch of MultiplyExpert
  float* results;           // kRowsPerPass * n floats for each of `results_per_tile`
};

// Cuts the products of all groups with matrices like `w` (and `second`) into tiles that fill the
// threads, and calls body(tile) for each in parallel.
template <typename Body>
void ForEachTile(ExecContext& context, const ExpertGroups& groups, const ExpertMatrices& w,
                 const ExpertMatrices* second, size_t results_per_tile, const Body& body) {
  const size_t num_experts = groups.experts.size();
  const size_t task_rows = TaskRows(num_experts * w.rows, context.pool.num_threads());
  const size_t decode = std::max(ExpertScratchFloats(w, task_rows),
                                 second == nullptr ? 0 : ExpertScratchFloats(*second, task_rows));
  const size_t results = results_per_tile * kRowsPerPass * task_rows;
  float* scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * (results + decode)).data();
  const auto all_rows = [&](size_t) { return ProductRows{{0, w.rows}, w.rows}; };
  ForEachNodeTile(
      context, num_experts, task_rows, all_rows, [&](size_t index, RowRange rows, size_t worker) {
        float* mine = scratch + worker * (results + decode);
        body(Tile{groups.experts[index], groups.begin[index], groups.begin[index + 1], rows.begin,
                  rows.end - rows.begin, std::span<float>(mine + results, decode), mine});
      });
}

// Calls body(first row, number of rows) for the passes of a tile.
template <typename Body>
void ForEachPass(const Tile& tile, const Body& body) {
  for (size_t row = tile.begin; row < tile.end; row += kRowsPerPass)
    body(row, std::min(kRowsPerPass, tile.end - row));
}

void Multiply(const ActRows& x, const ExpertMatrices& w, const Tile& tile, Rows out) {
  MultiplyExpert(x, w, tile.expert, tile.n0, tile.n, tile.decode, out.data, out.stride);
  AddBias(w, tile.expert, tile.n0, out);
}

}  // namespace

QuantRows GateUp(ExecContext& context, const ExpertGroups& groups, const ActRows& x,
                 const GateUpLayer& layer, DType hidden_dtype) {
  QuantRows hidden;
  hidden.dtype = hidden_dtype;
  hidden.rows = groups.num_rows();
  hidden.cols = layer.w1.rows;
  hidden.stride = (hidden.cols * DTypeBytes(hidden_dtype) + 63) / 64 * 64;
  std::byte* data = context.arena.AllocateSpan<std::byte>(hidden.rows * hidden.stride).data();
  hidden.data = data;
  ForEachTile(
      context, groups, layer.w1, layer.is_gated ? &layer.w3 : nullptr, 2, [&](const Tile& tile) {
        float* gate = tile.results;
        float* up = gate + kRowsPerPass * tile.n;
        ForEachPass(tile, [&](size_t row, size_t count) {
          const ActRows pass = x.Slice(row, count);
          Multiply(pass, layer.w1, tile, Rows(gate, count, tile.n));
          if (layer.is_gated) Multiply(pass, layer.w3, tile, Rows(up, count, tile.n));
          for (size_t r = 0; r < count; ++r) {
            float* g = gate + r * tile.n;
            const float* u = up + r * tile.n;
            std::byte* out = data + (row + r) * hidden.stride + tile.n0 * DTypeBytes(hidden_dtype);
            if (hidden_dtype == DType::kF32) {
              layer.formula(g, u, tile.n, reinterpret_cast<float*>(out));
            } else {
              layer.formula(g, u, tile.n, g);
              kernels::ConvertFromF32(g, tile.n, hidden_dtype, out);
            }
          }
        });
      });
  return hidden;
}

DType HiddenDType(const ActQuant& how, const MatrixFormat& w2, DType act_dtype) {
  if (how.kind != ActQuantKind::kNone) return DType::kF32;
  return ExpertRowDType(how, w2, 0, act_dtype);
}

Rows Down(ExecContext& context, const ExpertGroups& groups, const ActRows& hidden,
          const ExpertMatrices& w2) {
  const Rows out = context.arena.AllocateRows(groups.num_rows(), w2.rows);
  ForEachTile(context, groups, w2, nullptr, 0, [&](const Tile& tile) {
    const size_t count = tile.end - tile.begin;
    Multiply(hidden.Slice(tile.begin, count), w2, tile,
             Rows(out.Row(tile.begin) + tile.n0, count, tile.n, out.stride));
  });
  return out;
}

void DownInto(ExecContext& context, const ExpertGroups& groups, const ActRows& hidden,
              const ExpertMatrices& w2, std::span<float* const> out) {
  ForEachTile(context, groups, w2, nullptr, 1, [&](const Tile& tile) {
    ForEachPass(tile, [&](size_t row, size_t count) {
      const Rows results(tile.results, count, tile.n);
      Multiply(hidden.Slice(row, count), w2, tile, results);
      for (size_t r = 0; r < count; ++r)
        std::copy_n(results.Row(r), tile.n, out[row + r] + tile.n0);
    });
  });
}

}  // namespace switchyard::quant
