#include "switchyard/replay/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/config_reader.h"
#include "replay/case.h"
#include "replay/checks.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

struct Kind {
  std::string_view name;
  KindOutput (*replay)(const KindInput& input);
};

constexpr Kind kKinds[] = {
#define SY_KIND(name, Name) {#name, Replay##Name},
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
  try {
    return kind.replay(input);
  } catch (const Error& e) {
    const std::string prefix = path.string() + ": ";
    if (e.message().starts_with(prefix)) throw;
    throw Error(e.code(), prefix + e.message());
  }
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
  const CaseFile file = CaseFile::Read(path);
  const ArenaScope scope(context.arena);
  KindOutput output = RunKind(file, path, {file, registry, context, options});
  ReplayResult result{file.name(), file.kind(), std::move(output.skipped), {}};
  if (result.skipped.empty()) {
    result.checks = RunChecks(file, output.outputs, options.act_dtype == "bf16");
  }
  return result;
}

}  // namespace switchyard::replay
