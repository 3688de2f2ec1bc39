#include "moe/ep/token_gather.h"

#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "moe/ep/exchange.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe {

TokenGather::TokenGather(ExpertParallel& ep, size_t max_rows, size_t cols)
    : ep_(ep), group_(ep.groups().tp()), max_rows_(max_rows), cols_(cols) {
  if (group_.node_peers().size() != group_.size()) return;
  WindowOptions window;
  window.name = "token_gather";
  window.bytes_per_rank = 2 * max_rows * cols * sizeof(float);
  window.num_flags = 1;
  window.setting = "chunk";
  const Deadline deadline = Deadline::After(ep.options().timeout, "make a buffer");
  window_ = group_.MakeWindow(window, deadline);
  epoch_ = ep.options().first_epoch;
  PostFirstEpoch(group_, *window_, epoch_, deadline);
}

std::byte* TokenGather::Place(size_t rank) const {
  return window_->Part(rank).data() + (epoch_ & 1u) * max_rows_ * cols_ * sizeof(float);
}

void TokenGather::RunInNode(ConstRows mine, Rows out, size_t num_tokens) {
  const size_t row_bytes = cols_ * sizeof(float);
  ++epoch_;
  for (size_t i = 0; i < mine.rows; ++i)
    std::memcpy(Place(group_.rank()) + i * row_bytes, mine.Row(i), row_bytes);
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    if (rank != group_.rank()) window_->Post(rank, 0, {epoch_, 0});
  }
  const Deadline deadline = Deadline::After(ep_.options().timeout, "gather");
  for (size_t rank = 0; rank < group_.size(); ++rank) {
    const ExpertParallel::Slice slice = ep_.SliceOf(num_tokens, rank);
    if (rank != group_.rank()) {
      window_->Await(rank, 0, epoch_, deadline, [&] {
        if (ep_.IsDead(group_, rank))
          throw Error(ErrorCode::kUnavailable, fmt::format("rank {} has died", rank));
      });
    }
    for (size_t i = 0; i < slice.count; ++i)
      std::memcpy(out.Row(slice.first + i), Place(rank) + i * row_bytes, row_bytes);
  }
}

void TokenGather::RunOverNet(ConstRows mine, Rows out, size_t num_tokens) {
  std::vector<size_t> rows;
  for (size_t rank = 0; rank < group_.size(); ++rank)
    rows.push_back(ep_.SliceOf(num_tokens, rank).count);
  group_.AllGatherV(cols_ * sizeof(float),
                    std::as_bytes(std::span(mine.data, mine.rows * mine.cols)), rows,
                    std::as_writable_bytes(std::span(out.data, out.rows * out.cols)),
                    Deadline::After(ep_.options().timeout, "gather"));
}

Rows TokenGather::Run(ExecContext& context, ConstRows mine, size_t num_tokens, size_t layer_id) {
  SY_CHECK(mine.rows <= max_rows_ &&
           (mine.rows == 0 || (mine.cols == cols_ && mine.stride == cols_)));
  if (!failure_.empty()) throw Error(ErrorCode::kUnavailable, failure_);
  const Rows out = context.arena.AllocateRows(num_tokens, cols_);
  try {
    window_ != nullptr ? RunInNode(mine, out, num_tokens) : RunOverNet(mine, out, num_tokens);
  } catch (const Error& error) {
    failure_ = fmt::format("rank {}, layer {}, step {}, gather: {}", group_.rank(), layer_id,
                           ep_.pass(), error.what());
    throw Error(error.code(), failure_);
  }
  return out;
}

}  // namespace switchyard::moe
