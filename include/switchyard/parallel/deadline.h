// How long a call may wait for other ranks, and on whose behalf it waits.
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

namespace switchyard {

// A limit that runs from the moment it is made, so that one deadline can cover several waits.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `stage` is quoted by the error of a wait that runs out ("layer 3 dispatch"); its characters
  // have to live as long as the deadline.
  static Deadline After(std::chrono::milliseconds limit, std::string_view stage) {
    return Deadline(limit, stage);
  }
  static Deadline Never(std::string_view stage) { return Deadline(std::nullopt, stage); }

  bool Passed() const { return limit_ && Clock::now() - start_ >= *limit_; }
  // Nothing if the wait may take for ever.
  std::optional<std::chrono::milliseconds> limit() const { return limit_; }
  std::string_view stage() const { return stage_; }

 private:
  Deadline(std::optional<std::chrono::milliseconds> limit, std::string_view stage)
      : start_(Clock::now()), limit_(limit), stage_(stage) {}

  Clock::time_point start_;
  std::optional<std::chrono::milliseconds> limit_;
  std::string_view stage_;
};

}  // namespace switchyard
