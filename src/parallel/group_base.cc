#include "parallel/group_base.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "parallel/window_impl.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {

bool PendingExchange::Test() {
  if (exchange_ == nullptr) return true;
  if (!exchange_->Test()) return false;
  std::exchange(exchange_, nullptr)->Release();
  return true;
}

void PendingExchange::Wait(const Deadline& deadline) {
  if (exchange_ == nullptr) return;
  exchange_->Wait(deadline);
  std::exchange(exchange_, nullptr)->Release();
}

std::vector<std::string> AllGatherText(ProcessGroup& group, std::string_view mine,
                                       const Deadline& deadline) {
  const std::vector<size_t> bytes = AllGatherValue(group, mine.size(), deadline);
  std::string all(std::accumulate(bytes.begin(), bytes.end(), size_t{0}), '\0');
  group.AllGatherV(1, std::as_bytes(std::span(mine)), bytes, std::as_writable_bytes(std::span(all)),
                   deadline);
  std::vector<std::string> texts;
  size_t start = 0;
  for (size_t count : bytes) {
    texts.push_back(all.substr(start, count));
    start += count;
  }
  return texts;
}

}  // namespace switchyard

namespace switchyard::parallel {
namespace {

// Up to this many floats, a sum gathers everything everywhere: one exchange instead of two, and few
// bytes. The order of the sum, and so its bits, is the same.
constexpr size_t kGatherFloats = 4096;

size_t Sum(std::span<const size_t> values) {
  return std::accumulate(values.begin(), values.end(), size_t{0});
}

template <typename T>
void Grow(std::vector<T>& values, size_t count) {
  if (values.size() < count) values.resize(count);
}

// out = ((part 0 + part 1) + part 2) + …, parts one behind the other.
void SumParts(const float* parts, size_t num_parts, std::span<float> out) {
  std::copy_n(parts, out.size(), out.data());
  for (size_t part = 1; part < num_parts; ++part) {
    const float* values = parts + part * out.size();
    for (size_t i = 0; i < out.size(); ++i) out[i] += values[i];
  }
}

[[noreturn]] void ThrowInvalid(const std::string& group, std::string_view what,
                               const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("group \"{}\": {}: {}", group, what, message));
}

const std::byte* BytesOf(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}
std::byte* BytesOf(std::vector<float>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

}  // namespace

std::string_view CollectiveName(Collective collective) {
  switch (collective) {
    case Collective::kBarrier: return "Barrier";
    case Collective::kAllGather: return "AllGather";
    case Collective::kAllToAll: return "AllToAll";
    case Collective::kAllToAllV: return "AllToAllV";
    case Collective::kAllGatherV: return "AllGatherV";
  }
  return "";
}

size_t FakeNodeSize() {
  const char* text = std::getenv("SWITCHYARD_FAKE_NODE_SIZE");
  if (text == nullptr || *text == '\0') return 0;
  size_t size = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, problem] = std::from_chars(text, end, size);
  if (problem != std::errc() || stop != end || size == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("SWITCHYARD_FAKE_NODE_SIZE: expected a number of ranks >= 1, found "
                            "\"{}\"",
                            text));
  }
  return size;
}

void RowLayout::Assign(std::span<const size_t> rows_in, std::span<const size_t> starts_in) {
  rows.assign(rows_in.begin(), rows_in.end());
  if (!starts_in.empty()) {
    starts.assign(starts_in.begin(), starts_in.end());
    return;
  }
  starts.resize(rows.size());
  std::exclusive_scan(rows.begin(), rows.end(), starts.begin(), size_t{0});
}

void RowLayout::AssignSame(size_t ranks, size_t count, bool packed) {
  rows.assign(ranks, count);
  starts.resize(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) starts[rank] = packed ? rank * count : 0;
}

size_t RowLayout::Extent() const {
  size_t extent = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != 0) extent = std::max(extent, starts[i] + rows[i]);
  }
  return extent;
}

