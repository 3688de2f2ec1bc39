// The work on a token outside the experts, divided among the ranks of a node that all have the
// token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "quant/linear.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard {

// Rank r computes some columns of every product, and every rank gets them all:
//
//   rank 0   [ q0 | .  ]  --+-- window of the node --+-->  [ q0 | q1 ]
//   rank 1   [ .  | q1 ]  --+                        +-->  [ q0 | q1 ]
//
// Columns are put side by side and never added, so the bits are those of one rank, however many
// there are; each reads its share of the weights alone. Between nodes nothing is divided: a gather
// for each product would cost more than it saves there.
//
// Collective: the ranks of the node call everything alike. Without ranks to share with, all work is
// done here.
class TensorParallel {
 public:
  // Shares with the ranks of `ep`'s TP group on this node; collective over that group. Null: with
  // nobody. Shapes: gathers of up to `max_cols` columns.
  // Errors: those of ProcessGroup::Split and MakeWindow.
  TensorParallel(moe::ExpertParallel* ep, size_t max_cols);

  size_t size() const { return group_ == nullptr ? 1 : group_->size(); }

  // The part of `count` things that falls to a rank, and to this one.
  struct Slice {
    size_t first = 0;
    size_t count = 0;
  };
  Slice SliceOf(size_t count, size_t rank) const;
  Slice MySlice(size_t count) const {
    return SliceOf(count, group_ == nullptr ? 0 : group_->rank());
  }

  // As quant::RunLinears, each rank some columns. `layer` is for messages.
  void RunLinears(ExecContext& context, ConstRows x, std::span<const quant::LinearJob> jobs,
                  size_t layer);
  // One job.
  void Linear(ExecContext& context, ConstRows x, const quant::LinearJob& job, size_t layer) {
    RunLinears(context, x, {&job, 1}, layer);
  }

  // Of every matrix each rank holds the columns of its slice of cols / unit: now all hold all.
  struct Matrix {
    Rows rows;        // the same number of rows in all of them
    size_t unit = 1;  // columns that stay together
  };
  // Errors: kUnavailable naming rank, layer and step if a rank does not come.
  void Gather(ExecContext& context, std::span<const Matrix> matrices, size_t layer);

 private:
  size_t ColsOf(std::span<const Matrix> matrices, size_t rank) const;
  void GatherRows(ExecContext& context, std::span<const Matrix> matrices, size_t first,
                  size_t count);
  void CopyColumns(ExecContext& context, std::span<const Matrix> matrices, size_t rank,
                   size_t first, size_t count, float* packed, bool pack) const;
  float* Place(size_t rank) const;

  moe::ExpertParallel* ep_ = nullptr;
  std::unique_ptr<ProcessGroup> group_;  // null: nobody to share with
  std::unique_ptr<SharedWindow> window_;
  size_t place_floats_ = 0;
  uint32_t epoch_ = 0;
  std::string failure_;  // of an earlier gather: ranks may be in different epochs since
};

}  // namespace switchyard
