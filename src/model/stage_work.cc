#include "model/stage_work.h"

#include <algorithm>

#include "quant/matrix.h"

namespace switchyard {
namespace {

// Of positions first, …, first + count - 1: sum of the keys that each sees, at most `window`.
double SumOfKeys(size_t first, size_t count, size_t window) {
  const auto triangle = [](size_t n) {
    return 0.5 * static_cast<double>(n) * static_cast<double>(n + 1);
  };
  const size_t end = first + count;  // keys of the last position
  if (window == 0 || end <= window) return triangle(end) - triangle(first);
  const size_t whole = std::max(first, window);  // from here on all see `window`
  return triangle(whole) - triangle(first) +
         static_cast<double>(window) * static_cast<double>(end - whole);
}

}  // namespace

size_t MatrixBytes(const WeightMatrix& matrix) {
  size_t bytes = matrix.rows * BytesOf(matrix.dtype(), matrix.cols);
  if (matrix.scale != nullptr) {
    const MatrixFormat& format = matrix.format;
    const size_t cells = quant::CeilDiv(matrix.rows, format.scale_rows) *
                         quant::CeilDiv(matrix.cols, format.scale_cols);
    bytes += cells * (DTypeBytes(format.scale_dtype) + (format.has_zero ? 1 : 0));
  }
  return bytes;
}

StageWork WorkOf(std::span<const quant::LinearJob> jobs, size_t rows) {
  StageWork work;
  if (rows == 0) return work;
  for (const quant::LinearJob& job : jobs) {
    work.bytes += static_cast<double>(MatrixBytes(job.weight));
    work.ops += 2.0 * static_cast<double>(rows * job.weight.rows * job.weight.cols);
    work.arithmetic = ArithmeticOf(job.weight.dtype(), job.act_dtype);
  }
  return work;
}

StageWork AttentionWork(const ModelConfig& config, std::span<const SequenceChunk> chunks,
                        const KvView& cache, size_t layer, const QueryHeads& heads) {
  const KvShape shape = config.kv_shape();
  const size_t window = config.layers[layer].window;
  const double token_bytes =
      static_cast<double>(cache.layers[layer].block_bytes) / static_cast<double>(kKvBlockSize);
  const size_t value_dim = shape.value_dim != 0        ? shape.value_dim
                           : config.latent.has_value() ? config.latent->kv_rank
                                                       : shape.key_dim;
  const auto ops_per_key =
      2.0 * static_cast<double>(heads.count * heads.group * (shape.key_dim + value_dim));
  StageWork work;
  for (const SequenceChunk& chunk : chunks) {
    const size_t count = chunk.tokens.size();
    if (count == 0) continue;
    const size_t end = chunk.position + count;
    const size_t seen = window == 0 ? end : std::min(end, window + count - 1);
    work.bytes += token_bytes * static_cast<double>(seen);
    work.ops += ops_per_key * SumOfKeys(chunk.position, count, window);
  }
  return work;
}

}  // namespace switchyard