bool Operation::Test() { return group.TestNow(*this); }
void Operation::Wait(const Deadline& deadline) { group.WaitFor(*this, deadline); }
void Operation::Release() noexcept { group.Finish(*this); }

GroupBase::GroupBase(Membership membership)
    : name_(std::move(membership.name)),
      rank_(membership.rank),
      world_ranks_(std::move(membership.world_ranks)),
      nodes_(std::move(membership.nodes)) {
  for (size_t rank = 0; rank < size(); ++rank) {
    if (nodes_[rank] == nodes_[rank_]) node_peers_.push_back(rank);
  }
}

size_t GroupBase::WorldRank(size_t rank) const {
  SY_CHECK(rank < size());
  return world_ranks_[rank];
}

size_t GroupBase::NodeOf(size_t rank) const {
  SY_CHECK(rank < size());
  return nodes_[rank];
}

std::string GroupBase::RankList(std::span<const size_t> ranks) const {
  std::string list;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) list += i + 1 == ranks.size() ? " and " : ", ";
    list += fmt::format("{}", ranks[i]);
    if (WorldRank(ranks[i]) != ranks[i])
      list += fmt::format(" (world rank {})", WorldRank(ranks[i]));
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", list);
}

// --- Failing ----------------------------------------------------------------------------------

std::optional<std::string> GroupBase::Failure() {
  if (!failure_.empty()) return "the group is unusable since " + failure_;
  return FailureOfOthers();
}

void GroupBase::Fail(std::string_view reason) noexcept {
  if (failure_.empty()) failure_ = reason;
}

void GroupBase::ThrowIfFailed(std::string_view what, std::string_view stage) {
  const std::optional<std::string> reason = Failure();
  if (!reason) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("group \"{}\": {} ({}): {}", name_, what, stage, *reason));
}

void GroupBase::ThrowLate(std::string_view what, const Deadline& deadline,
                          const std::string& late) const {
  throw Error(ErrorCode::kUnavailable,
              fmt::format("group \"{}\": {} ({}): after {} ms, {}", name_, what, deadline.stage(),
                          deadline.limit().value_or(std::chrono::milliseconds{}).count(), late));
}

void GroupBase::AgreeOnError(const Error* mine, const Deadline& deadline) {
  struct Report {
    uint64_t failed;
    uint64_t code;
  };
  const Report report{mine != nullptr, mine != nullptr ? static_cast<uint64_t>(mine->code()) : 0};
  const std::vector<Report> reports = AllGatherValue(*this, report, deadline);
  const auto first =
      std::ranges::find_if(reports, [](const Report& entry) { return entry.failed != 0; });
  if (first == reports.end()) return;

  const std::vector<std::string> texts =
      AllGatherText(*this, mine != nullptr ? mine->message() : "", deadline);
  const auto failed = static_cast<size_t>(first - reports.begin());
  if (failed == rank_) throw Error(*mine);
  throw Error(static_cast<ErrorCode>(first->code),
              fmt::format("rank {}: {}", failed, texts[failed]));
}

// --- Operations -------------------------------------------------------------------------------

Operation& GroupBase::NewOperation(Collective collective, size_t row_bytes, const std::byte* send,
                                   std::byte* recv) {
  auto free = std::ranges::find_if(operations_, [](const auto& op) { return !op->in_use; });
  if (free == operations_.end()) {
    operations_.push_back(std::make_unique<Operation>(*this));
    free = operations_.end() - 1;
  }
  Operation& operation = **free;
  operation.collective = collective;
  operation.row_bytes = row_bytes;
  operation.send = send;
  operation.recv = recv;
  operation.complete = false;
  return operation;
}

void GroupBase::Begin(Operation& operation, std::string_view stage) {
  ThrowIfFailed(CollectiveName(operation.collective), stage);
  operation.number = ++num_started_;
  operation.in_use = true;
  try {
    Start(operation);
  } catch (...) {
    Finish(operation);
    throw;
  }
}

bool GroupBase::TestNow(Operation& operation) {
  if (!operation.complete) operation.complete = Progress(operation);
  if (operation.complete) return true;
  Poll(&operation, {});
  ThrowIfFailed(CollectiveName(operation.collective), "test");
  return false;
}

