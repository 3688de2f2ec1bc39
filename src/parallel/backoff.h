// How a rank waits: spinning first, then giving its core away, then sleeping.
#pragma once

#include <chrono>

namespace switchyard::parallel {

// Paces a loop that waits for other ranks. Ranks often share cores, so a spinning rank may well be
// what the awaited one waits for.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  // Passes a moment. True about every 0.1 ms: time to look at deadline and messages.
  bool Pause();
  Clock::duration waited() const { return last_ - start_; }

 private:
  int spins_ = 0;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  Clock::time_point next_tick_ = start_;
};

}  // namespace switchyard::parallel
