// Generation for several requests at once: queue, prefill in chunks, decode in one batch, sampling,
// stopping. Token ids only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/engine/executor.h"
#include "switchyard/engine/sampler.h"

namespace switchyard {

using RequestId = uint64_t;

// What to answer and how.
struct GenerationRequest {
  std::vector<int32_t> prompt;  // at least one token
  size_t max_new_tokens = 0;    // 0 = compute nothing and finish with kLength
  SamplingOptions sampling;
  std::vector<int32_t>
      stop_ids;  // any of them ends the answer; it is reported, with finish reason kStop
};

// Why an answer ended: its own limit, the end of the context, a stop id, Cancel, or an error.
enum class FinishReason { kNone, kLength, kContext, kStop, kCancelled, kError };
// "length", "context", "stop", "cancelled", "error" or "none".
std::string_view FinishReasonName(FinishReason reason);

// One new token of a request, or its end without one (token = -1: cancelled, failed, or nothing was
// asked for).
struct TokenEvent {
  RequestId request = 0;
  int32_t token = -1;
  FinishReason finish = FinishReason::kNone;
  std::shared_ptr<const Error> error = nullptr;  // of finish reason kError
};

// How passes are filled.
struct EngineOptions {
  size_t prefill_chunk = 512;  // most prompt tokens of one pass, over all requests
  size_t max_sequences = 1;    // requests that run at once; more wait in order
};

// A request's answer is the same bits whatever else runs. Not thread-safe.
class Engine {
 public:
  Engine(Executor& executor, const EngineOptions& options);

  // Errors: kInvalidArgument for an empty prompt, one that leaves no room in the context (names
  //   both counts), or bad sampling options.
  RequestId Submit(GenerationRequest request);

  // Stops a request; its end is reported by the next Step. Unknown or finished ids are ignored.
  void Cancel(RequestId request);

  bool HasWork() const { return !running_.empty() || !waiting_.empty() || !ended_.empty(); }

  // One forward pass: every answer grows by a token, and waiting prompts advance by a chunk.
  // Returns what happened. An error ends the requests that it concerns (kError), not the engine.
  std::vector<TokenEvent> Step();

  size_t num_running() const { return running_.size(); }
  size_t num_waiting() const { return waiting_.size(); }

 private:
  struct Active {
    RequestId id;
    GenerationRequest request;
    Sampler sampler;
    SequenceId sequence = 0;
    size_t prefilled = 0;          // prompt tokens in the cache
    std::vector<int32_t> history;  // prompt and answer
    bool cancelled = false;

    size_t num_new() const { return history.size() - request.prompt.size(); }
  };
  void Admit();
  void Sweep(std::vector<TokenEvent>& events);
  TokenEvent Accept(Active& active, std::span<const float> logits);

  Executor& executor_;
  EngineOptions options_;
  std::deque<Active> waiting_;
  std::deque<Active> running_;
  std::vector<TokenEvent> ended_;  // ends without a pass
  RequestId next_id_ = 1;
};

}  // namespace switchyard