void GroupBase::WaitFor(Operation& operation, const Deadline& deadline) {
  const auto done = [&] {
    return operation.complete || (operation.complete = Progress(operation));
  };
  WaitUntil(done, deadline, CollectiveName(operation.collective), &operation, [&] {
    const std::vector<size_t> late = LateRanks(operation);
    if (late.empty()) return std::string("every rank has come, but not all of its data");
    return fmt::format("still waiting for {}", RankList(late));
  });
}

void GroupBase::Finish(Operation& operation) noexcept {
  if (!operation.complete) {
    Fail(fmt::format("{} number {} was given up before it was complete",
                     CollectiveName(operation.collective), operation.number));
    Abandon(operation);
  }
  operation.owner.reset();
  operation.in_use = false;
}

void GroupBase::Complete(Operation& operation, const Deadline& deadline) {
  try {
    WaitFor(operation, deadline);
  } catch (const std::exception& exception) {
    Fail(exception.what());
    Finish(operation);
    throw;
  }
  Finish(operation);
}

// --- Collectives ------------------------------------------------------------------------------

void GroupBase::Barrier(const Deadline& deadline) {
  Operation& operation = NewOperation(Collective::kBarrier, 0, nullptr, nullptr);
  operation.send_layout.AssignSame(size(), 0, false);
  operation.recv_layout.AssignSame(size(), 0, false);
  Begin(operation, deadline.stage());
  Complete(operation, deadline);
}

void GroupBase::AllGather(std::span<const std::byte> mine, std::span<std::byte> all,
                          const Deadline& deadline) {
  if (all.size() != size() * mine.size()) {
    ThrowInvalid(name_, "AllGather",
                 fmt::format("{} bytes of each of {} ranks need {} bytes, found room for {}",
                             mine.size(), size(), size() * mine.size(), all.size()));
  }
  Operation& operation = NewOperation(Collective::kAllGather, mine.size(), mine.data(), all.data());
  operation.send_layout.AssignSame(size(), 1, false);
  operation.recv_layout.AssignSame(size(), 1, true);
  Begin(operation, deadline.stage());
  Complete(operation, deadline);
}

void GroupBase::AllToAll(std::span<const uint32_t> send, std::span<uint32_t> recv,
                         const Deadline& deadline) {
  if (send.size() != recv.size() || send.size() % size() != 0) {
    ThrowInvalid(name_, "AllToAll",
                 fmt::format("expected the same multiple of {} numbers to send and to receive, "
                             "found {} and {}",
                             size(), send.size(), recv.size()));
  }
  const auto send_bytes = std::as_bytes(send);
  Operation& operation = NewOperation(Collective::kAllToAll, send_bytes.size() / size(),
                                      send_bytes.data(), std::as_writable_bytes(recv).data());
  operation.send_layout.AssignSame(size(), 1, true);
  operation.recv_layout.AssignSame(size(), 1, true);
  Begin(operation, deadline.stage());
  Complete(operation, deadline);
}

Operation& GroupBase::PrepareAllToAllV(const RowExchange& exchange) {
  const auto check = [&](const char* list, size_t found, bool may_be_empty) {
    if (found == size() || (may_be_empty && found == 0)) return;
    ThrowInvalid(
        name_, "AllToAllV",
        fmt::format("{} has {} entries, expected one for each of {} ranks", list, found, size()));
  };
  check("send_rows", exchange.send_rows.size(), false);
  check("recv_rows", exchange.recv_rows.size(), false);
  check("send_starts", exchange.send_starts.size(), true);
  check("recv_starts", exchange.recv_starts.size(), true);
  if (exchange.send_rows[rank_] != exchange.recv_rows[rank_]) {
    ThrowInvalid(name_, "AllToAllV",
                 fmt::format("rank {} sends itself {} rows and receives {}", rank_,
                             exchange.send_rows[rank_], exchange.recv_rows[rank_]));
  }
  Operation& operation =
      NewOperation(Collective::kAllToAllV, exchange.row_bytes, exchange.send, exchange.recv);
  operation.send_layout.Assign(exchange.send_rows, exchange.send_starts);
  operation.recv_layout.Assign(exchange.recv_rows, exchange.recv_starts);
  operation.owner = exchange.owner;
  return operation;
}

