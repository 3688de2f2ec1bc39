#include "switchyard/engine/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

constexpr size_t kDefaultWindow = 2048;

// -ln softmax(logits)[id], in f64.
double NegativeLogProbability(std::span<const float> logits, int32_t id) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return std::log(sum) + max - static_cast<double>(logits[static_cast<size_t>(id)]);
}

// Sum of -ln p of tokens [first_scored, window.size()) given those before them.
double ScoreWindow(Executor& executor, std::span<const int32_t> window, size_t first_scored,
                   size_t chunk) {
  double sum = 0;
  const SequenceId sequence = executor.Start(window.size());
  for (size_t at = 0; at < window.size();) {
    const size_t count = std::min(chunk, window.size() - at);
    const ExecutorChunk piece{sequence, window.subspan(at, count), LogitsWanted::kAll};
    const Rows logits = executor.Forward({&piece, 1});
    for (size_t i = 0; i < count; ++i) {
      const size_t target = at + i + 1;  // row i predicts the next token
      if (target < window.size() && target >= first_scored)
        sum += NegativeLogProbability(logits.RowSpan(i), window[target]);
    }
    at += count;
  }
  executor.End(sequence);
  return sum;
}

}  // namespace

PerplexityResult Perplexity(Executor& executor, std::span<const int32_t> ids,
                            const PerplexityOptions& options,
                            const std::function<void(size_t, size_t)>& progress) {
  PerplexityResult result;
  const size_t context = executor.context_length();
  result.window = options.window != 0 ? options.window : std::min(context, kDefaultWindow);
  result.stride = options.stride != 0 ? options.stride : result.window;
  result.num_tokens = ids.size();
  if (ids.size() < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("perplexity needs at least 2 tokens, the text has {}", ids.size()));
  }
  if (result.window < 2 || result.window > context) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the window must be 2 to {} tokens (the context), found {}", context,
                            result.window));
  }
  if (result.stride > result.window) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the stride must be at most the window ({}), found {}", result.window,
                            result.stride));
  }
  double sum = 0;
  size_t seen = 0;  // tokens that earlier windows held
  for (size_t begin = 0; begin < ids.size() && seen < ids.size(); begin += result.stride) {
    const size_t end = std::min(ids.size(), begin + result.window);
    const size_t first_scored = std::max<size_t>(1, seen > begin ? seen - begin : 0);
    if (end - begin > first_scored) {
      sum += ScoreWindow(executor, ids.subspan(begin, end - begin), first_scored, options.chunk);
      result.num_scored += end - begin - first_scored;
    }
    ++result.num_windows;
    seen = end;
    if (progress) progress(seen, ids.size());
  }
  result.mean_nll = sum / static_cast<double>(result.num_scored);
  if (std::isnan(result.mean_nll)) {
    throw Error(ErrorCode::kCorruptData,
                "the model produced NaN among its logits; `switchyard inspect --verify` looks for "
                "bad weights");
  }
  result.perplexity = std::exp(result.mean_nll);
  return result;
}

}  // namespace switchyard
