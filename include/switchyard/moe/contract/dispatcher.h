// The interface of all-to-all protocols. Contract 3.0.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe {

class ExpertParallel;  // moe/ep/expert_parallel.h

// What the quant method tells a dispatcher once the weights are loaded (contract 3.0, 3.1).
struct DispatcherQuantConfig {
  ActQuant output = {};            // how rows are quantised for the way; kNone = sent as they are
  DType plain = DType::kF32;       // with kNone: kF32, or kBF16 (rounded)
  bool decode_on_arrival = false;  // the runner does not take these codes: hand it f32 rows
  ActQuant combine = {};           // how results are quantised for the way back
  DType combine_plain = DType::kF32;  // with kNone: kF32, or kBF16 (rounded)
  bool gguf = false;  // matrices are split on their output axis: results are gathered, not summed
};

// Takes a hook out of its list. Removing twice, or after the dispatcher's end, is harmless.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(uint64_t id, std::function<void(uint64_t)> remove)
      : id_(id), remove_(std::move(remove)) {}
  // Unique in the process.
  uint64_t id() const { return id_; }
  void Remove() {
    if (remove_) remove_(id_);
  }

 private:
  uint64_t id_ = 0;
  std::function<void(uint64_t)> remove_;
};

// Functions of one signature, called in the order of their registration.
template <typename... Args>
class HookList {
 public:
  using Hook = std::function<void(Args...)>;

  HookHandle Register(Hook hook) {
    const uint64_t id = NextHookId();
    hooks_->emplace_back(id, std::move(hook));
    return HookHandle(id, [hooks = std::weak_ptr(hooks_)](uint64_t gone) {
      if (const auto list = hooks.lock())
        std::erase_if(*list, [gone](const auto& entry) { return entry.first == gone; });
    });
  }
  void Call(Args... args) const {
    for (const auto& [id, hook] : *hooks_) hook(args...);
  }

 private:
  static uint64_t NextHookId();
  std::shared_ptr<std::vector<std::pair<uint64_t, Hook>>> hooks_ =
      std::make_shared<std::vector<std::pair<uint64_t, Hook>>>();
};

namespace internal {
// 1, 2, 3, … in this process.
uint64_t NextHookId();
}  // namespace internal
template <typename... Args>
uint64_t HookList<Args...>::NextHookId() {
  return internal::NextHookId();
}

// Sends tokens to the ranks that own their experts, and their results back. One per layer, one
// dispatch outstanding:
//
//   initial -- DispatchA --> dispatching -- DispatchB --> dispatched
//           <-- CombineB -- combining   <-- CombineA --
//
// A stages start an exchange, B stages complete it; what does not need it runs between them. A
// stage that throws leaves the dispatch where it was; Abort gives it up.
//
// Errors of every stage: kFailedPrecondition naming layer, dispatcher and stage if it is not its
//   turn; kUnavailable naming the ranks if others do not answer in time or have given up.
class Dispatcher {
 public:
  explicit Dispatcher(size_t layer_id) : layer_id_(layer_id) {}
  virtual ~Dispatcher() = default;
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // The registered name, for messages.
  virtual std::string_view name() const = 0;

  // The layout that Dispatch returns and Combine takes.
  virtual DispatchFormat format() const = 0;

  // Whether SetQuantConfig takes rows of this kind; a layer asks before it wants them sent.
  virtual bool CanSend(ActQuantKind) const { return true; }

  // Takes effect with the next Dispatch. A dispatcher that moves nothing has nothing to quantise.
  // Collective where the dispatcher has to make buffers for it.
  // Errors: kUnsupported naming the kind that the dispatcher cannot send.
  virtual void SetQuantConfig(const DispatcherQuantConfig&) {}

