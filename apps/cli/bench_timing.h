// Steps that all ranks do together, timed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard::cli {

// Of the repeats of one step, in microseconds: of the slowest rank in each.
struct Times {
  std::vector<double> us;

  double Quantile(double share) const;
  double Median() const { return Quantile(0.5); }
};
// The median over repeats of a / b: what they were in the same moments.
double MedianRatio(const Times& a, const Times& b);

// Times steps on the ranks of a group. Collective.
class Stopwatch {
 public:
  // `repeats` of each step at least, and up to so many times more while that takes no longer than
  // kBudget.
  Stopwatch(ProcessGroup& group, size_t repeats);

  // Several steps in turn, so that whatever else the machine does falls on all of them alike.
  std::vector<Times> Compare(std::span<const std::function<void()>> steps);
  // One step; `before` is done, untimed, before each repeat, on all ranks.
  Times Measure(const std::function<void()>& before, const std::function<void()>& step);

  // Returns when every rank has called it. Inside a node by flags, so that ranks leave it within a
  // fraction of a microsecond of each other.
  void Barrier();

 private:
  static constexpr double kBudget = 0.25;  // seconds
  static constexpr size_t kMostTimes = 10;

  // Seconds of this rank.
  double Time(const std::function<void()>& step);
  // The slowest rank's.
  void TakeSlowest(Times& times);

  ProcessGroup& group_;
  const size_t repeats_;
  std::unique_ptr<SharedWindow> window_;  // null across nodes
  uint32_t epoch_ = 0;
};

}  // namespace switchyard::cli
