#include "parallel/group_suite.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "switchyard/parallel/parallel_groups.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;

// Only a broken program waits this long.
Deadline Soon(std::string_view stage = "test") {
  return Deadline::After(milliseconds(60000), stage);
}
// Long enough for the news of who has come, also on a busy machine.
Deadline Short(std::string_view stage) { return Deadline::After(milliseconds(400), stage); }

size_t Sum(const std::vector<size_t>& values) {
  return std::accumulate(values.begin(), values.end(), size_t{0});
}

// The value of a byte that tells where it came from and where it belongs.
std::byte Mark(size_t from, size_t to, size_t row, size_t at) {
  return static_cast<std::byte>(from * 101 + to * 31 + row * 7 + at * 3 + 1);
}

// rows[from][to] of an exchange, and the buffers of one rank.
using RowTable = std::vector<std::vector<size_t>>;

struct Buffers {
  std::vector<size_t> send_rows, recv_rows;
  std::vector<std::byte> send, recv;
};

std::shared_ptr<Buffers> MakeBuffers(size_t rank, const RowTable& rows, size_t row_bytes) {
  auto buffers = std::make_shared<Buffers>();
  buffers->send_rows = rows[rank];
  for (const auto& from : rows) buffers->recv_rows.push_back(from[rank]);
  for (size_t to = 0; to < rows.size(); ++to) {
    for (size_t row = 0; row < rows[rank][to]; ++row) {
      for (size_t at = 0; at < row_bytes; ++at) buffers->send.push_back(Mark(rank, to, row, at));
    }
  }
  buffers->recv.resize(Sum(buffers->recv_rows) * row_bytes);
  return buffers;
}

RowExchange ExchangeOf(const Buffers& buffers, std::byte* recv, size_t row_bytes) {
  RowExchange exchange;
  exchange.row_bytes = row_bytes;
  exchange.send = buffers.send.data();
  exchange.recv = recv;
  exchange.send_rows = buffers.send_rows;
  exchange.recv_rows = buffers.recv_rows;
  return exchange;
}

bool HasArrived(const Buffers& buffers, size_t rank, size_t row_bytes) {
  const std::byte* next = buffers.recv.data();
  for (size_t from = 0; from < buffers.recv_rows.size(); ++from) {
    for (size_t row = 0; row < buffers.recv_rows[from]; ++row) {
      for (size_t at = 0; at < row_bytes; ++at) {
        if (*next++ != Mark(from, rank, row, at)) return false;
      }
    }
  }
  return true;
}

// One exchange of the given rows, with and without an owner of the buffers.
void ExpectExchange(ProcessGroup& group, const RowTable& rows, size_t row_bytes) {
  for (bool owned : {false, true}) {
    const auto buffers = MakeBuffers(group.rank(), rows, row_bytes);
    RowExchange exchange = ExchangeOf(*buffers, buffers->recv.data(), row_bytes);
    if (owned) exchange.owner = buffers;
    group.AllToAllV(exchange, Soon());
    EXPECT_TRUE(HasArrived(*buffers, group.rank(), row_bytes)) << "owned: " << owned;
  }
}

RowTable MakeTable(size_t ranks, const std::function<size_t(size_t from, size_t to)>& rows) {
  RowTable table(ranks, std::vector<size_t>(ranks));
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) table[from][to] = rows(from, to);
  }
  return table;
}

// The same on every rank: the seed is the run's.
RowTable RandomTable(size_t ranks, std::mt19937_64& random, size_t most) {
  return MakeTable(ranks, [&](size_t, size_t) {
    const size_t rows = random() % (2 * most);
    return rows < most ? 0 : rows - most;  // half of them empty
  });
}

// --- The cases --------------------------------------------------------------------------------

