// The registries through which dispatchers, runners and schemes find each other. Contract 1.5.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/activation.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/registry/expert_bank.h"

namespace switchyard::moe {

// What a pre-permute leaves for its post-permute: one struct of the pair's own type, in the arena
// of the call.
class RunningState {
 public:
  template <typename T, typename... Args>
  T& Emplace(Arena& arena, Args&&... args) {
    value_ = arena.New<T>(std::forward<Args>(args)...);
    type_ = TypeTag<T>();
    return *static_cast<T*>(value_);
  }
  // Errors: kInternal if the pre-permute left no T.
  template <typename T>
  const T& Get() const {
    RequireType(type_ == TypeTag<T>());
    return *static_cast<const T*>(value_);
  }

 private:
  // An address that is unique to T.
  template <typename T>
  static const void* TypeTag() {
    static const char tag = 0;
    return &tag;
  }
  static void RequireType(bool same);

  void* value_ = nullptr;
  const void* type_ = nullptr;
};

// Computes the experts: gemm1, activation, gemm2. Holds its config and nothing per call, so one
// core serves any number of calls.
class MoeRunnerCore {
 public:
  virtual ~MoeRunnerCore() = default;

  // The result lives in context.arena.
  virtual const RunnerOutput& Run(ExecContext& context, const RunnerInput& input,
                                  const MoeQuantInfo& quant_info, RunningState& state) const = 0;
};

// A line of runners.def, or an entry that a program adds from outside.
struct RunnerEntry {
  std::string_view name;     // "aiter"
  std::string_view summary;  // one line for `switchyard info`
  // Errors: kUnsupported naming the layer, the setting and what the core can do.
  std::unique_ptr<MoeRunnerCore> (*make)(const MoeRunnerConfig& config);
};

// Key: (dispatch format, runner name).
struct PrePermuteEntry {
  DispatchFormat format;
  std::string_view runner;
  const RunnerInput& (*run)(ExecContext& context, const DispatchOutput& output,
                            const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                            RunningState& state);
};

// Key: (runner name, combine format).
struct PostPermuteEntry {
  std::string_view runner;
  DispatchFormat format;
  const CombineInput& (*run)(ExecContext& context, const RunnerOutput& output,
                             const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                             RunningState& state);
};

// Both directions of one (format, runner) pair: a line of permutes.def.
struct PermuteEntry {
  PrePermuteEntry pre;
  PostPermuteEntry post;
};

// The signatures that MakePermutes takes: the concrete structs of one pair.
template <typename Input, typename Dispatched>
using PrePermuteFn = const Input& (*)(ExecContext&, const Dispatched&, const MoeQuantInfo&,
                                      const MoeRunnerConfig&, RunningState&);
// See PrePermuteFn.
template <typename Output, typename Combined>
using PostPermuteFn = const Combined& (*)(ExecContext&, const Output&, const MoeQuantInfo&,
                                          const MoeRunnerConfig&, RunningState&);

// The deduction behind MakePermutes.
template <auto kPre, auto kPost, typename Input, typename Dispatched, typename Output,
          typename Combined>
constexpr PermuteEntry MakePermutesOf(PrePermuteFn<Input, Dispatched>,
                                      PostPermuteFn<Output, Combined>) {
  static_assert(Input::kRunner == Output::kRunner, "input and output of two runners");
  static_assert(Dispatched::kFormat == Combined::kFormat,
                "the combine input is not the answer to this dispatch format");
  return {{Dispatched::kFormat, Input::kRunner,
           [](ExecContext& context, const DispatchOutput& output, const MoeQuantInfo& quant_info,
              const MoeRunnerConfig& config, RunningState& state) -> const RunnerInput& {
             return kPre(context, As<Dispatched>(output), quant_info, config, state);
           }},
          {Output::kRunner, Combined::kFormat,
           [](ExecContext& context, const RunnerOutput& output, const MoeQuantInfo& quant_info,
              const MoeRunnerConfig& config, RunningState& state) -> const CombineInput& {
             return kPost(context, static_cast<const Output&>(output), quant_info, config, state);
           }}};
}

// An entry from two typed functions. A pair whose structs do not belong together (the runner of the
// input is not that of the output, or the combine input does not answer the dispatch format) does
// not compile.
template <auto kPre, auto kPost>
constexpr PermuteEntry MakePermutes() {
  return MakePermutesOf<kPre, kPost>(kPre, kPost);
}

// Key: (a2a backend, runner name). Takes the place of permute, core and permute.
struct FusedEntry {
  std::string_view a2a;
  std::string_view runner;
  const CombineInput& (*run)(ExecContext& context, const DispatchOutput& output,
                             const MoeQuantInfo& quant_info, const MoeRunnerConfig& config);
};

// The quant types of contract 4.2: how the fused runner multiplies.
enum class QuantType { kNo, kPerToken, kPer128x128, kPer1x32 };
std::string_view QuantTypeName(QuantType type);

// One checkpoint layout of an expert product: which formats it has, where it quantises activations,
// and which runners compute with it. w13 and w2 of a layer may have different ones.
struct SchemeEntry {
  std::string_view name;  // "unquant"
  std::string_view summary;
  // Whether a bank in this format is of this scheme.
  bool (*accepts)(const MatrixFormat& format, size_t rows, size_t cols);
  std::string_view format_summary;  // for messages: "e4m3, f32 scale per 128x128 block"
  // Of the rows that the product takes; kNone for weight-only schemes.
  ActQuantKind act_quant;
  QuantType quant_type;
  // Runner names, best first; the first is what --moe-runner auto takes.
  std::span<const std::string_view> runners;
  // What a dispatcher may send (contract 5.3, column dispatch); kNone = bf16 or f32 rows.
  ActQuantKind wire;
};

// Filled at start-up by RegisterBuiltins and by the program, then read-only: layers keep references
// to it.
//
// Errors of every Add: kInvalidArgument naming the key, if it is taken. Errors of every lookup that
//   misses: kNotFound naming both keys and what there is.
class Registry {
 public:
  void Add(const DispatcherEntry& entry);
  void Add(const RunnerEntry& entry);
  void Add(const PrePermuteEntry& entry);
  void Add(const PostPermuteEntry& entry);
  void Add(const FusedEntry& entry);
  void Add(const SchemeEntry& entry);
  // Refused too: a name of contract 1.6 that stands for a formula of another name ("swiglu"), and
  // an entry without functions.
  void Add(const ActivationEntry& entry);

