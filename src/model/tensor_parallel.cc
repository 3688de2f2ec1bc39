#include "model/tensor_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "quant/act_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

// Weight rows that a matmul kernel likes to take together.
constexpr size_t kLinearUnit = 16;
// A rank's place in the window: what is copied in one go should stay in a cache.
constexpr size_t kPlaceFloats = size_t{1} << 18;

// Columns [unit * first, unit * (first + count)), the last unit being what is left.
TensorParallel::Slice Columns(size_t cols, size_t unit, TensorParallel::Slice units) {
  const size_t first = std::min(cols, units.first * unit);
  return {first, std::min(cols, (units.first + units.count) * unit) - first};
}

}  // namespace

TensorParallel::TensorParallel(moe::ExpertParallel* ep, size_t max_cols) : ep_(ep) {
  if (ep == nullptr) return;
  ProcessGroup& tp = ep->groups().tp();
  const Deadline deadline = Deadline::After(ep->options().timeout, "share the attention");
  std::unique_ptr<ProcessGroup> group =
      tp.Split(tp.NodeOf(tp.rank()), tp.rank(), "tensor_parallel", deadline);
  if (group->size() == 1) return;
  group_ = std::move(group);
  place_floats_ = std::max(kPlaceFloats, max_cols);
  WindowOptions window;
  window.name = "tensor_parallel";
  window.bytes_per_rank = 2 * place_floats_ * sizeof(float);
  window.num_flags = 1;
  window.setting = "tp-size";
  window_ = group_->MakeWindow(window, deadline);
}

TensorParallel::Slice TensorParallel::SliceOf(size_t count, size_t rank) const {
  const size_t first = count * rank / size();
  return {first, count * (rank + 1) / size() - first};
}

void TensorParallel::RunLinears(ExecContext& context, ConstRows x,
                                std::span<const quant::LinearJob> jobs, size_t layer) {
  if (size() == 1) return quant::RunLinears(context, x, jobs);
  const std::span<quant::LinearJob> parts =
      context.arena.AllocateSpan<quant::LinearJob>(jobs.size());
  const std::span<Matrix> matrices = context.arena.AllocateSpan<Matrix>(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    const size_t cols = jobs[i].weight.rows;
    const Slice units = MySlice((cols + kLinearUnit - 1) / kLinearUnit);
    const Slice columns = Columns(cols, kLinearUnit, units);
    parts[i] = jobs[i];
    parts[i].first = columns.first;
    parts[i].count = columns.count;
    matrices[i] = {jobs[i].out, kLinearUnit};
  }
  quant::RunLinears(context, x, parts);
  Gather(context, matrices, layer);
}

size_t TensorParallel::ColsOf(std::span<const Matrix> matrices, size_t rank) const {
  size_t cols = 0;
  for (const Matrix& matrix : matrices) {
    const size_t units = (matrix.rows.cols + matrix.unit - 1) / matrix.unit;
    cols += Columns(matrix.rows.cols, matrix.unit, SliceOf(units, rank)).count;
  }
  return cols;
}

// Two places for each rank, used in turn: a rank writes for epoch e what its peers read in e - 2,
// which they had left when they posted e - 1, which it has waited for.
float* TensorParallel::Place(size_t rank) const {
  auto* floats = reinterpret_cast<float*>(window_->Part(rank).data());
  return floats + (epoch_ & 1u) * place_floats_;
}

// A place holds, row by row, a rank's columns of all matrices.
void TensorParallel::CopyColumns(ExecContext& context, std::span<const Matrix> matrices,
                                 size_t rank, size_t first, size_t count, float* packed,
                                 bool pack) const {
  const size_t cols = ColsOf(matrices, rank);
  quant::ForEachRow(context, count, [&](size_t i) {
    float* at = packed + i * cols;
    for (const Matrix& matrix : matrices) {
      const size_t units = (matrix.rows.cols + matrix.unit - 1) / matrix.unit;
      const Slice part = Columns(matrix.rows.cols, matrix.unit, SliceOf(units, rank));
      float* row = matrix.rows.Row(first + i) + part.first;
      std::memcpy(pack ? at : row, pack ? row : at, part.count * sizeof(float));
      at += part.count;
    }
  });
}

void TensorParallel::GatherRows(ExecContext& context, std::span<const Matrix> matrices,
                                size_t first, size_t count) {
  const size_t me = group_->rank();
  ++epoch_;
  CopyColumns(context, matrices, me, first, count, Place(me), true);
  for (size_t rank = 0; rank < size(); ++rank) {
    if (rank != me) window_->Post(rank, 0, {epoch_, 0});
  }
  const Deadline deadline = Deadline::After(ep_->options().timeout, "attention");
  for (size_t rank = 0; rank < size(); ++rank) {
    if (rank == me) continue;
    window_->Await(rank, 0, epoch_, deadline, [&] {
      if (ep_->IsDead(*group_, rank)) {
        throw Error(ErrorCode::kUnavailable,
                    fmt::format("rank {} has died", group_->WorldRank(rank)));
      }
    });
    CopyColumns(context, matrices, rank, first, count, Place(rank), false);
  }
}

void TensorParallel::Gather(ExecContext& context, std::span<const Matrix> matrices, size_t layer) {
  if (size() == 1) return;
  if (!failure_.empty()) throw Error(ErrorCode::kUnavailable, failure_);
  size_t most = 1;
  for (size_t rank = 0; rank < size(); ++rank) most = std::max(most, ColsOf(matrices, rank));
  SY_CHECK(most <= place_floats_);
  const size_t at_once = place_floats_ / most;
  const size_t rows = matrices[0].rows.rows;
  try {
    for (size_t first = 0; first < rows; first += at_once)
      GatherRows(context, matrices, first, std::min(at_once, rows - first));
  } catch (const Error& error) {
    failure_ = fmt::format("rank {}, layer {}, step {}, attention: {}",
                           group_->WorldRank(group_->rank()), layer, ep_->pass(), error.what());
    throw Error(error.code(), failure_);
  }
}

}  // namespace switchyard
