// The interface of all-to-all protocols. Contract 3.0.
#pragma once

#include <memory>
#include <string_view>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/dispatch.h"

namespace switchyard::moe {

// What the quant method tells a dispatcher once the weights are loaded (contract 3.0).
struct DispatcherQuantConfig {
  ActQuant output;    // how rows are quantised for the way; kNone = sent as they are
  bool gguf = false;  // matrices are split on their output axis: results are gathered, not summed
};

// Sends tokens to the ranks that own their experts, and their results back. One per layer, one
// dispatch outstanding.
class Dispatcher {
 public:
  virtual ~Dispatcher() = default;

  // The layout that Dispatch returns and Combine takes.
  virtual DispatchFormat format() const = 0;

  // Whether SetQuantConfig takes rows of this kind; a layer asks before it wants them sent.
  virtual bool CanSend(ActQuantKind) const { return true; }

  // Takes effect with the next Dispatch. A dispatcher that moves nothing has nothing to quantise.
  // Errors: kUnsupported naming the kind that the dispatcher cannot send.
  virtual void SetQuantConfig(const DispatcherQuantConfig&) {}

  // Shapes: hidden [T, H]; topk ids and weights [T, K]; T may be 0. The result lives in
  //   context.arena and refers to `hidden` and `topk` where nothing has to move.
  // Errors: kFailedPrecondition if a dispatch is outstanding.
  virtual const DispatchOutput& Dispatch(ExecContext& context, ConstRows hidden,
                                         const TopKOutput& topk) = 0;

  // Shapes: returns [T, H], T as dispatched.
  // Errors: kFailedPrecondition without an outstanding dispatch, kInvalidArgument if the format or
  //   a promise differs.
  virtual Rows Combine(ExecContext& context, const CombineInput& input) = 0;

  // Forgets an outstanding dispatch after an error between Dispatch and Combine; the layer is
  // usable again.
  virtual void Abort() = 0;
};

// A line of dispatchers.def, or an entry that a program adds from outside.
struct DispatcherEntry {
  std::string_view name;     // "standard"
  std::string_view a2a;      // the --moe-a2a value that selects it
  std::string_view summary;  // one line for `switchyard info`
  DispatchFormat format;
  std::unique_ptr<Dispatcher> (*make)(const MoeRunnerConfig& config);
};

}  // namespace switchyard::moe
