#include "switchyard/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"

namespace switchyard {

std::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone: return "none";
    case FinishReason::kLength: return "length";
    case FinishReason::kContext: return "context";
    case FinishReason::kStop: return "stop";
    case FinishReason::kCancelled: return "cancelled";
    case FinishReason::kError: return "error";
  }
  return "?";
}

Engine::Engine(Executor& executor, const EngineOptions& options)
    : executor_(executor), options_(options) {}

RequestId Engine::Submit(GenerationRequest request) {
  if (request.prompt.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the prompt is empty: at least one token is needed to start from");
  }
  if (request.prompt.size() >= executor_.context_length() + (request.max_new_tokens == 0 ? 1 : 0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the prompt has {} tokens and leaves no room for an answer in the context of {}",
            request.prompt.size(), executor_.context_length()));
  }
  const size_t vocab_size = executor_.model().config().vocab_size;
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || static_cast<size_t>(request.prompt[i]) >= vocab_size) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("token {} at position {} is outside the vocabulary of {} entries",
                              request.prompt[i], i, vocab_size));
    }
  }
  const RequestId id = next_id_++;
  Sampler sampler(request.sampling);
  if (request.max_new_tokens == 0) {
    ended_.push_back({id, -1, FinishReason::kLength});
    return id;
  }
  std::vector<int32_t> history = request.prompt;
  waiting_.push_back({id, std::move(request), std::move(sampler), 0, 0, std::move(history)});
  return id;
}

void Engine::Cancel(RequestId request) {
  for (std::deque<Active>* queue : {&running_, &waiting_}) {
    for (Active& active : *queue) {
      if (active.id == request) active.cancelled = true;
    }
  }
}

void Engine::Admit() {
  while (!waiting_.empty() && running_.size() < options_.max_sequences) {
    Active active = std::move(waiting_.front());
    waiting_.pop_front();
    const size_t room = executor_.context_length() - active.request.prompt.size();
    active.sequence = executor_.Start(active.request.prompt.size() +
                                      std::min(active.request.max_new_tokens, room));
    running_.push_back(std::move(active));
  }
}

// Drops cancelled requests and reports them.
void Engine::Sweep(std::vector<TokenEvent>& events) {
  events.insert(events.end(), ended_.begin(), ended_.end());
  ended_.clear();
  for (std::deque<Active>* queue : {&running_, &waiting_}) {
    for (auto it = queue->begin(); it != queue->end();) {
      if (!it->cancelled) {
        ++it;
        continue;
      }
      events.push_back({it->id, -1, FinishReason::kCancelled});
      if (it->sequence != 0) executor_.End(it->sequence);
      it = queue->erase(it);
    }
  }
}

TokenEvent Engine::Accept(Active& active, std::span<const float> logits) {
  TokenEvent event{active.id};
  try {
    event.token = active.sampler.Sample(logits, active.history);
  } catch (const Error& e) {
    event.finish = FinishReason::kError;
    event.error = std::make_shared<const Error>(e);
    return event;
  }
  active.history.push_back(event.token);
  const std::vector<int32_t>& stops = active.request.stop_ids;
  if (std::find(stops.begin(), stops.end(), event.token) != stops.end()) {
    event.finish = FinishReason::kStop;
  } else if (active.num_new() == active.request.max_new_tokens) {
    event.finish = FinishReason::kLength;
  } else if (active.history.size() >= executor_.context_length()) {
    event.finish = FinishReason::kContext;
  }
  return event;
}

std::vector<TokenEvent> Engine::Step() {
  std::vector<TokenEvent> events;
  Sweep(events);
  Admit();
  std::vector<ExecutorChunk> chunks;
  std::vector<Active*> owners;
  size_t prompt_room = options_.prefill_chunk;
  for (Active& active : running_) {
    const size_t prompt_left = active.request.prompt.size() - active.prefilled;
    const size_t count = prompt_left > 0 ? std::min(prompt_left, prompt_room) : 1;
    if (count == 0) continue;
    if (prompt_left > 0) prompt_room -= count;
    const bool samples = count >= prompt_left;
    const size_t begin = prompt_left > 0 ? active.prefilled : active.history.size() - 1;
    chunks.push_back({active.sequence, std::span(active.history).subspan(begin, count),
                      samples ? LogitsWanted::kLast : LogitsWanted::kNone});
    owners.push_back(&active);
  }
  if (chunks.empty()) return events;
  try {
    const Rows logits = executor_.Forward(chunks);
    size_t row = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      Active& active = *owners[i];
      if (active.prefilled < active.request.prompt.size()) {
        active.prefilled += chunks[i].tokens.size();
      }
      if (chunks[i].logits == LogitsWanted::kLast) {
        events.push_back(Accept(active, logits.RowSpan(row++)));
      }
    }
  } catch (const Error& e) {
    // The pass is lost for all that shared it; the engine itself goes on.
    for (const Active* active : owners) {
      events.push_back({active->id, -1, FinishReason::kError, std::make_shared<const Error>(e)});
    }
  }
  for (const TokenEvent& event : events) {
    if (event.finish == FinishReason::kNone) continue;
    const auto done = std::find_if(running_.begin(), running_.end(),
                                   [&](const Active& a) { return a.id == event.request; });
    if (done == running_.end()) continue;
    executor_.End(done->sequence);
    running_.erase(done);
  }
  return events;
}

}  // namespace switchyard
