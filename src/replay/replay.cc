#include "switchyard/replay/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "model/config_reader.h"
#include "replay/case.h"
#include "replay/checks.h"
#include "replay/write_outputs.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

enum class Who { kAllRanks, kFirstRank };

struct Kind {
  std::string_view name;
  KindOutput (*replay)(const KindInput& input);
  Who who;
};

constexpr Kind kKinds[] = {
#define SY_KIND(name, Name, who) {#name, Replay##Name, Who::who},
#include "replay/kinds.def"
#undef SY_KIND
};

const Kind& FindKind(const CaseFile& file, const std::filesystem::path& path) {
  for (const Kind& kind : kKinds) {
    if (kind.name == file.kind()) return kind;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: unknown kind {}; this build replays: {}", path.string(),
                          QuoteForMessage(file.kind()), fmt::join(KnownKinds(), ", ")));
}

// Runs the kind; errors that come from below it name the file too.
KindOutput RunKind(const CaseFile& file, const std::filesystem::path& path,
                   const KindInput& input) {
  const Kind& kind = FindKind(file, path);
  if (kind.who == Who::kFirstRank && !IsFirstRank(input.options)) return {};
  try {
    return kind.replay(input);
  } catch (const Error& e) {
    const std::string prefix = path.string() + ": ";
    if (e.message().starts_with(prefix)) throw;
    throw Error(e.code(), prefix + e.message());
  }
}

// Runs body; where there are several ranks, an error of one is thrown on all.
template <typename Body>
void Together(const ReplayOptions& options, const Body& body) {
  if (options.world == nullptr) return body();
  std::optional<Error> error;
  try {
    body();
  } catch (const Error& e) {
    error = e;
  } catch (const std::exception& e) {
    error = Error(ErrorCode::kInternal, e.what());
  }
  const Deadline never = Deadline::Never("replay");
  const Error* mine = error ? &*error : nullptr;
  // Those that only waited for others in vain do not know the cause.
  const bool is_cause = error && error->code() != ErrorCode::kUnavailable;
  options.world->AgreeOnError(is_cause ? mine : nullptr, never);
  options.world->AgreeOnError(mine, never);
}

// What all ranks must have in common.
void RequireSameCase(const CaseFile& file, const ReplayOptions& options) {
  if (options.world == nullptr) return;
  const moe::ExpertParallelOptions& ep = options.ep;
  const std::string mine =
      fmt::format("{} {:x}, runner {}, a2a {}, activations {} {}, rows {} {}, {} {} {} {} {} {}",
                  file.name(), file.Hash(), options.runner, options.a2a, options.act_dtype,
                  options.activation_quant, options.dispatch_dtype, options.combine_dtype,
                  static_cast<int>(ep.deepep_mode), ep.tokens_are_replicated, ep.deterministic,
                  ep.push_rows, static_cast<int>(ep.hierarchy), ep.fuseep_mode);
  const std::vector<std::string> all =
      AllGatherText(*options.world, mine, Deadline::Never("replay"));
  const auto other = std::find_if(all.begin(), all.end(),
                                  [&](const std::string& text) { return text != all.front(); });
  if (other == all.end()) return;
  throw Error(ErrorCode::kFailedPrecondition,
              fmt::format("rank {} has another case, or other options, than rank 0: {} and {}",
                          other - all.begin(), *other, all.front()));
}

std::vector<CheckResult> RunAllChecks(const CaseFile& file, const KindOutput& output, bool lowp) {
  std::vector<CheckResult> checks = RunChecks(file, output.outputs, lowp);
  for (const auto& [how, outputs] : output.others) {
    for (CheckResult& check : RunChecks(file, outputs, lowp)) {
      check.tensor += fmt::format(" ({})", how);
      checks.push_back(std::move(check));
    }
  }
  return checks;
}

}  // namespace

bool ReplayResult::passed() const {
  return skipped.empty() && !checks.empty() &&
         std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
}

std::vector<std::string_view> KnownKinds() {
  std::vector<std::string_view> names;
  for (const Kind& kind : kKinds) names.push_back(kind.name);
  return names;
}

ReplayResult ReplayCase(const std::filesystem::path& path, const moe::Registry& registry,
                        ExecContext& context, const ReplayOptions& options) {
  if (options.act_dtype != "f32" && options.act_dtype != "bf16") {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("act_dtype of a replay is {}, expected f32 or bf16",
                            QuoteForMessage(options.act_dtype)));
  }
  std::optional<CaseFile> file;
  Together(options, [&] { file = CaseFile::Read(path); });
  RequireSameCase(*file, options);
  const ArenaScope scope(context.arena);
  ReplayResult result{file->name(), file->kind(), "", {}};
  Together(options, [&] {
    const KindOutput output = RunKind(*file, path, {*file, registry, context, options});
    result.skipped = output.skipped;
    if (!result.skipped.empty() || !IsFirstRank(options)) return;
    if (!options.output.empty()) WriteOutputs(options.output, *file, output.outputs);
    result.checks = RunAllChecks(*file, output, options.act_dtype == "bf16");
  });
  return result;
}

}  // namespace switchyard::replay
