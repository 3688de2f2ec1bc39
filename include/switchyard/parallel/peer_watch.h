// Whether the processes of other ranks are alive, asked of the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard {

// Watches the processes of a group's ranks that run on this host. Cheap enough to ask while
// waiting: a process that ends is seen within the call after it. A process that is stopped
// (SIGSTOP, a debugger, a frozen container) counts as dead once it has been so for kStoppedLimit.
//
// Ranks on other hosts, in another PID namespace, or in this process are never seen as dead.
class PeerWatch {
 public:
  static constexpr double kStoppedLimit = 2.0;  // seconds

  // Collective.
  PeerWatch(ProcessGroup& group, const Deadline& deadline);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // Whether the process of `rank` has ended, or has been stopped for long. Once true it stays so: a
  // stopped process that another rank has fenced is neither, until it is gone.
  bool IsDead(size_t rank);
  // "process 4711 has ended", "process 4711 is stopped", for messages.
  std::string Describe(size_t rank) const;
  // Makes sure that a rank that is given up never writes into shared memory again: kills it.
  // Harmless for ranks that are not watched.
  void Fence(size_t rank);

 private:
  struct Peer {
    int pid = 0;  // 0: not watched
    int handle = -1;
    bool has_ended = false;
    double stopped_since = -1;  // seconds of the steady clock; -1 = it runs
    double looked_at = -1;
    bool is_dead = false;
  };
  bool HasEnded(Peer& peer) const;
  bool IsStopped(Peer& peer) const;

  std::vector<Peer> peers_;  // [size]
};

}  // namespace switchyard
