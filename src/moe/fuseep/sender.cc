#include "moe/fuseep/sender.h"

#include <algorithm>
#include <cstring>

namespace switchyard::moe::fuseep {
namespace {

// Less than this is copied before a thread has woken.
constexpr size_t kBytesPerTask = size_t{64} << 10;

}  // namespace

Sender::Sender(ExecContext& context, Window& window, const TopKOutput& topk,
               const quant::ActRows& rows)
    : context_(context),
      window_(window),
      layout_(window.layout()),
      rows_(rows),
      num_tokens_(topk.num_tokens),
      top_k_(topk.top_k) {
  Arena& arena = context.arena;
  const size_t num_experts = layout_.num_ranks * layout_.shape.num_local_experts;
  slots_ = quant::GroupByExpert(arena, topk.ids.size(), num_experts,
                                [&](size_t slot) { return topk.ids[slot]; });
  row_of_ = arena.AllocateSpan<uint32_t>(layout_.num_ranks * num_tokens_);
  std::fill(row_of_.begin(), row_of_.end(), kNone);
  for (std::span<uint32_t>* counts : {&num_rows_, &num_routes_, &block_routes_}) {
    *counts = arena.AllocateSpan<uint32_t>(layout_.num_ranks);
    std::fill(counts->begin(), counts->end(), 0u);
  }
  copies_ = arena.AllocateSpan<Copy>(slots_.groups.num_rows());
}

void Sender::Send() {
  for (size_t block = 0; block < layout_.num_blocks; ++block) {
    num_copies_ = 0;
    for (size_t to = 0; to < layout_.num_ranks; ++to) block_routes_[to] = WriteRoutes(to, block);
    CopyRows();
    window_.PostBlock(block_routes_);
  }
}

uint32_t Sender::WriteRoutes(size_t to, size_t block) {
  const size_t first = to * layout_.shape.num_local_experts;
  uint32_t* counts = window_.Counts(to, window_.rank());
  Route* routes = window_.Routes(to, window_.rank());
  const std::span<const uint32_t> experts = slots_.groups.experts;
  size_t index = static_cast<size_t>(
      std::ranges::lower_bound(experts, first + layout_.BlockBegin(block)) - experts.begin());
  const uint32_t before = num_routes_[to];
  for (size_t local = layout_.BlockBegin(block); local < layout_.BlockEnd(block); ++local) {
    counts[local] = 0;
    if (index == experts.size() || experts[index] != first + local) continue;
    const uint32_t begin = slots_.groups.begin[index];
    counts[local] = slots_.groups.begin[++index] - begin;
    for (uint32_t slot : slots_.item.subspan(begin, counts[local]))
      routes[num_routes_[to]++] = {RowFor(slot / top_k_, to), slot};
  }
  return num_routes_[to] - before;
}

uint32_t Sender::RowFor(size_t token, size_t to) {
  uint32_t& row = row_of_[to * num_tokens_ + token];
  if (row != kNone) return row;
  row = num_rows_[to]++;
  copies_[num_copies_++] = {rows_.rows[token], window_.RowOf(to, window_.rank(), row)};
  if (!rows_.row_scale.empty()) window_.Scales(to, window_.rank())[row] = rows_.row_scale[token];
  return row;
}

void Sender::CopyRows() const {
  const size_t row_bytes = BytesOf(rows_.dtype, rows_.cols);
  const size_t per_task = std::max<size_t>(1, kBytesPerTask / row_bytes);
  context_.pool.Run((num_copies_ + per_task - 1) / per_task, [&](size_t task, size_t) {
    const size_t end = std::min(num_copies_, (task + 1) * per_task);
    for (size_t i = task * per_task; i < end; ++i)
      std::memcpy(copies_[i].to, copies_[i].from, row_bytes);
  });
}

}  // namespace switchyard::moe::fuseep
