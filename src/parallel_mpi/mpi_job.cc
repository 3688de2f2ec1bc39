#include "parallel_mpi/mpi_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "parallel/backoff.h"
#include "switchyard/core/error.h"

namespace switchyard::parallel_mpi {
namespace {

enum Tag : int { kAbort = 1, kArrived = 2, kFarewell = 3 };

// News have to be small enough to be sent before their receiver looks.
constexpr size_t kMostText = 2000;
constexpr std::chrono::seconds kFarewellLimit{3};
// A rank that has left the program while others wait for it: this long, because it may only have
// been faster to end a collective than they are.
constexpr std::chrono::seconds kLeftLimit{1};

template <typename T>
std::span<const std::byte> BytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <typename T>
T ValueOf(std::span<const std::byte> bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), std::min(sizeof(T), bytes.size()));
  return value;
}

// The node of every rank: ranks that share memory, in blocks of fake_node_size if that is not 0.
std::vector<size_t> FindNodes(size_t ranks, size_t fake_node_size) {
  MPI_Comm node = MPI_COMM_NULL;
  CheckMpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node),
           "MPI_Comm_split_type", "start");
  int world_rank = 0, node_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_rank(node, &node_rank);
  // A node is named by its first rank and the number of the block on it.
  std::array<int, 2> mine{world_rank, 0};
  CheckMpi(MPI_Bcast(mine.data(), 1, MPI_INT, 0, node), "MPI_Bcast", "start");
  if (fake_node_size != 0)
    mine[1] = static_cast<int>(static_cast<size_t>(node_rank) / fake_node_size);
  std::vector<std::array<int, 2>> names(ranks);
  CheckMpi(MPI_Allgather(mine.data(), 2, MPI_INT, names.data(), 2, MPI_INT, MPI_COMM_WORLD),
           "MPI_Allgather", "start");
  CheckMpi(MPI_Comm_free(&node), "MPI_Comm_free", "start");

  std::vector<std::array<int, 2>> seen;
  std::vector<size_t> nodes;
  for (const auto& name : names) {
    const auto found = std::ranges::find(seen, name);
    nodes.push_back(static_cast<size_t>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(name);
  }
  return nodes;
}

}  // namespace

std::string MpiErrorText(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS)
    return fmt::format("MPI error {}", code);
  return std::string(text.data(), static_cast<size_t>(length));
}

bool SaysProcessFailed(int code) {
#ifdef MPI_ERR_PROC_FAILED
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  return error_class == MPI_ERR_PROC_FAILED || error_class == MPI_ERR_PROC_FAILED_PENDING;
#else
  static_cast<void>(code);
  return false;
#endif
}

void CheckMpi(int code, std::string_view call, std::string_view where) {
  if (code == MPI_SUCCESS) return;
  throw Error(ErrorCode::kUnavailable, fmt::format("{}: {}: {}", where, call, MpiErrorText(code)));
}

MpiJob::MpiJob(size_t fake_node_size) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  rank_ = static_cast<size_t>(rank);
  CheckMpi(MPI_Comm_dup(MPI_COMM_WORLD, &news_), "MPI_Comm_dup", "start");
  MPI_Comm_set_errhandler(news_, MPI_ERRORS_RETURN);
  nodes_ = FindNodes(static_cast<size_t>(size), fake_node_size);
  farewells_.resize(nodes_.size());
  left_at_.resize(nodes_.size());
  lost_.resize(nodes_.size());
}

void MpiJob::Close() {
  // A message that its receiver never took still needs the communicator.
  if (sent_.empty()) MPI_Comm_free(&news_);
}

void MpiJob::Send(int tag, size_t to, uint64_t group, std::span<const std::byte> text) {
  auto bytes = std::make_unique<std::vector<std::byte>>(sizeof(group) + text.size());
  std::memcpy(bytes->data(), &group, sizeof(group));
  if (!text.empty()) std::memcpy(bytes->data() + sizeof(group), text.data(), text.size());
  Sent sent{.request = MPI_REQUEST_NULL, .bytes = std::move(bytes)};
  const int code = MPI_Isend(sent.bytes->data(), static_cast<int>(sent.bytes->size()), MPI_BYTE,
                             static_cast<int>(to), tag, news_, &sent.request);
  if (SaysProcessFailed(code)) return;
  CheckMpi(code, "MPI_Isend", "news between ranks");
  sent_.push_back(std::move(sent));
}

void MpiJob::SendAll(int tag, std::span<const size_t> to, uint64_t group,
                     std::span<const std::byte> text) {
  for (size_t rank : to) {
    if (rank != rank_ && !lost_[rank]) Send(tag, rank, group, text);
  }
  DropSent();
}

void MpiJob::DropSent() {
  std::erase_if(sent_, [](Sent& sent) {
    int done = 0;
    const int code = MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE);
    if (SaysProcessFailed(code)) return true;
    CheckMpi(code, "MPI_Test", "news between ranks");
    return done != 0;
  });
}