void KnowsItsRanks(ProcessGroup& group) {
  EXPECT_LT(group.rank(), group.size());
  const std::vector<size_t> ranks = AllGatherValue(group, group.rank(), Soon());
  for (size_t rank = 0; rank < group.size(); ++rank) EXPECT_EQ(ranks[rank], rank);
  std::vector<size_t> peers;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    if (group.NodeOf(rank) == group.NodeOf(group.rank())) peers.push_back(rank);
  }
  EXPECT_EQ(std::vector(group.node_peers().begin(), group.node_peers().end()), peers);
}

void Gathers(ProcessGroup& group) {
  for (int round = 0; round < 50; ++round) {
    const std::array<size_t, 3> mine{group.rank(), static_cast<size_t>(round), 7};
    const auto all = AllGatherValue(group, mine, Soon());
    for (size_t rank = 0; rank < group.size(); ++rank)
      EXPECT_EQ(all[rank], (std::array<size_t, 3>{rank, static_cast<size_t>(round), 7}));
    group.Barrier(Soon());
  }
  group.AllGather({}, {}, Soon());  // no bytes is a size, too
  const auto texts = AllGatherText(group, std::string(group.rank() * 3, 'x'), Soon());
  for (size_t rank = 0; rank < group.size(); ++rank) EXPECT_EQ(texts[rank].size(), rank * 3);
}

void ExchangesCounts(ProcessGroup& group) {
  for (size_t each : {size_t{0}, size_t{1}, size_t{5}}) {
    std::vector<uint32_t> send(group.size() * each), recv(group.size() * each, 99);
    for (size_t to = 0; to < group.size(); ++to) {
      for (size_t i = 0; i < each; ++i)
        send[to * each + i] = static_cast<uint32_t>(group.rank() * 1000 + to * 10 + i);
    }
    group.AllToAll(send, recv, Soon());
    for (size_t from = 0; from < group.size(); ++from) {
      for (size_t i = 0; i < each; ++i)
        EXPECT_EQ(recv[from * each + i], from * 1000 + group.rank() * 10 + i);
    }
  }
}

void ExchangesUnevenRows(ProcessGroup& group) {
  const size_t n = group.size();
  ExpectExchange(group, MakeTable(n, [](size_t from, size_t to) { return from * 3 + to; }), 13);
  ExpectExchange(group, MakeTable(n, [](size_t, size_t) { return size_t{0}; }), 8);
  // One rank gets everything, one sends everything, and nobody keeps anything.
  ExpectExchange(group, MakeTable(n, [&](size_t, size_t to) { return to == n - 1 ? 9u : 0u; }), 64);
  ExpectExchange(group, MakeTable(n, [](size_t from, size_t) { return from == 0 ? 5u : 0u; }), 1);
  ExpectExchange(group, MakeTable(n, [](size_t from, size_t to) { return from == to ? 0u : 2u; }),
                 7488);
}

void ExchangesRandomRows(ProcessGroup& group) {
  std::mt19937_64 random = MakeRandom(1);
  for (int step = 0; step < 150; ++step) {
    const size_t row_bytes = size_t{1} << (random() % 8);
    ExpectExchange(group, RandomTable(group.size(), random, 20), row_bytes);
  }
}

void LeavesGapsAlone(ProcessGroup& group) {
  // Slots of four rows for each rank, of which rank + 1 are used: the layout of low-latency modes.
  const size_t n = group.size();
  constexpr size_t kSlot = 4, kRow = 16;
  std::vector<size_t> send_rows(n), recv_rows(n), starts(n);
  std::vector<std::byte> send(n * kSlot * kRow), recv(send.size(), std::byte{0xEE});
  for (size_t peer = 0; peer < n; ++peer) {
    send_rows[peer] = group.rank() % kSlot;
    recv_rows[peer] = peer % kSlot;
    starts[peer] = peer * kSlot;
    for (size_t i = 0; i < kSlot * kRow; ++i)
      send[peer * kSlot * kRow + i] = Mark(group.rank(), peer, i / kRow, i % kRow);
  }
  RowExchange exchange;
  exchange.row_bytes = kRow;
  exchange.send = send.data();
  exchange.recv = recv.data();
  exchange.send_rows = send_rows;
  exchange.recv_rows = recv_rows;
  exchange.send_starts = exchange.recv_starts = starts;
  group.AllToAllV(exchange, Soon());
  for (size_t from = 0; from < n; ++from) {
    for (size_t i = 0; i < kSlot * kRow; ++i) {
      const bool used = i / kRow < recv_rows[from];
      EXPECT_EQ(recv[from * kSlot * kRow + i],
                used ? Mark(from, group.rank(), i / kRow, i % kRow) : std::byte{0xEE});
    }
  }
}

