// Perplexity of a token sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "switchyard/engine/executor.h"

namespace switchyard {

// How the text is cut. All sizes in tokens.
struct PerplexityOptions {
  size_t window = 0;   // tokens that are seen at once; 0 = the context, at most 2048
  size_t stride = 0;   // distance between windows; 0 = the window, so that windows do not overlap
  size_t chunk = 512;  // tokens of one pass
};

// The figures, with the sizes that were in force.
struct PerplexityResult {
  size_t window = 0;
  size_t stride = 0;
  size_t num_tokens = 0;
  size_t num_windows = 0;
  size_t num_scored = 0;
  double mean_nll = 0;  // nats per scored token
  double perplexity = 0;
};

// Cuts the ids into windows that start every `stride` tokens, the last one shorter, and runs each
// by itself from position 0. A token is scored once: in the first window that has it, unless it is
// that window's first token of all. perplexity = exp(mean of -ln p). `progress(done, all)` is
// called after each window with token counts, if given.
// Errors: kInvalidArgument for fewer than 2 tokens, a window below 2 or above the context, a stride
//   above the window.
PerplexityResult Perplexity(Executor& executor, std::span<const int32_t> ids,
                            const PerplexityOptions& options,
                            const std::function<void(size_t, size_t)>& progress = {});

}  // namespace switchyard