bool MpiJob::Probe(MPI_Status& status) {
  // False if it says that a process has died.
  int there = 0;
  const auto probe = [&](int from) {
    const int code = MPI_Iprobe(from, MPI_ANY_TAG, news_, &there, &status);
    if (SaysProcessFailed(code)) return false;
    CheckMpi(code, "MPI_Iprobe", "news between ranks");
    return true;
  };
  if (!probe_each_) {
    if (probe(MPI_ANY_SOURCE)) return there != 0;
    probe_each_ = true;
  }
  // After a death there is no asking for news from any rank, only from each of the living.
  for (size_t rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || lost_[rank]) continue;
    if (!probe(static_cast<int>(rank))) {
      lost_[rank] = true;
    } else if (there != 0) {
      return true;
    }
  }
  return false;
}

void MpiJob::Poll() {
  std::array<std::byte, sizeof(uint64_t) + kMostText> buffer;
  MPI_Status status;
  while (Probe(status)) {
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    CheckMpi(MPI_Recv(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, status.MPI_SOURCE,
                      status.MPI_TAG, news_, MPI_STATUS_IGNORE),
             "MPI_Recv", "news between ranks");
    Receive(status.MPI_TAG, static_cast<size_t>(status.MPI_SOURCE),
            std::span(buffer).first(static_cast<size_t>(bytes)));
  }
  DropSent();
}

void MpiJob::Receive(int tag, size_t from, std::span<const std::byte> bytes) {
  const auto group = ValueOf<uint64_t>(bytes);
  const auto content = bytes.subspan(sizeof(group));
  if (tag == kAbort) {
    AddFailure(group, {reinterpret_cast<const char*>(content.data()), content.size()});
  } else if (tag == kArrived) {
    uint64_t& number = arrived_[{group, from}];
    number = std::max(number, ValueOf<uint64_t>(content));
  } else {
    farewells_[from] = ValueOf<int>(content);
    left_at_[from] = parallel::Backoff::Clock::now();
  }
}

void MpiJob::AddFailure(uint64_t group, std::string reason) {
  failures_.try_emplace(group, std::move(reason));
}

void MpiJob::Abort(uint64_t group, std::span<const size_t> members, std::string reason) {
  if (failures_.contains(group)) return;
  reason.resize(std::min(reason.size(), kMostText));
  SendAll(kAbort, members, group, std::as_bytes(std::span(reason)));
  AddFailure(group, std::move(reason));
}

std::optional<std::string> MpiJob::Failure(uint64_t group) const {
  const auto found = failures_.find(group);
  if (found == failures_.end()) return std::nullopt;
  return found->second;
}

void MpiJob::TellArrived(uint64_t group, std::span<const size_t> members, uint64_t number) {
  SendAll(kArrived, members, group, BytesOf(number));
}

uint64_t MpiJob::Arrived(uint64_t group, size_t world_rank) const {
  const auto found = arrived_.find({group, world_rank});
  return found == arrived_.end() ? 0 : found->second;
}

void MpiJob::Forget(uint64_t group) {
  arrived_.erase(arrived_.lower_bound({group, 0}), arrived_.upper_bound({group, SIZE_MAX}));
}

std::optional<std::string> MpiJob::HasLeft(std::span<const size_t> members) const {
  for (size_t rank : members) {
    if (rank == rank_ || !farewells_[rank] || lost_[rank]) continue;
    if (parallel::Backoff::Clock::now() - left_at_[rank] < kLeftLimit) continue;
    return fmt::format("rank {} has ended the program with status {}", rank, *farewells_[rank]);
  }
  return std::nullopt;
}

std::optional<int> MpiJob::Farewell(int status) {
  std::vector<size_t> all(size());
  std::iota(all.begin(), all.end(), size_t{0});
  SendAll(kFarewell, all, 0, BytesOf(status));
  farewells_[rank_] = status;

  const auto highest = [&] {
    int value = 0;
    for (const auto& farewell : farewells_) value = std::max(value, farewell.value_or(0));
    return value;
  };
  parallel::Backoff backoff;
  std::optional<parallel::Backoff::Clock::time_point> failed_at;
  const auto all_said = [&] {
    for (size_t rank = 0; rank < size(); ++rank) {
      if (!farewells_[rank].has_value() && !lost_[rank]) return false;
    }
    return sent_.empty() || has_lost();
  };
  while (!all_said()) {
    Poll();
    backoff.Pause();
    // A rank that is well may take its time; once one has failed, the others are about to.
    if (highest() == 0) continue;
    const auto now = parallel::Backoff::Clock::now();
    if (!failed_at) failed_at = now;
    if (now - *failed_at > kFarewellLimit) return std::nullopt;
  }
  return highest();
}

void MpiJob::Keep(std::unique_ptr<parallel::Operation::CarrierState> state,
                  std::shared_ptr<const void> owner) {
  kept_.emplace_back(std::move(state), std::move(owner));
}

}  // namespace switchyard::parallel_mpi