  // Shapes: hidden [T, H]; topk ids and weights [T, K]; T may be 0. Both stay until DispatchB.
  void DispatchA(ExecContext& context, ConstRows hidden, const TopKOutput& topk);
  // The result lives in context.arena and refers to `hidden` and `topk` where nothing has to move.
  const DispatchOutput& DispatchB(ExecContext& context);
  // The rows of `input` stay until CombineB.
  // Errors: kInvalidArgument if the format or a promise differs from the dispatch.
  void CombineA(ExecContext& context, const CombineInput& input);
  // Shapes: returns [T, H], T as dispatched, in context.arena.
  Rows CombineB(ExecContext& context);

  // DispatchA, the dispatch hooks, DispatchB. Shapes: as DispatchA.
  const DispatchOutput& Dispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk);
  // CombineA, CombineB. Shapes: as CombineB.
  Rows Combine(ExecContext& context, const CombineInput& input);

  // Forgets an outstanding dispatch after an error between stages, and tells its peers; the layer
  // is usable again once all ranks have given up or finished. Harmless without one.
  void Abort();

  // Each may replace what it is given a reference or pointer to (contract 3.0).
  HookList<ExecContext&, ConstRows&, TopKOutput&>& pre_dispatch_hooks() { return pre_dispatch_; }
  HookList<ExecContext&>& dispatch_hooks() { return dispatch_; }
  HookList<ExecContext&, const DispatchOutput*&>& post_dispatch_hooks() { return post_dispatch_; }
  HookList<ExecContext&, const CombineInput*&>& pre_combine_hooks() { return pre_combine_; }
  HookList<ExecContext&, Rows&>& post_combine_hooks() { return post_combine_; }

 protected:
  // The stages themselves; called in turn only.
  virtual void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) = 0;
  virtual const DispatchOutput& FinishDispatch(ExecContext& context) = 0;
  virtual void StartCombine(ExecContext& context, const CombineInput& input) = 0;
  virtual Rows FinishCombine(ExecContext& context) = 0;
  // Gives up what is outstanding. Must not throw.
  virtual void Reset() noexcept = 0;

  size_t layer_id() const { return layer_id_; }

 private:
  enum class Stage { kInitial, kDispatching, kDispatched, kCombining };
  // Checks that it is the turn of a stage, runs it, and moves on; or gives up and rethrows.
  template <typename Body>
  decltype(auto) RunStage(Stage from, Stage to, std::string_view stage_name, const Body& body);

  size_t layer_id_;
  Stage stage_ = Stage::kInitial;
  HookList<ExecContext&, ConstRows&, TopKOutput&> pre_dispatch_;
  HookList<ExecContext&> dispatch_;
  HookList<ExecContext&, const DispatchOutput*&> post_dispatch_;
  HookList<ExecContext&, const CombineInput*&> pre_combine_;
  HookList<ExecContext&, Rows&> post_combine_;
};

// The half of a protocol that an entry implements (contract 3.6): a backend with two is used in
// both, or in the one that --deepep-mode names.
enum class DispatchMode { kAny, kNormal, kLowLatency };

// What a dispatcher is made from.
struct DispatcherArgs {
  const MoeRunnerConfig& config;
  std::string_view runner;       // who computes: ascend takes expanded rows where there is a choice
  ExpertParallel* ep = nullptr;  // null: one rank
  // Of two-batch overlap, 0 or 1: the dispatchers of a layer's two batches may have dispatches
  // outstanding at once, as long as all ranks take their stages in one order.
  size_t batch = 0;
};

// A line of dispatchers.def, or an entry that a program adds from outside.
struct DispatcherEntry {
  std::string_view name;     // "standard"
  std::string_view a2a;      // the --moe-a2a value that selects it
  std::string_view summary;  // one line for `switchyard info`
  DispatchFormat format;
  DispatchMode mode = DispatchMode::kAny;
  // Collective over the ranks of args.ep. Errors: kUnsupported naming the setting that it cannot
  //   do.
  std::unique_ptr<Dispatcher> (*make)(const DispatcherArgs& args);
};

}  // namespace switchyard::moe
