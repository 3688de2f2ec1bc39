#include "moe/fuseep/combiner.h"

#include <algorithm>

#include "kernels/elementwise/elementwise.h"

namespace switchyard::moe::fuseep {

Combiner::Combiner(ExecContext& context, Window& window, const Sender& sender,
                   const TopKOutput& topk, const MoeRunnerConfig& config, Rows out)
    : context_(context),
      window_(window),
      sender_(sender),
      topk_(topk),
      weighted_(!config.apply_router_weight_on_input),
      factor_(static_cast<float>(config.routed_scaling_factor)),
      out_(out),
      is_done_(context.arena.AllocateSpan<bool>(window.num_ranks())),
      missing_(context.arena.AllocateSpan<uint32_t>(out.rows)),
      ready_(context.arena.AllocateSpan<uint32_t>(out.rows)),
      rows_(context.arena.AllocateSpan<const float*>(topk.ids.size())),
      weights_(context.arena.AllocateSpan<float>(topk.ids.size())) {
  std::fill(is_done_.begin(), is_done_.end(), false);
}

bool Combiner::Advance() {
  const size_t num_ready = FindReady();
  constexpr size_t kTokensPerTask = 4;
  context_.pool.Run((num_ready + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(num_ready, (task + 1) * kTokensPerTask);
    for (size_t i = task * kTokensPerTask; i < end; ++i) Sum(ready_[i]);
  });
  num_summed_ += num_ready;
  return num_ready != 0;
}

size_t Combiner::FindReady() {
  size_t num_ready = 0;
  if (is_first_) {
    is_first_ = false;
    for (size_t t = 0; t < out_.rows; ++t) {
      missing_[t] = 0;
      for (size_t rank = 0; rank < is_done_.size(); ++rank) missing_[t] += sender_.WasSent(t, rank);
      if (missing_[t] == 0) ready_[num_ready++] = static_cast<uint32_t>(t);
    }
  }
  for (size_t rank = 0; rank < is_done_.size(); ++rank) {
    if (is_done_[rank] || !window_.DoneFrom(rank)) continue;
    is_done_[rank] = true;
    ++num_done_;
    for (size_t t = 0; t < out_.rows; ++t) {
      if (sender_.WasSent(t, rank) && --missing_[t] == 0)
        ready_[num_ready++] = static_cast<uint32_t>(t);
    }
  }
  return num_ready;
}

void Combiner::Sum(size_t token) const {
  const size_t first = token * topk_.top_k;
  size_t count = 0;
  for (size_t slot = first; slot < first + topk_.top_k; ++slot) {
    if (topk_.ids[slot] < 0) continue;
    rows_[first + count] = window_.Home(window_.rank(), slot);
    weights_[first + count++] = (weighted_ ? topk_.weights[slot] : 1.0f) * factor_;
  }
  kernels::WeightedSum(rows_.data() + first, weights_.data() + first, count, out_.cols,
                       out_.Row(token));
}

bool Combiner::HasNews() const {
  for (size_t rank = 0; rank < is_done_.size(); ++rank) {
    if (!is_done_[rank] && window_.HasDone(rank)) return true;
  }
  return false;
}

std::vector<size_t> Combiner::Late() const {
  std::vector<size_t> late;
  for (size_t rank = 0; rank < is_done_.size(); ++rank) {
    if (!is_done_[rank]) late.push_back(rank);
  }
  return late;
}

}  // namespace switchyard::moe::fuseep