PendingExchange GroupBase::StartAllToAllV(const RowExchange& exchange) {
  Operation& operation = PrepareAllToAllV(exchange);
  Begin(operation, "start");
  return PendingExchange(&operation);
}

void GroupBase::AllToAllV(const RowExchange& exchange, const Deadline& deadline) {
  Operation& operation = PrepareAllToAllV(exchange);
  Begin(operation, deadline.stage());
  Complete(operation, deadline);
}

void GroupBase::AllGatherV(size_t row_bytes, std::span<const std::byte> mine,
                           std::span<const size_t> rows, std::span<std::byte> all,
                           const Deadline& deadline, std::shared_ptr<const void> owner) {
  if (rows.size() != size()) {
    ThrowInvalid(
        name_, "AllGatherV",
        fmt::format("rows has {} entries, expected one for each of {} ranks", rows.size(), size()));
  }
  if (mine.size() != rows[rank_] * row_bytes || all.size() != Sum(rows) * row_bytes) {
    ThrowInvalid(name_, "AllGatherV",
                 fmt::format("{} rows of {} here and {} in all need {} and {} bytes, found {} and "
                             "{}",
                             rows[rank_], row_bytes, Sum(rows), rows[rank_] * row_bytes,
                             Sum(rows) * row_bytes, mine.size(), all.size()));
  }
  Operation& operation = NewOperation(Collective::kAllGatherV, row_bytes, mine.data(), all.data());
  operation.send_layout.AssignSame(size(), rows[rank_], false);
  operation.recv_layout.Assign(rows, {});
  operation.owner = std::move(owner);
  Begin(operation, deadline.stage());
  Complete(operation, deadline);
}

// --- Sums -------------------------------------------------------------------------------------

void GroupBase::ExchangeForSum(size_t row_floats, std::span<const size_t> rows,
                               const Deadline& deadline) {
  scratch_->from_each.assign(size(), rows[rank_]);
  Grow(scratch_->recv, size() * rows[rank_] * row_floats);
  AllToAllV({.row_bytes = row_floats * sizeof(float),
             .send = BytesOf(std::as_const(scratch_->send)),
             .recv = BytesOf(scratch_->recv),
             .send_rows = rows,
             .recv_rows = scratch_->from_each,
             .send_starts = {},
             .recv_starts = {},
             .owner = scratch_},
            deadline);
}

void GroupBase::AllReduceSum(std::span<float> values, const Deadline& deadline) {
  if (size() == 1) return;
  Grow(scratch_->send, values.size());
  std::ranges::copy(values, scratch_->send.begin());
  if (values.size() <= kGatherFloats) {
    Grow(scratch_->recv, size() * values.size());
    const auto mine = std::as_bytes(std::span(scratch_->send).first(values.size()));
    const auto all =
        std::as_writable_bytes(std::span(scratch_->recv).first(size() * values.size()));
    AllGather(mine, all, deadline);
    SumParts(scratch_->recv.data(), size(), values);
    return;
  }
  // Every rank sums one stretch of the values and sends it to all.
  std::vector<size_t>& stretches = scratch_->stretches;
  stretches.resize(size());
  for (size_t rank = 0; rank < size(); ++rank)
    stretches[rank] = values.size() * (rank + 1) / size() - values.size() * rank / size();
  ExchangeForSum(1, stretches, deadline);
  const std::span<float> summed = std::span(scratch_->send).first(stretches[rank_]);
  SumParts(scratch_->recv.data(), size(), summed);
  Grow(scratch_->recv, values.size());
  const std::span<float> all = std::span(scratch_->recv).first(values.size());
  AllGatherV(sizeof(float), std::as_bytes(summed), stretches, std::as_writable_bytes(all), deadline,
             scratch_);
  std::ranges::copy(all, values.begin());
}