  // Lookups by name or by pair.
  const DispatcherEntry& FindDispatcher(std::string_view name) const;
  // The dispatchers of an a2a backend for a runner: those whose format the runner takes ("none" is
  // standard for aiter and ascend_tp for ascend), the first for prefill, the last for decode; one,
  // unless the backend has one for each and `mode` is kAny.
  // Errors: kUnsupported naming both and what there is.
  std::vector<const DispatcherEntry*> DispatchersFor(std::string_view a2a, std::string_view runner,
                                                     DispatchMode mode = DispatchMode::kAny) const;
  // The first of them.
  const DispatcherEntry& DispatcherFor(std::string_view a2a, std::string_view runner) const {
    return *DispatchersFor(a2a, runner).front();
  }
  const RunnerEntry& FindRunner(std::string_view name) const;
  const PrePermuteEntry& FindPrePermute(DispatchFormat format, std::string_view runner) const;
  const PostPermuteEntry& FindPostPermute(std::string_view runner, DispatchFormat format) const;
  // A fused function may be absent: then nullptr.
  const FusedEntry* FindFused(std::string_view a2a, std::string_view runner) const;
  const SchemeEntry& FindScheme(std::string_view name) const;
  // By the name of the formula; what a layer's config selects is ResolveActivation's affair.
  const ActivationEntry& FindActivation(std::string_view name) const;

  const std::vector<DispatcherEntry>& dispatchers() const { return dispatchers_; }
  const std::vector<RunnerEntry>& runners() const { return runners_; }
  const std::vector<PrePermuteEntry>& pre_permutes() const { return pre_permutes_; }
  const std::vector<PostPermuteEntry>& post_permutes() const { return post_permutes_; }
  const std::vector<FusedEntry>& fused() const { return fused_; }
  const std::vector<SchemeEntry>& schemes() const { return schemes_; }
  const std::vector<ActivationEntry>& activations() const { return activations_; }

 private:
  std::vector<DispatcherEntry> dispatchers_;
  std::vector<RunnerEntry> runners_;
  std::vector<PrePermuteEntry> pre_permutes_;
  std::vector<PostPermuteEntry> post_permutes_;
  std::vector<FusedEntry> fused_;
  std::vector<SchemeEntry> schemes_;
  std::vector<ActivationEntry> activations_;
};

}  // namespace switchyard::moe
