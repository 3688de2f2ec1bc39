#include "switchyard/engine/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

void Require(bool good, std::string_view name, double value, std::string_view range) {
  if (!good) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} must be {}, found {}", name, range, value));
  }
}

int32_t LargestLogit(std::span<const float> logits) {
  size_t best = logits.size();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i]) && (best == logits.size() || logits[i] > logits[best])) best = i;
  }
  if (best == logits.size()) {
    throw Error(ErrorCode::kCorruptData,
                "the model produced no number among its logits, only NaN; `switchyard inspect "
                "--verify` looks for bad weights");
  }
  return static_cast<int32_t>(best);
}

}  // namespace

void ValidateSampling(const SamplingOptions& options) {
  Require(options.temperature >= 0 && options.temperature <= 100, "temperature",
          options.temperature, "0 to 100");
  Require(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "above 0 and at most 1");
  Require(options.min_p >= 0 && options.min_p < 1, "min_p", options.min_p,
          "at least 0 and below 1");
  Require(options.repeat_penalty > 0 && options.repeat_penalty <= 100, "repeat_penalty",
          options.repeat_penalty, "above 0 and at most 100");
  Require(std::abs(options.presence_penalty) <= 100, "presence_penalty", options.presence_penalty,
          "-100 to 100");
  Require(std::abs(options.frequency_penalty) <= 100, "frequency_penalty",
          options.frequency_penalty, "-100 to 100");
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {
  ValidateSampling(options);
}

double Sampler::NextUniform() {
  // Our own mapping to [0, 1): the standard distributions differ between libraries.
  return static_cast<double>(random_() >> 11) * 0x1p-53;
}

void Sampler::ApplyPenalties(std::span<float> logits, std::span<const int32_t> history) const {
  std::unordered_map<int32_t, size_t> counts;
  for (int32_t id : history) ++counts[id];
  for (const auto& [id, count] : counts) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) continue;
    float& logit = logits[static_cast<size_t>(id)];
    const auto penalty = static_cast<float>(options_.repeat_penalty);
    logit = logit > 0 ? logit / penalty : logit * penalty;
    logit -= static_cast<float>(options_.presence_penalty +
                                options_.frequency_penalty * static_cast<double>(count));
  }
}

int32_t Sampler::Sample(std::span<const float> logits, std::span<const int32_t> history) {
  const bool penalties = options_.repeat_penalty != 1.0 || options_.presence_penalty != 0.0 ||
                         options_.frequency_penalty != 0.0;
  std::span<const float> adjusted = logits;
  if (penalties) {
    logits_.assign(logits.begin(), logits.end());
    ApplyPenalties(logits_, history);
    adjusted = logits_;
  }
  const int32_t largest = LargestLogit(adjusted);
  if (options_.temperature == 0.0) return largest;
  candidates_.clear();
  for (size_t i = 0; i < adjusted.size(); ++i) {
    if (!std::isnan(adjusted[i])) candidates_.push_back({adjusted[i], static_cast<int32_t>(i)});
  }
  return Draw();
}

// Candidates are sorted only as far as they are looked at: few of a vocabulary reach top_p, and a
// draw rarely goes beyond the most likely ones.
int32_t Sampler::Draw() {
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  size_t sorted = 0;
  const auto sort_first = [&](size_t count) {
    while (sorted < count) {
      const size_t end = std::min(candidates_.size(), std::max<size_t>(64, 4 * sorted));
      const auto from = candidates_.begin() + static_cast<std::ptrdiff_t>(sorted);
      const auto to = candidates_.begin() + static_cast<std::ptrdiff_t>(end);
      if (to != candidates_.end()) std::nth_element(from, to, candidates_.end(), more_likely);
      std::sort(from, to, more_likely);
      sorted = end;
    }
  };
  if (options_.top_k != 0 && options_.top_k < candidates_.size()) {
    const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(options_.top_k);
    std::partial_sort(candidates_.begin(), end, candidates_.end(), more_likely);
    candidates_.erase(end, candidates_.end());
    sorted = candidates_.size();
  }
  const double max = std::min_element(candidates_.begin(), candidates_.end(), more_likely)->logit;
  const auto weight_of = [&](const Candidate& candidate) {
    if (std::isinf(max)) return candidate.logit == max ? 1.0 : 0.0;
    return std::exp((candidate.logit - max) / options_.temperature);
  };
  double sum = 0;
  for (const Candidate& candidate : candidates_) sum += weight_of(candidate);
  size_t keep = candidates_.size();
  if (options_.top_p < 1.0 || options_.min_p > 0.0) {
    const double enough = options_.top_p * sum;
    sum = 0;
    // The most likely candidate always stays.
    for (keep = 0; keep < candidates_.size(); ++keep) {
      sort_first(keep + 1);
      const double weight = weight_of(candidates_[keep]);
      if (keep != 0 && !(sum < enough && weight >= options_.min_p)) break;
      sum += weight;
    }
  }
  double target = NextUniform() * sum;
  for (size_t i = 0; i < keep; ++i) {
    sort_first(i + 1);
    target -= weight_of(candidates_[i]);
    if (target < 0) return candidates_[i].id;
  }
  return candidates_[keep - 1].id;
}

}  // namespace switchyard
