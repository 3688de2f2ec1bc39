#include "switchyard/moe/registry/registry.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "moe/registry/activation_rules.h"
#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void ThrowDuplicate(std::string_view kind, const std::string& key) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {} is registered twice", kind, key));
}

std::string PairKey(DispatchFormat format, std::string_view runner) {
  return fmt::format("(dispatch format {}, runner {})", DispatchFormatName(format), runner);
}

// Adds unless an entry with the same name is there.
template <typename Entry>
void AddNamed(std::vector<Entry>& entries, const Entry& entry, std::string_view kind) {
  for (const Entry& other : entries) {
    if (other.name == entry.name) ThrowDuplicate(kind, fmt::format("\"{}\"", entry.name));
  }
  entries.push_back(entry);
}

template <typename Entry>
const Entry& FindNamed(const std::vector<Entry>& entries, std::string_view name,
                       std::string_view kind) {
  std::vector<std::string_view> known;
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry;
    known.push_back(entry.name);
  }
  const std::string_view close = ClosestName(name, known);
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no {} \"{}\"{}; registered: {}", kind, name,
                          close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                          fmt::join(known, ", ")));
}

template <typename Entry>
void AddPair(std::vector<Entry>& entries, const Entry& entry, std::string_view kind) {
  for (const Entry& other : entries) {
    if (other.format == entry.format && other.runner == entry.runner)
      ThrowDuplicate(kind, PairKey(entry.format, entry.runner));
  }
  entries.push_back(entry);
}

template <typename Entry>
const Entry& FindPair(const std::vector<Entry>& entries, DispatchFormat format,
                      std::string_view runner, std::string_view kind) {
  std::vector<std::string> known;
  for (const Entry& entry : entries) {
    if (entry.format == format && entry.runner == runner) return entry;
    known.push_back(PairKey(entry.format, entry.runner));
  }
  throw Error(ErrorCode::kNotFound, fmt::format("no {} is registered for {}; registered: {}", kind,
                                                PairKey(format, runner), fmt::join(known, ", ")));
}

}  // namespace

std::string_view QuantTypeName(QuantType type) {
  switch (type) {
    case QuantType::kNo: return "No";
    case QuantType::kPerToken: return "per_Token";
    case QuantType::kPer128x128: return "per_128x128";
    case QuantType::kPer1x32: return "per_1x32";
  }
  return "?";
}

void RunningState::RequireType(bool same) {
  if (!same)
    throw Error(ErrorCode::kInternal, "the running state of this permute pair has another type");
}

void Registry::Add(const DispatcherEntry& entry) { AddNamed(dispatchers_, entry, "dispatcher"); }
void Registry::Add(const RunnerEntry& entry) { AddNamed(runners_, entry, "runner"); }
void Registry::Add(const SchemeEntry& entry) { AddNamed(schemes_, entry, "scheme"); }
void Registry::Add(const ActivationEntry& entry) {
  if (entry.f32 == nullptr || entry.scalar == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("activation \"{}\" has no {} form", entry.name,
                            entry.f32 == nullptr ? "f32" : "scalar"));
  }
  if (IsAlias(entry.name)) ThrowDuplicate("activation", fmt::format("\"{}\"", entry.name));
  AddNamed(activations_, entry, "activation");
}
void Registry::Add(const PrePermuteEntry& entry) { AddPair(pre_permutes_, entry, "pre-permute"); }
void Registry::Add(const PostPermuteEntry& entry) {
  AddPair(post_permutes_, entry, "post-permute");
}

void Registry::Add(const FusedEntry& entry) {
  if (FindFused(entry.a2a, entry.runner) != nullptr) {
    ThrowDuplicate("fused function",
                   fmt::format("(a2a backend {}, runner {})", entry.a2a, entry.runner));
  }
  fused_.push_back(entry);
}

const DispatcherEntry& Registry::FindDispatcher(std::string_view name) const {
  return FindNamed(dispatchers_, name, "dispatcher");
}
const RunnerEntry& Registry::FindRunner(std::string_view name) const {
  return FindNamed(runners_, name, "runner");
}
const SchemeEntry& Registry::FindScheme(std::string_view name) const {
  return FindNamed(schemes_, name, "scheme");
}

const ActivationEntry& Registry::FindActivation(std::string_view name) const {
  return FindNamed(activations_, name, "activation");
}

std::vector<const DispatcherEntry*> Registry::DispatchersFor(std::string_view a2a,
                                                             std::string_view runner,
                                                             DispatchMode mode) const {
  bool has_backend = false;
  std::vector<std::string> known;
  std::vector<const DispatcherEntry*> found;
  for (const DispatcherEntry& entry : dispatchers_) {
    has_backend = has_backend || entry.a2a == a2a;
    // A fused function takes the format as it is.
    bool takes = FindFused(entry.a2a, runner) != nullptr;
    for (const PrePermuteEntry& pre : pre_permutes_) {
      if (pre.format != entry.format) continue;
      takes = takes || pre.runner == runner;
      std::string pair = fmt::format("({}, {})", entry.a2a, pre.runner);
      if (std::find(known.begin(), known.end(), pair) == known.end())
        known.push_back(std::move(pair));
    }
    const bool fits =
        mode == DispatchMode::kAny || entry.mode == DispatchMode::kAny || entry.mode == mode;
    if (entry.a2a != a2a || !takes || !fits) continue;
    // The first, and for decode the other half of a pair.
    const bool is_first = found.empty();
    const bool is_half = !is_first && found.back()->mode == DispatchMode::kNormal &&
                         entry.mode == DispatchMode::kLowLatency;
    if (is_first || is_half) found.push_back(&entry);
  }
  if (!found.empty()) return found;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("--moe-a2a {}: {}; pairs of backend and runner that there are: {}", a2a,
                  has_backend && mode == DispatchMode::kNormal
                      ? fmt::format("it has no normal mode (--deepep-mode) for runner {}", runner)
                  : has_backend ? fmt::format("runner {} takes no dispatch of it", runner)
                                : "this build has no dispatcher for it",
                  fmt::join(known, ", ")));
}

const PrePermuteEntry& Registry::FindPrePermute(DispatchFormat format,
                                                std::string_view runner) const {
  return FindPair(pre_permutes_, format, runner, "pre-permute");
}
const PostPermuteEntry& Registry::FindPostPermute(std::string_view runner,
                                                  DispatchFormat format) const {
  return FindPair(post_permutes_, format, runner, "post-permute");
}

const FusedEntry* Registry::FindFused(std::string_view a2a, std::string_view runner) const {
  for (const FusedEntry& entry : fused_) {
    if (entry.a2a == a2a && entry.runner == runner) return &entry;
  }
  return nullptr;
}

}  // namespace switchyard::moe
