// The registries through which dispatchers, runners and schemes find each other. Contract 1.5.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/activation.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/moe/contract/runner.h"

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

// Key: (a2a backend, runner name). Takes the place of permute, core and permute.
struct FusedEntry {
  std::string_view a2a;
  std::string_view runner;
  const CombineInput& (*run)(ExecContext& context, const DispatchOutput& output,
                             const MoeQuantInfo& quant_info, const MoeRunnerConfig& config);
};

// The storage of a layer's expert weights, as the loader found them. Owned by the layer.
struct ExpertWeights {
  std::vector<const std::byte*> w1, w3, w2;  // one pointer per local expert
  DType w13_dtype = DType::kF32;
  DType w2_dtype = DType::kF32;
  size_t hidden_size = 0;
  size_t intermediate_size = 0;
};

// Knows one checkpoint layout of expert weights: how to view it for a runner, and which runners
// compute with it.
struct SchemeEntry {
  std::string_view name;  // "unquant"
  std::string_view summary;
  // Runner names, best first; the first is what --moe-runner auto takes.
  std::vector<std::string_view> (*runners)();
  MoeQuantInfo (*quant_info)(const ExpertWeights& weights);
  // The dtype of activations under --act-dtype `setting`. Errors: kUnsupported naming both types.
  DType (*activation_dtype)(std::string_view setting, const ExpertWeights& weights);
  // Bits that one weight takes, scales included.
  double (*bits_per_weight)(const ExpertWeights& weights);
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
  // The dispatcher that an a2a backend uses ("none" -> standard).
  const DispatcherEntry& DispatcherForA2a(std::string_view a2a) const;
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
