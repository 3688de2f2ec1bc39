#include "moe/ep/exchange.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <utility>

#include "kernels/convert/convert.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

size_t LocalExperts(const ProcessGroup& group, const RowChannelOptions& options) {
  const size_t experts_ranks = group.size() / options.parts;
  if (options.num_experts % experts_ranks != 0 || options.num_experts == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("expert parallelism: {} experts cannot be divided evenly among {} "
                            "ranks; choose another --moe-ep-size, or add copies with "
                            "--ep-num-redundant-experts {}",
                            options.num_experts, experts_ranks,
                            experts_ranks - options.num_experts % experts_ranks));
  }
  if (options.num_experts >= WireLayout::kMaxExperts) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("expert parallelism: {} experts, at most {}", options.num_experts,
                            WireLayout::kMaxExperts - 1));
  }
  return options.num_experts / experts_ranks;
}

}  // namespace

bool RowChannelOptions::operator==(const RowChannelOptions& other) const {
  return protocol == other.protocol && max_tokens == other.max_tokens &&
         hidden_size == other.hidden_size && num_experts == other.num_experts &&
         wire.top_k() == other.wire.top_k() && wire.values() == other.wire.values() &&
         wire_quant == other.wire_quant && home == other.home && home_quant == other.home_quant &&
         parts == other.parts && dispatches == other.dispatches && elastic == other.elastic &&
         batch == other.batch;
}

RowPacker::RowPacker(ExecContext& context, ConstRows rows, const ActQuant& how,
                     const ValueLayout& layout)
    : rows_(rows), layout_(layout) {
  if (layout_.meta.kind != ActQuantKind::kNone) coded_ = quant::QuantizeRows(context, rows, how);
}

void RowPacker::Pack(size_t row, std::byte* to) const {
  if (layout_.meta.kind != ActQuantKind::kNone) return layout_.Pack(coded_, row, to);
  const size_t width = BytesOf(layout_.meta.dtype, rows_.cols);
  if (layout_.meta.dtype == DType::kF32) {
    std::memcpy(to, rows_.Row(row), width);
  } else {
    kernels::ConvertFromF32(rows_.Row(row), rows_.cols, layout_.meta.dtype, to);
  }
  std::memset(to + width, 0, layout_.data_bytes - width);
}

Exchange::Exchange(ExpertParallel& ep_in, ProcessGroup& group_in, RowChannelOptions options_in)
    : ep(ep_in),
      group(group_in),
      options(std::move(options_in)),
      nodes(group_in),
      num_local(LocalExperts(group_in, options)),
      has_net(nodes.size() > 1),
      epoch(ep_in.options().first_epoch),
      targets(group_in.size()),
      result_slots(group_in.size()) {}

bool Exchange::IsActive(size_t rank) const {
  return !options.elastic || ep.active_ranks()[rank] != 0;
}

Deadline Exchange::Limit(std::string_view stage) const {
  return Deadline::After(ep.options().timeout, stage);
}

std::string Exchange::Where(std::string_view stage) const {
  return fmt::format("rank {}, layer {}, step {}, {} {}", group.WorldRank(group.rank()), layer_id,
                     ep.pass(), options.protocol, stage);
}

void Exchange::Rethrow(std::string_view stage, const Error& error) const {
  throw Error(error.code(), fmt::format("{}: {}", Where(stage), error.what()));
}

Signal Exchange::Await(const SharedWindow& window, size_t rank, size_t flag,
                       const Deadline& deadline) const {
  return window.Await(rank, flag, epoch, deadline, [&] {
    if (ep.IsDead(group, rank))
      throw Error(ErrorCode::kUnavailable, fmt::format("rank {} has died", group.WorldRank(rank)));
  });
}

std::unique_ptr<SharedWindow> Exchange::MakeWindow(std::string_view name, size_t bytes_per_rank,
                                                   size_t num_flags,
                                                   std::string_view setting) const {
  if (group.size() == 1) return nullptr;
  WindowOptions window;
  window.name = name;
  window.bytes_per_rank = bytes_per_rank;
  window.num_flags = num_flags;
  window.setting = setting;
  const Deadline deadline = Limit("make an exchange buffer");
  std::unique_ptr<SharedWindow> made = group.MakeWindow(window, deadline);
  PostFirstEpoch(group, *made, epoch, deadline);
  return made;
}

void PostFirstEpoch(ProcessGroup& group, SharedWindow& window, uint32_t epoch,
                    const Deadline& deadline) {
  if (epoch == 0) return;
  for (size_t peer : group.node_peers()) {
    for (size_t flag = 0; flag < window.num_flags(); ++flag)
      window.Post(peer, flag, {.epoch = epoch, .count = 0});
  }
  group.Barrier(deadline);
}

const float* ResultValues(const ValueLayout& home, const std::byte* packed, float* scratch) {
  if (home.meta.is_plain_f32()) return reinterpret_cast<const float*>(packed);
  quant::DequantizeRow(home.View(packed), 0, scratch);
  return scratch;
}

}  // namespace switchyard::moe
