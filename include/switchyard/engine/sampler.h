// Logits to one token id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace switchyard {

// Applied in this order: penalties, temperature, top-k, top-p, min-p.
struct SamplingOptions {
  double temperature =
      0.0;             // 0 = greedy: the largest logit, ties to the lower id; else 0 < t <= 100
  size_t top_k = 0;    // keep the k most likely; 0 = all
  double top_p = 1.0;  // keep the most likely until their sum reaches p; (0, 1]
  double min_p = 0.0;  // drop what is less likely than min_p times the most likely; [0, 1)
  double repeat_penalty = 1.0;     // of tokens that occurred: positive logits are divided by it,
                                   // negative ones multiplied; > 0
  double presence_penalty = 0.0;   // subtracted once from tokens that occurred
  double frequency_penalty = 0.0;  // subtracted for each occurrence
  uint64_t seed = 0;
};

// Errors: kInvalidArgument naming the option, its value and its range.
void ValidateSampling(const SamplingOptions& options);

// The random state of one sequence; two with one seed draw the same numbers, whatever else the
// process does.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);

  // Shapes: logits [V]; history: the ids so far, prompt included, for the penalties.
  // Errors: kCorruptData if no logit is a number.
  int32_t Sample(std::span<const float> logits, std::span<const int32_t> history);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  void ApplyPenalties(std::span<float> logits, std::span<const int32_t> history) const;
  int32_t Draw();
  double NextUniform();

  SamplingOptions options_;
  std::mt19937_64 random_;
  // Reused by every call.
  std::vector<float> logits_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

}  // namespace switchyard