void MovesLargeMessages(ProcessGroup& group) {
  // Beyond what any transport sends in one piece.
  const auto table =
      MakeTable(group.size(), [](size_t from, size_t to) { return 60 + 3 * from + to; });
  ExpectExchange(group, table, 32 * 1024 + 64);
}

void WaitsInAnyOrder(ProcessGroup& group) {
  std::mt19937_64 random = MakeRandom(2);
  constexpr size_t kRow = 24;
  for (int step = 0; step < 30; ++step) {
    const auto a = MakeBuffers(group.rank(), RandomTable(group.size(), random, 30), kRow);
    const auto b = MakeBuffers(group.rank(), RandomTable(group.size(), random, 300), kRow);
    PendingExchange first = group.StartAllToAllV(ExchangeOf(*a, a->recv.data(), kRow));
    PendingExchange second = group.StartAllToAllV(ExchangeOf(*b, b->recv.data(), kRow));
    EXPECT_TRUE(first.active() && second.active());
    group.Barrier(Soon());  // other collectives may come between start and wait
    second.Wait(Soon());
    EXPECT_TRUE(HasArrived(*b, group.rank(), kRow));
    while (!first.Test()) std::this_thread::yield();
    EXPECT_TRUE(HasArrived(*a, group.rank(), kRow));
    EXPECT_FALSE(first.active() || second.active());
    EXPECT_TRUE(first.Test());
    first.Wait(Soon());
  }
}

void GathersRows(ProcessGroup& group) {
  for (size_t base : {size_t{0}, size_t{2}, size_t{300}}) {
    constexpr size_t kRow = 40;
    std::vector<size_t> rows;
    for (size_t rank = 0; rank < group.size(); ++rank) rows.push_back(base * (rank % 3));
    const auto bytes_of = [&](size_t rank) {
      std::vector<std::byte> bytes;
      for (size_t i = 0; i < rows[rank] * kRow; ++i) bytes.push_back(Mark(rank, 0, i / kRow, i));
      return bytes;
    };
    std::vector<std::byte> all(Sum(rows) * kRow), expected;
    group.AllGatherV(kRow, bytes_of(group.rank()), rows, all, Soon());
    for (size_t rank = 0; rank < group.size(); ++rank) {
      for (std::byte byte : bytes_of(rank)) expected.push_back(byte);
    }
    EXPECT_EQ(all, expected);
  }
}

// Whether two spans hold the same bits.
bool SameBits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<uint32_t, float>,
                            std::bit_cast<uint32_t, float>);
}

// Values whose sum depends on the order of additions.
std::vector<float> AwkwardFloats(size_t rank, size_t count) {
  std::mt19937_64 random = MakeRandom(1000 + rank);
  std::vector<float> values = RandomFloats(random, count);
  for (size_t i = 0; i < count; i += 3) values[i] *= 1e7f;
  return values;
}

