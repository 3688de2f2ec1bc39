#include "parallel/backoff.h"

#include <hwy/cache_control.h>
#include <thread>

namespace switchyard::parallel {
namespace {

// A message inside a node takes a few microseconds, as these pauses do.
constexpr int kSpins = 200;
constexpr std::chrono::microseconds kTick{100};
// A rank that is this late computes or reads a file; nothing is lost by a short sleep. Before that,
// sleeping would slow down transfers that need both sides to make calls.
constexpr std::chrono::milliseconds kSleepAfter{100};
constexpr std::chrono::microseconds kSleep{100};

}  // namespace

bool Backoff::Pause() {
  if (spins_ < kSpins) {
    ++spins_;
    hwy::Pause();
    return false;
  }
  if (waited() < kSleepAfter) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
  last_ = Clock::now();
  if (last_ < next_tick_) return false;
  next_tick_ = last_ + kTick;
  return true;
}

}  // namespace switchyard::parallel
