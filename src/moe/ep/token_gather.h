// The results of all ranks side by side on every rank.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/ep/expert_parallel.h"

namespace switchyard::moe {

// A window with two places for the slice of each rank, used in turn: a rank writes for epoch e what
// its peers read in e - 2, which they had left when they posted e - 1, which it has waited for.
// Between nodes AllGatherV.
class TokenGather {
 public:
  // Collective over the TP group. Shapes: slices of up to max_rows rows of `cols` values.
  TokenGather(ExpertParallel& ep, size_t max_rows, size_t cols);

  size_t max_rows() const { return max_rows_; }
  size_t cols() const { return cols_; }

  // See ExpertParallel::GatherSlices.
  Rows Run(ExecContext& context, ConstRows mine, size_t num_tokens, size_t layer_id);

 private:
  void RunInNode(ConstRows mine, Rows out, size_t num_tokens);
  void RunOverNet(ConstRows mine, Rows out, size_t num_tokens);
  std::byte* Place(size_t rank) const;

  ExpertParallel& ep_;
  ProcessGroup& group_;
  size_t max_rows_;
  size_t cols_;
  std::unique_ptr<SharedWindow> window_;  // null if the group is on several nodes
  uint32_t epoch_ = 0;
  std::string failure_;  // of an earlier gather: ranks may be in different epochs since
};

}  // namespace switchyard::moe
