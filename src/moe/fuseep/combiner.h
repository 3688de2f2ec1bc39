// The last part of a step: rows that came home to rows of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moe/fuseep/sender.h"
#include "moe/fuseep/window.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe::fuseep {

// Sums each token as soon as all its rows are home.
class Combiner {
 public:
  // Shapes: out [T, H]. What `sender` is to send must be sent before the first Advance.
  Combiner(ExecContext& context, Window& window, const Sender& sender, const TopKOutput& topk,
           const MoeRunnerConfig& config, Rows out);

  // Whether there was something to sum. Errors: kUnavailable if a rank has failed.
  bool Advance();
  // Whether a rank has posted something that Advance has not looked at.
  bool HasNews() const;
  // Whether all tokens are summed, and all ranks are through with what this one sent.
  bool finished() const { return num_summed_ == out_.rows && num_done_ == is_done_.size(); }
  // The ranks that are not.
  std::vector<size_t> Late() const;

 private:
  // Tokens whose last rows are home.
  size_t FindReady();
  // out[t] = sum over k, in order, of weight[t, k] * factor * row of (t, k).
  void Sum(size_t token) const;

  ExecContext& context_;
  Window& window_;
  const Sender& sender_;
  const TopKOutput& topk_;
  const bool weighted_;
  const float factor_;
  const Rows out_;
  std::span<bool> is_done_;       // [R]
  std::span<uint32_t> missing_;   // [T] ranks that have not sent all rows of the token
  std::span<uint32_t> ready_;     // tokens to sum
  std::span<const float*> rows_;  // [T * K] rows that make up a token, side by side
  std::span<float> weights_;      // [T * K] of rows_
  bool is_first_ = true;
  size_t num_done_ = 0;
  size_t num_summed_ = 0;
};

}  // namespace switchyard::moe::fuseep