void GroupBase::ReduceScatterV(ConstRows partial, std::span<const size_t> rows, Rows mine,
                               const Deadline& deadline) {
  if (rows.size() != size() || partial.rows != Sum(rows) || mine.rows != rows[rank_] ||
      mine.cols != partial.cols) {
    ThrowInvalid(name_, "ReduceScatterV",
                 fmt::format("{} partial rows of {} become {} rows of {} on rank {}, but rows is "
                             "[{}]",
                             partial.rows, partial.cols, mine.rows, mine.cols, rank_,
                             fmt::join(rows, ", ")));
  }
  const size_t cols = partial.cols;
  Grow(scratch_->send, partial.rows * cols);
  for (size_t row = 0; row < partial.rows; ++row)
    std::ranges::copy(partial.RowSpan(row), scratch_->send.data() + row * cols);
  ExchangeForSum(cols, rows, deadline);
  const std::span<float> summed = std::span(scratch_->send).first(mine.rows * cols);
  SumParts(scratch_->recv.data(), size(), summed);
  for (size_t row = 0; row < mine.rows; ++row)
    std::ranges::copy(summed.subspan(row * cols, cols), mine.RowSpan(row).begin());
}

// --- New groups and windows -------------------------------------------------------------------

std::unique_ptr<ProcessGroup> GroupBase::Split(size_t color, size_t key, std::string_view name,
                                               const Deadline& deadline) {
  struct Choice {
    uint64_t color;
    uint64_t key;
  };
  const std::vector<Choice> choices = AllGatherValue(*this, Choice{color, key}, deadline);
  if (color == kNoGroup) {
    NoChild();
    return nullptr;
  }
  std::vector<size_t> members;
  for (size_t rank = 0; rank < size(); ++rank) {
    if (choices[rank].color == color) members.push_back(rank);
  }
  const size_t index = members.front();  // tells the new groups apart
  std::ranges::stable_sort(members, {}, [&](size_t rank) { return choices[rank].key; });

  Membership membership{.name = std::string(name), .rank = 0, .world_ranks = {}, .nodes = {}};
  for (size_t rank : members) {
    if (rank == rank_) membership.rank = membership.world_ranks.size();
    membership.world_ranks.push_back(world_ranks_[rank]);
    membership.nodes.push_back(nodes_[rank]);
  }
  return MakeChild(std::move(membership), index);
}

std::unique_ptr<ProcessGroup> GroupBase::Duplicate(std::string_view name,
                                                   const Deadline& deadline) {
  return Split(0, 0, name, deadline);
}

std::unique_ptr<SharedWindow> GroupBase::MakeWindow(const WindowOptions& options,
                                                    const Deadline& deadline) {
  struct Asked {
    uint64_t bytes;
    uint64_t flags;
  };
  const std::vector<Asked> asked =
      AllGatherValue(*this, Asked{options.bytes_per_rank, options.num_flags}, deadline);
  for (size_t rank = 1; rank < size(); ++rank) {
    if (asked[rank].bytes == asked[0].bytes && asked[rank].flags == asked[0].flags) continue;
    ThrowInvalid(name_, fmt::format("window \"{}\"", options.name),
                 fmt::format("rank 0 asks for {} bytes and {} flags, rank {} for {} and {} "
                             "(setting {})",
                             asked[0].bytes, asked[0].flags, rank, asked[rank].bytes,
                             asked[rank].flags, options.setting));
  }
  size_t bytes = 0;
  RunTogether(*this, deadline, [&] {
    bytes = SharedWindow::Impl::PartBytes(options, node_peers_.size());
    CheckWindow(options, bytes);
  });
  auto window = std::make_unique<SharedWindow>(std::make_unique<SharedWindow::Impl>(
      *this, options, MakeWindowMemory(options, bytes, deadline)));
  Barrier(deadline);  // all parts are zeroed
  return window;
}

}  // namespace switchyard::parallel
