#include "switchyard/moe/contract/dispatcher.h"

#include <fmt/format.h>

#include <atomic>

#include "switchyard/core/error.h"

namespace switchyard::moe {

uint64_t internal::NextHookId() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

template <typename Body>
decltype(auto) Dispatcher::RunStage(Stage from, Stage to, std::string_view stage_name,
                                    const Body& body) {
  if (stage_ != from) {
    constexpr std::string_view kNext[] = {"dispatch_a", "dispatch_b", "combine_a", "combine_b"};
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("layer {}: {} {} ({} dispatcher); {} is next", layer_id_, stage_name,
                            stage_ == Stage::kInitial ? "without an outstanding dispatch"
                            : from == Stage::kInitial ? "while another dispatch is outstanding"
                                                      : "out of turn",
                            name(), kNext[static_cast<size_t>(stage_)]));
  }
  try {
    stage_ = to;
    return body();
  } catch (...) {
    stage_ = from;
    // A dispatch that did not start is no dispatch, but its peers have to know.
    if (from == Stage::kInitial) Reset();
    throw;
  }
}

void Dispatcher::DispatchA(ExecContext& context, ConstRows hidden, const TopKOutput& topk) {
  RunStage(Stage::kInitial, Stage::kDispatching, "dispatch_a", [&] {
    TopKOutput routed = topk;
    pre_dispatch_.Call(context, hidden, routed);
    StartDispatch(context, hidden, routed);
  });
}

const DispatchOutput& Dispatcher::DispatchB(ExecContext& context) {
  return RunStage(Stage::kDispatching, Stage::kDispatched, "dispatch_b",
                  [&]() -> const DispatchOutput& {
                    const DispatchOutput* output = &FinishDispatch(context);
                    post_dispatch_.Call(context, output);
                    return *output;
                  });
}

void Dispatcher::CombineA(ExecContext& context, const CombineInput& input) {
  RunStage(Stage::kDispatched, Stage::kCombining, "combine_a", [&] {
    const CombineInput* answer = &input;
    pre_combine_.Call(context, answer);
    StartCombine(context, *answer);
  });
}

Rows Dispatcher::CombineB(ExecContext& context) {
  return RunStage(Stage::kCombining, Stage::kInitial, "combine_b", [&] {
    Rows rows = FinishCombine(context);
    post_combine_.Call(context, rows);
    return rows;
  });
}

const DispatchOutput& Dispatcher::Dispatch(ExecContext& context, ConstRows hidden,
                                           const TopKOutput& topk) {
  DispatchA(context, hidden, topk);
  RunStage(Stage::kDispatching, Stage::kDispatching, "the dispatch hooks",
           [&] { dispatch_.Call(context); });
  return DispatchB(context);
}

Rows Dispatcher::Combine(ExecContext& context, const CombineInput& input) {
  CombineA(context, input);
  return CombineB(context);
}

void Dispatcher::Abort() {
  if (stage_ == Stage::kInitial) return;
  stage_ = Stage::kInitial;
  Reset();
}

}  // namespace switchyard::moe