std::vector<float> SumInRankOrder(size_t ranks, size_t count) {
  std::vector<float> sum = AwkwardFloats(0, count);
  for (size_t rank = 1; rank < ranks; ++rank) {
    const std::vector<float> values = AwkwardFloats(rank, count);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

void SumsInRankOrder(ProcessGroup& group) {
  // Both sides of the size at which the way changes, and sizes that ranks do not divide.
  for (size_t count : {0u, 1u, 5u, 4096u, 4097u, 50001u}) {
    std::vector<float> values = AwkwardFloats(group.rank(), count);
    group.AllReduceSum(values, Soon());
    const std::vector<float> expected = SumInRankOrder(group.size(), count);
    EXPECT_TRUE(SameBits(values, expected)) << count;
  }
  std::vector<float> zero{-0.0f};
  group.AllReduceSum(zero, Soon());
  EXPECT_TRUE(std::signbit(zero[0]));
}

void ReducesRowsToTheirOwners(ProcessGroup& group) {
  for (size_t cols : {size_t{0}, size_t{1}, size_t{37}}) {
    constexpr size_t kPad = 3;
    std::vector<size_t> rows;
    for (size_t rank = 0; rank < group.size(); ++rank) rows.push_back((rank * 2 + 5) % 7);
    const size_t total = Sum(rows), mine = rows[group.rank()];
    std::vector<float> partial(total * (cols + kPad)), sums(mine * (cols + 1), -1.0f);
    const std::vector<float> values = AwkwardFloats(group.rank(), total * cols);
    for (size_t row = 0; row < total; ++row)
      std::copy_n(values.data() + row * cols, cols, partial.data() + row * (cols + kPad));
    const Rows out(sums.data(), mine, cols, cols + 1);
    group.ReduceScatterV(ConstRows(partial.data(), total, cols, cols + kPad), rows, out, Soon());
    const std::vector<float> expected = SumInRankOrder(group.size(), total * cols);
    size_t first = 0;
    for (size_t rank = 0; rank < group.rank(); ++rank) first += rows[rank];
    for (size_t row = 0; row < mine; ++row) {
      EXPECT_TRUE(
          SameBits(out.RowSpan(row), std::span(expected).subspan((first + row) * cols, cols)));
      EXPECT_EQ(out.Row(row)[cols], -1.0f) << "what is between rows is not ours";
    }
  }
}

void SplitsByColorAndKey(ProcessGroup& group) {
  const size_t n = group.size(), me = group.rank();
  // Even and odd ranks, in falling order.
  auto half = group.Split(me % 2, n - me, "half", Soon());
  EXPECT_EQ(half->name(), "half");
  EXPECT_EQ(half->carrier(), group.carrier());
  const std::vector<size_t> members = AllGatherValue(*half, me, Soon());
  ASSERT_EQ(members.size(), me % 2 == 0 ? (n + 1) / 2 : n / 2);
  for (size_t rank = 0; rank < members.size(); ++rank) {
    EXPECT_EQ(members[rank] % 2, me % 2);
    EXPECT_EQ(half->WorldRank(rank), group.WorldRank(members[rank]));
    EXPECT_EQ(half->NodeOf(rank), group.NodeOf(members[rank]));
    EXPECT_TRUE(rank == 0 || members[rank] < members[rank - 1]);
  }
  EXPECT_EQ(members[half->rank()], me);
  // A group of a group, and nothing for rank 0.
  auto rest = group.Split(me == 0 ? ProcessGroup::kNoGroup : 5, me, "rest", Soon());
  EXPECT_EQ(rest == nullptr, me == 0);
  if (rest) {
    auto again = rest->Duplicate("again", Soon());
    EXPECT_EQ(again->size(), n - 1);
    EXPECT_EQ(again->rank(), me - 1);
    again->Barrier(Soon());
  }
  // Groups work side by side: what is started in one does not hold up the other.
  auto copy = group.Duplicate("copy", Soon());
  const auto buffers = MakeBuffers(me, MakeTable(n, [](size_t, size_t) { return 3u; }), 8);
  PendingExchange pending = copy->StartAllToAllV(ExchangeOf(*buffers, buffers->recv.data(), 8));
  half->Barrier(Soon());
  group.Barrier(Soon());
  pending.Wait(Soon());
  EXPECT_TRUE(HasArrived(*buffers, me, 8));
}

void NamesALateRank(ProcessGroup& group) {
  if (group.size() == 1) return;
  const size_t late = group.size() - 1;
  auto copy = group.Duplicate("patient", Soon());
  if (group.rank() != late) {
    ExpectError(ErrorCode::kUnavailable,
                {"group \"patient\"", "Barrier", "layer 3 dispatch", "400 ms",
                 fmt::format("waiting for rank {}", late)},
                [&] { copy->Barrier(Short("layer 3 dispatch")); });
    // What is half done cannot be repeated.
    ExpectError(ErrorCode::kUnavailable, {"unusable", "layer 3 dispatch"},
                [&] { copy->Barrier(Soon()); });
  }
  group.Barrier(Soon());
}

void AnExchangeOutlivesADeadline(ProcessGroup& group) {
  if (group.size() == 1) return;
  const size_t late = group.size() - 1;
  auto copy = group.Duplicate("patient", Soon());
  const auto buffers =
      MakeBuffers(group.rank(), MakeTable(group.size(), [](size_t, size_t) { return 4u; }), 100);
  PendingExchange pending;
  const auto start = [&] {
    pending = copy->StartAllToAllV(ExchangeOf(*buffers, buffers->recv.data(), 100));
  };
  if (group.rank() != late) {
    start();
    ExpectError(ErrorCode::kUnavailable,
                {"AllToAllV", "combine", fmt::format("waiting for rank {}", late)},
                [&] { pending.Wait(Short("combine")); });
    EXPECT_TRUE(pending.active());
  }
  group.Barrier(Soon());
  if (group.rank() == late) start();
  pending.Wait(Soon());
  EXPECT_TRUE(HasArrived(*buffers, group.rank(), 100));
  copy->Barrier(Soon());
}

void AnAbandonedExchangeEndsTheGroup(ProcessGroup& group) {
  if (group.size() == 1) return;
  auto copy = group.Duplicate("abandoned", Soon());
  const auto table = MakeTable(group.size(), [](size_t, size_t) { return 2000u; });
  if (group.rank() == 0) {
    // Nobody else takes part, so it cannot complete.
    const auto buffers = MakeBuffers(0, table, 64);
    copy->StartAllToAllV(ExchangeOf(*buffers, buffers->recv.data(), 64));
    ExpectError(ErrorCode::kUnavailable, {"abandoned", "given up"}, [&] { copy->Barrier(Soon()); });
  }
  group.Barrier(Soon());
}

void AbortReachesWaitingRanks(ProcessGroup& group) {
  if (group.size() == 1) return;
  auto parent = group.Duplicate("parent", Soon());
  auto child = parent->Duplicate("child", Soon());
  auto grandchild = child->Duplicate("grandchild", Soon());
  group.Barrier(Soon());  // all have what they need
  if (group.rank() == 1) {
    child->Abort("the disk is on fire");
    child->Abort("a second message");
  }
  const auto cause = {std::string_view("rank 1 of group \"child\" failed: the disk is on fire")};
  // All learn of it: those that wait, and who aborted. Its descendants fail, its ancestors do not.
  ExpectError(ErrorCode::kUnavailable, cause, [&] { child->Barrier(Soon()); });
  ExpectError(ErrorCode::kUnavailable, cause, [&] { grandchild->Barrier(Soon()); });
  parent->Barrier(Soon());
  group.Barrier(Soon());
}

void RanksAgreeOnErrors(ProcessGroup& group) {
  const size_t failing = group.size() / 2;
  RunTogether(group, Soon(), [] {});
  ExpectError(ErrorCode::kNotFound, {"no such expert"}, [&] {
    RunTogether(group, Soon(), [&] {
      if (group.rank() >= failing)
        throw Error(ErrorCode::kNotFound, fmt::format("no such expert on {}", group.rank()));
    });
  });
  try {
    RunTogether(group, Soon(), [&] {
      if (group.rank() >= failing) throw std::runtime_error(fmt::format("told {}", group.rank()));
    });
    ADD_FAILURE() << "no error was thrown";
  } catch (const Error& error) {
    // The lowest rank that failed speaks for all.
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    const std::string text = fmt::format("told {}", failing);
    EXPECT_EQ(error.message(),
              group.rank() == failing ? text : fmt::format("rank {}: {}", failing, text));
  }
  group.Barrier(Soon());
}

void RefusesSizesThatDoNotFit(ProcessGroup& group) {
  const std::vector<size_t> rows(group.size(), 1), too_many(group.size() + 1, 1);
  std::vector<std::byte> bytes(100);
  RowExchange exchange;
  exchange.send_rows = too_many;
  exchange.recv_rows = rows;
  ExpectError(ErrorCode::kInvalidArgument, {"AllToAllV", "send_rows", "expected one for each"},
              [&] { group.AllToAllV(exchange, Soon()); });
  exchange.send_rows = rows;
  exchange.recv_starts = too_many;
  ExpectError(ErrorCode::kInvalidArgument, {"recv_starts"},
              [&] { group.StartAllToAllV(exchange); });
  std::vector<size_t> more = rows;
  more[group.rank()] = 2;
  exchange.recv_starts = {};
  exchange.send_rows = more;
  ExpectError(ErrorCode::kInvalidArgument, {"sends itself 2 rows and receives 1"},
              [&] { group.AllToAllV(exchange, Soon()); });
  ExpectError(ErrorCode::kInvalidArgument, {"AllGather", "found room for 100"},
              [&] { group.AllGather(std::span(bytes).first(99), bytes, Soon()); });
  ExpectError(ErrorCode::kInvalidArgument, {"AllGatherV"},
              [&] { group.AllGatherV(8, bytes, rows, bytes, Soon()); });
  std::vector<uint32_t> one(group.size()), two(2 * group.size());
  ExpectError(ErrorCode::kInvalidArgument, {"AllToAll"}, [&] { group.AllToAll(one, two, Soon()); });
  ExpectError(ErrorCode::kInvalidArgument, {"ReduceScatterV", "5 partial rows"},
              [&] { group.ReduceScatterV(ConstRows(nullptr, 5, 0), rows, Rows(), Soon()); });
  group.Barrier(Soon());  // nothing was started
}

void WindowsCarryRowsAndFlags(ProcessGroup& group) {
  auto window = group.MakeWindow(
      {.name = "rows", .bytes_per_rank = 1000, .num_flags = 3, .setting = "none"}, Soon());
  EXPECT_EQ(window->bytes_per_rank(), 1000u);
  EXPECT_EQ(window->num_flags(), 3u);
  for (std::byte byte : window->Part(group.rank())) EXPECT_EQ(byte, std::byte{0});
  // Flag 0 says that a step is there, flag 1 that it was read; epochs run through 2^32.
  uint32_t epoch = 0xFFFFFFF0u;
  for (size_t peer : group.node_peers()) {
    window->Post(peer, 0, {.epoch = epoch, .count = 0});
    window->Post(peer, 1, {.epoch = epoch, .count = 0});
  }
  group.Barrier(Soon());
  for (int step = 0; step < 200; ++step) {
    ++epoch;
    // Two halves: one may be filled again when all peers have read what it held two steps ago.
    const size_t half = epoch % 2;
    for (size_t peer : group.node_peers()) window->Await(peer, 1, epoch - 2, Soon());
    std::span<std::byte> mine = window->Part(group.rank()).subspan(half * 500, 500);
    for (size_t at = 0; at < mine.size(); ++at)
      mine[at] = Mark(group.rank(), 0, static_cast<size_t>(step), at);
    for (size_t peer : group.node_peers())
      window->Post(peer, 0, {.epoch = epoch, .count = static_cast<uint32_t>(step)});
    for (size_t peer : group.node_peers()) {
      const Signal signal = window->Await(peer, 0, epoch, Soon());
      // A peer may be one step ahead, but not two.
      EXPECT_TRUE(signal.epoch == epoch || signal.epoch == epoch + 1);
      EXPECT_EQ(signal.count, static_cast<uint32_t>(step) + (signal.epoch - epoch));
      const std::span<std::byte> theirs = window->Part(peer).subspan(half * 500, 500);
      bool equal = true;
      for (size_t at = 0; at < theirs.size(); ++at)
        equal &= theirs[at] == Mark(peer, 0, static_cast<size_t>(step), at);
      EXPECT_TRUE(equal) << "step " << step << " of rank " << peer;
      window->Post(peer, 1, {.epoch = epoch, .count = 0});
    }
  }
  EXPECT_EQ(window->Peek(group.rank(), 2).epoch, 0u);
}

void WindowsKeepToTheNode(ProcessGroup& group) {
  auto window = group.MakeWindow(
      {.name = "near", .bytes_per_rank = 64, .num_flags = 1, .setting = "none"}, Soon());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    if (group.NodeOf(rank) == group.NodeOf(group.rank())) {
      EXPECT_EQ(window->Part(rank).size(), 64u);
      continue;
    }
    ExpectError(ErrorCode::kInvalidArgument, {"\"near\"", "not on the node"},
                [&] { window->Part(rank); });
    ExpectError(ErrorCode::kInvalidArgument, {"\"near\"", "not on the node"},
                [&] { window->Await(rank, 0, 1, Soon()); });
  }
  ExpectError(ErrorCode::kInvalidArgument, {"1 flags", "number 1"},
              [&] { window->Post(group.rank(), 1, {}); });
  // A flag that does not come, and comes later after all.
  const size_t first = group.node_peers().front();
  if (group.rank() != first) {
    ExpectError(
        ErrorCode::kUnavailable,
        {"near", "combine_b", "400 ms", fmt::format("rank {} has not posted flag 0", first)},
        [&] { window->Await(first, 0, 1, Short("combine_b")); });
  }
  group.Barrier(Soon());
  if (group.rank() == first) {
    for (size_t peer : group.node_peers()) window->Post(peer, 0, {.epoch = 1, .count = 17});
  }
  EXPECT_EQ(window->Await(first, 0, 1, Soon()).count, 17u);
}

void WindowsFailTogether(ProcessGroup& group) {
  ExpectError(ErrorCode::kResourceExhausted, {"\"huge\"", "moe_fused_buffer_mb"}, [&] {
    group.MakeWindow({.name = "huge",
                      .bytes_per_rank = size_t{1} << 62,
                      .num_flags = 1,
                      .setting = "moe_fused_buffer_mb"},
                     Soon());
  });
  if (group.size() > 1) {
    ExpectError(ErrorCode::kInvalidArgument, {"\"uneven\"", "rank 0 asks for 100 bytes", "rank 1"},
                [&] {
                  group.MakeWindow({.name = "uneven",
                                    .bytes_per_rank = 100 + group.rank(),
                                    .num_flags = 1,
                                    .setting = "none"},
                                   Soon());
                });
  }
  // An abort ends the wait for a flag.
  auto copy = group.Duplicate("flags", Soon());
  auto window =
      copy->MakeWindow({.name = "w", .bytes_per_rank = 8, .num_flags = 1, .setting = ""}, Soon());
  group.Barrier(Soon());
  if (group.rank() == 0) copy->Abort("out of patience");
  ExpectError(ErrorCode::kUnavailable, {"rank 0 of group \"flags\" failed: out of patience"},
              [&] { window->Await(copy->rank(), 0, 1, Soon()); });
  group.Barrier(Soon());
}

void ManyGroupsComeAndGo(ProcessGroup& group) {
  for (size_t i = 0; i < 20; ++i) {
    auto copy = group.Duplicate("copy", Soon());
    auto window = copy->MakeWindow(
        {.name = "w", .bytes_per_rank = 4096, .num_flags = 1, .setting = ""}, Soon());
    std::vector<float> values(100, 1.0f);
    copy->AllReduceSum(values, Soon());
    EXPECT_EQ(values[99], static_cast<float>(group.size()));
  }
}

void ParallelGroupsAreMade(ProcessGroup& group) {
  const ParallelConfig config{.tp_size = group.size(), .moe_ep_size = group.size()};
  const ParallelGroups groups = MakeGroups(group, config, "model a", Soon());
  EXPECT_EQ(groups.tp().size(), group.size());
  EXPECT_EQ(groups.position().moe_ep, group.rank());
  EXPECT_EQ(groups.moe_ep().size(), group.size());
  // The same ranks, and yet not the same group.
  EXPECT_NE(&groups.moe_ep(), &groups.tp());
  groups.moe_ep().Abort("not of interest to TP");
  groups.tp().Barrier(Soon());
  EXPECT_EQ(groups.moe_tp().size(), 1u);
  EXPECT_EQ(&groups.moe_tp() == &groups.tp(), group.size() == 1);
}

void ParallelGroupsNeedTheSameConfig(ProcessGroup& group) {
  if (group.size() == 1) return;
  const bool odd_one = group.rank() == group.size() - 1;
  const ParallelConfig config{.tp_size = group.size(), .moe_ep_size = 1};
  const std::string odd = fmt::format("rank {} has", group.size() - 1);
  ExpectError(ErrorCode::kFailedPrecondition, {"version", "model a", odd, "model b"},
              [&] { MakeGroups(group, config, odd_one ? "model b" : "model a", Soon()); });
  // A config that is wrong on one rank only is told to all of them as well.
  ParallelConfig other = config;
  if (odd_one) other.moe_ep_size = 0;
  ExpectError(ErrorCode::kFailedPrecondition, {"moe_ep_size 1", odd, "moe_ep_size 0"},
              [&] { MakeGroups(group, other, "model a", Soon()); });
  ParallelConfig wrong = config;
  wrong.moe_dp_size = group.size() + 1;
  ExpectError(ErrorCode::kInvalidArgument, {"moe_dp_size", "tp_size"},
              [&] { MakeGroups(group, wrong, "model a", Soon()); });
  MakeGroups(group, config, "model a", Soon());
}

constexpr GroupCase kCases[] = {
    {"KnowsItsRanks", KnowsItsRanks},
    {"Gathers", Gathers},
    {"ExchangesCounts", ExchangesCounts},
    {"ExchangesUnevenRows", ExchangesUnevenRows},
    {"ExchangesRandomRows", ExchangesRandomRows},
    {"LeavesGapsAlone", LeavesGapsAlone},
    {"MovesLargeMessages", MovesLargeMessages},
    {"WaitsInAnyOrder", WaitsInAnyOrder},
    {"GathersRows", GathersRows},
    {"SumsInRankOrder", SumsInRankOrder},
    {"ReducesRowsToTheirOwners", ReducesRowsToTheirOwners},
    {"SplitsByColorAndKey", SplitsByColorAndKey},
    {"NamesALateRank", NamesALateRank},
    {"AnExchangeOutlivesADeadline", AnExchangeOutlivesADeadline},
    {"AnAbandonedExchangeEndsTheGroup", AnAbandonedExchangeEndsTheGroup},
    {"AbortReachesWaitingRanks", AbortReachesWaitingRanks},
    {"RanksAgreeOnErrors", RanksAgreeOnErrors},
    {"RefusesSizesThatDoNotFit", RefusesSizesThatDoNotFit},
    {"WindowsCarryRowsAndFlags", WindowsCarryRowsAndFlags},
    {"WindowsKeepToTheNode", WindowsKeepToTheNode},
    {"WindowsFailTogether", WindowsFailTogether},
    {"ManyGroupsComeAndGo", ManyGroupsComeAndGo},
    {"ParallelGroupsAreMade", ParallelGroupsAreMade},
    {"ParallelGroupsNeedTheSameConfig", ParallelGroupsNeedTheSameConfig},
};

}  // namespace

std::span<const GroupCase> GroupCases() { return kCases; }

}  // namespace switchyard::testing
