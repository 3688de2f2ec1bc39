#include "bench_timing.h"

#include <algorithm>
#include <chrono>

namespace switchyard::cli {
namespace {

Deadline Limit() { return Deadline::After(std::chrono::minutes(2), "bench"); }

}  // namespace

double Times::Quantile(double share) const {
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

double MedianRatio(const Times& a, const Times& b) {
  Times ratios;
  for (size_t i = 0; i < a.us.size(); ++i) ratios.us.push_back(a.us[i] / b.us[i]);
  return ratios.Median();
}

Stopwatch::Stopwatch(ProcessGroup& group, size_t repeats) : group_(group), repeats_(repeats) {
  if (group.node_peers().size() != group.size()) return;
  window_ = group.MakeWindow(
      {.name = "bench barrier", .bytes_per_rank = 64, .num_flags = 1, .setting = "--ep"}, Limit());
}

void Stopwatch::Barrier() {
  if (window_ == nullptr) return group_.Barrier(Limit());
  ++epoch_;
  for (size_t rank = 0; rank < group_.size(); ++rank) window_->Post(rank, 0, {epoch_, 0});
  for (size_t rank = 0; rank < group_.size(); ++rank) window_->Await(rank, 0, epoch_, Limit());
}

double Stopwatch::Time(const std::function<void()>& step) {
  using Clock = std::chrono::steady_clock;
  Barrier();
  const Clock::time_point start = Clock::now();
  step();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void Stopwatch::TakeSlowest(Times& times) {
  std::vector<double> all(times.us.size() * group_.size());
  group_.AllGather(std::as_bytes(std::span(times.us)), std::as_writable_bytes(std::span(all)),
                   Limit());
  for (size_t i = 0; i < all.size(); ++i)
    times.us[i % times.us.size()] = std::max(times.us[i % times.us.size()], all[i]);
}

std::vector<Times> Stopwatch::Compare(std::span<const std::function<void()>> steps) {
  // Twice before anything counts: buffers grow in the first, and merge in the second.
  double seconds = 0;
  for (size_t warm = 0; warm < 2; ++warm) {
    seconds = 0;
    for (const auto& step : steps) seconds += Time(step);
  }
  const double round = AllGatherValue(group_, seconds, Limit())[0];
  const auto affordable = static_cast<size_t>(kBudget / std::max(round, 1e-7));
  const size_t rounds = std::clamp(affordable, repeats_, repeats_ * kMostTimes);
  std::vector<Times> times(steps.size());
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t s = 0; s < steps.size(); ++s) times[s].us.push_back(1e6 * Time(steps[s]));
  }
  for (Times& of_step : times) TakeSlowest(of_step);
  return times;
}

Times Stopwatch::Measure(const std::function<void()>& before, const std::function<void()>& step) {
  Times times;
  for (size_t i = 0; i <= repeats_; ++i) {
    before();
    const double us = 1e6 * Time(step);
    if (i != 0) times.us.push_back(us);
  }
  TakeSlowest(times);
  return times;
}

}  // namespace switchyard::cli
