#include "switchyard/parallel/peer_watch.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace switchyard {
namespace {

// Where a PID means the same process: the host's name and its PID namespace.
struct Place {
  int64_t pid = 0;
  uint64_t pid_namespace = 0;
  std::array<char, 64> host{};
};

Place MyPlace() {
  Place place;
  place.pid = getpid();
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) == 0) place.pid_namespace = info.st_ino;
  gethostname(place.host.data(), place.host.size() - 1);
  return place;
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The letter of /proc/PID/stat: R, S, D, T, Z, …; 0 if there is none.
char StateOf(int pid) {
  std::FILE* file = std::fopen(fmt::format("/proc/{}/stat", pid).c_str(), "rb");
  if (file == nullptr) return 0;
  std::array<char, 512> text{};
  const size_t size = std::fread(text.data(), 1, text.size() - 1, file);
  std::fclose(file);
  const std::string_view stat(text.data(), size);
  // The name in parentheses may hold anything, parentheses too.
  const size_t end = stat.rfind(')');
  return end != std::string_view::npos && end + 2 < size ? stat[end + 2] : '\0';
}

}  // namespace

PeerWatch::PeerWatch(ProcessGroup& group, const Deadline& deadline) : peers_(group.size()) {
  const Place mine = MyPlace();
  const std::vector<Place> all = AllGatherValue(group, mine, deadline);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Place& place = all[rank];
    if (place.pid == mine.pid || place.pid_namespace != mine.pid_namespace ||
        place.host != mine.host)
      continue;
    peers_[rank].pid = static_cast<int>(place.pid);
#ifdef SYS_pidfd_open
    peers_[rank].handle = static_cast<int>(syscall(SYS_pidfd_open, peers_[rank].pid, 0));
#endif
  }
}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) {
    if (peer.handle >= 0) close(peer.handle);
  }
}

bool PeerWatch::HasEnded(Peer& peer) const {
  if (peer.has_ended) return true;
  if (peer.handle >= 0) {
    pollfd look{peer.handle, POLLIN, 0};
    peer.has_ended = poll(&look, 1, 0) > 0;
  } else {
    // A kernel without handles of processes; a dead child whose parent has not looked is a zombie.
    peer.has_ended = (kill(peer.pid, 0) != 0 && errno == ESRCH) || StateOf(peer.pid) == 'Z';
  }
  return peer.has_ended;
}

// Reading /proc takes a few microseconds, so only ten times a second.
bool PeerWatch::IsStopped(Peer& peer) const {
  constexpr double kLookEvery = 0.1;
  const double now = Now();
  if (now - peer.looked_at >= kLookEvery) {
    peer.looked_at = now;
    const char state = StateOf(peer.pid);
    const bool stopped = state == 'T' || state == 't';
    if (!stopped) {
      peer.stopped_since = -1;
    } else if (peer.stopped_since < 0) {
      peer.stopped_since = now;
    }
  }
  return peer.stopped_since >= 0 && now - peer.stopped_since >= kStoppedLimit;
}

bool PeerWatch::IsDead(size_t rank) {
  Peer& peer = peers_.at(rank);
  if (peer.pid == 0) return false;
  peer.is_dead = peer.is_dead || HasEnded(peer) || IsStopped(peer);
  return peer.is_dead;
}

std::string PeerWatch::Describe(size_t rank) const {
  const Peer& peer = peers_.at(rank);
  if (peer.pid == 0) return "its process cannot be seen from here";
  return fmt::format("process {} {}", peer.pid,
                     peer.has_ended            ? "has ended"
                     : peer.stopped_since >= 0 ? "is stopped"
                                               : "runs");
}

void PeerWatch::Fence(size_t rank) {
  Peer& peer = peers_.at(rank);
  if (peer.pid == 0 || HasEnded(peer)) return;
#ifdef SYS_pidfd_send_signal
  if (peer.handle >= 0) {
    syscall(SYS_pidfd_send_signal, peer.handle, SIGKILL, nullptr, 0);
    return;
  }
#endif
  kill(peer.pid, SIGKILL);
}

}  // namespace switchyard
