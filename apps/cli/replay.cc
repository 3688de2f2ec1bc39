// Verb replay: recorded MoE-layer cases, computed again and compared with what they expect.
#include "switchyard/replay/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;
using replay::CheckResult;
using replay::ReplayResult;

struct Options {
  std::vector<std::string> paths;
  std::string output;
  bool writes_output = false, json = false;
};

// The case files that a path stands for: itself, or every one below a folder.
std::vector<std::filesystem::path> CasesBelow(const std::string& path) {
  std::error_code unreadable;
  if (!std::filesystem::exists(path, unreadable)) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: there is no such file or folder", path));
  }
  if (!std::filesystem::is_directory(path, unreadable)) return {path};
  std::vector<std::filesystem::path> cases;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    // What is no folder is a case, even a link that leads nowhere: its line says so.
    if (entry.path().extension() == ".safetensors" && !entry.is_directory(unreadable))
      cases.push_back(entry.path());
  }
  if (cases.empty()) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: there is no .safetensors file in this folder", path));
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

// The cases of all paths. On several ranks those that rank 0 finds, so that all replay the same.
std::vector<std::filesystem::path> FindCases(const std::vector<std::string>& paths) {
  std::string names;
  OnAllRanks([&] {
    if (!IsFirstRank()) return;
    for (const std::string& path : paths) {
      for (const auto& below : CasesBelow(path)) names += below.string() + '\0';
    }
  });
  if (World() != nullptr) names = AllGatherText(*World(), names, Deadline::Never("replay"))[0];
  std::vector<std::filesystem::path> cases;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, '\0');) cases.emplace_back(name);
  return cases;
}

enum class Status { kPass, kFail, kSkip };

constexpr std::string_view StatusName(Status status) {
  return status == Status::kPass ? "PASS" : status == Status::kFail ? "FAIL" : "SKIP";
}

// What came of one file.
struct Outcome {
  std::filesystem::path path;
  Status status = Status::kFail;
  ReplayResult result;  // empty if there was an error
  std::string error;    // why it could not be replayed
};

Outcome ReplayFile(const std::filesystem::path& path, ExecContext& context,
                   const replay::ReplayOptions& options) {
  Outcome outcome{path, Status::kFail, {}, ""};
  try {
    outcome.result = replay::ReplayCase(path, moe::BuiltinRegistry(), context, options);
    outcome.status = !outcome.result.skipped.empty() ? Status::kSkip
                     : outcome.result.passed()       ? Status::kPass
                                                     : Status::kFail;
  } catch (const Error& e) {
    // A damaged file or a wrong option fails; what this build cannot do is skipped.
    outcome.error = e.message();
    if (e.code() == ErrorCode::kUnsupported) outcome.status = Status::kSkip;
  }
  return outcome;
}

// How near a check is to failing; above 1 it has failed.
double Ratio(const CheckResult& check) {
  if (check.error == 0 && check.passed) return 0;
  return check.tolerance > 0 ? check.error / check.tolerance
                             : std::numeric_limits<double>::infinity();
}

// The check with the largest error relative to its tolerance, a failed one before all others.
const CheckResult* WorstCheck(const ReplayResult& result) {
  const auto found = std::max_element(
      result.checks.begin(), result.checks.end(), [](const CheckResult& a, const CheckResult& b) {
        return std::pair(!a.passed, Ratio(a)) < std::pair(!b.passed, Ratio(b));
      });
  return found == result.checks.end() ? nullptr : &*found;
}

// Why there are no checks, without the path of the file before it; empty if there are.
std::string Reason(const Outcome& outcome) {
  const std::string& reason = outcome.error.empty() ? outcome.result.skipped : outcome.error;
  const std::string prefix = outcome.path.string() + ": ";
  return reason.starts_with(prefix) ? reason.substr(prefix.size()) : reason;
}

std::string Describe(const Outcome& outcome) {
  std::string reason = Reason(outcome);
  if (!reason.empty()) return reason;
  const CheckResult* worst = WorstCheck(outcome.result);
  if (worst == nullptr) return "the case compares nothing that was computed";
  std::string text = fmt::format("{} error {:.3g}, tolerance {:.3g}", worst->tensor, worst->error,
                                 worst->tolerance);
  if (worst->passed) return text;
  const auto num_failed = std::count_if(outcome.result.checks.begin(), outcome.result.checks.end(),
                                        [](const CheckResult& check) { return !check.passed; });
  if (num_failed > 1) text += fmt::format(" (and {} more checks)", num_failed - 1);
  return text + (worst->detail.empty() ? "" : ": " + worst->detail);
}

void PrintLine(const Outcome& outcome) {
  const ReplayResult& result = outcome.result;
  const std::string name =
      result.name.empty() ? outcome.path.string() : fmt::format("{}/{}", result.kind, result.name);
  fmt::print("{:<40} {}  {}\n", Printable(name), StatusName(outcome.status),
             Printable(Describe(outcome)));
}

ordered_json ToJson(const Outcome& outcome) {
  const ReplayResult& result = outcome.result;
  ordered_json line = {{"file", outcome.path.string()},
                       {"kind", result.kind},
                       {"name", result.name},
                       {"status", StatusName(outcome.status)}};
  const std::string reason = Reason(outcome);
  if (!reason.empty()) line["reason"] = reason;
  line["checks"] = ordered_json::array();
  for (const CheckResult& check : result.checks) {
    ordered_json row = {{"tensor", check.tensor},
                        {"passed", check.passed},
                        {"error", check.error},  // null if it is infinite
                        {"tolerance", check.tolerance}};
    if (!check.detail.empty()) row["detail"] = check.detail;
    line["checks"].push_back(row);
  }
  return line;
}

replay::ReplayOptions MakeReplayOptions(const Options& options, const Settings& settings) {
  replay::ReplayOptions replay_options;
  replay_options.runner = settings.Get("moe-runner");
  replay_options.a2a = settings.Get("moe-a2a");
  replay_options.act_dtype = settings.Get("act-dtype") == "bf16" ? "bf16" : "f32";
  replay_options.activation_quant = !settings.GetFlag("no-activation-quant");
  replay_options.output = options.output;
  replay_options.dispatch_dtype = settings.Get("moe-dispatch-dtype");
  replay_options.combine_dtype = settings.Get("moe-combine-dtype");
  replay_options.world = World();
  replay_options.ep = ExchangeOptions(settings);
  return replay_options;
}

// Refuses, before anything is computed, an output that cannot be written or is the case itself.
void RequireGoodOutput(const std::string& output, const std::filesystem::path& path) {
  RequireWritable("--output", output);
  std::error_code ignored;
  if (std::filesystem::equivalent(path, output, ignored)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--output {}: that is the case itself", output));
  }
}

// What came of all cases.
class Report {
 public:
  explicit Report(bool json) : json_(json) {}

  void Add(const Outcome& outcome) {
    ++counts_[static_cast<size_t>(outcome.status)];
    if (json_) {
      all_["cases"].push_back(ToJson(outcome));
    } else {
      PrintLine(outcome);
    }
  }

  // Prints the totals. Returns the exit status: nothing failed, and not all was skipped.
  int End() {
    const size_t passed = Count(Status::kPass), failed = Count(Status::kFail),
                 skipped = Count(Status::kSkip), total = passed + failed + skipped;
    if (json_) {
      all_["passed"] = passed;
      all_["failed"] = failed;
      all_["skipped"] = skipped;
      fmt::print("{}\n", all_.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    } else {
      fmt::print("{} case{}: {} passed, {} failed, {} skipped\n", total, total == 1 ? "" : "s",
                 passed, failed, skipped);
    }
    if (skipped == total) {
      std::fflush(stdout);
      fmt::print(stderr, "switchyard replay: nothing was compared: {} skipped\n",
                 total == 1 ? "the case was" : "all cases were");
    }
    return failed == 0 && skipped != total ? 0 : 1;
  }

 private:
  size_t Count(Status status) const { return counts_[static_cast<size_t>(status)]; }

  bool json_;
  size_t counts_[3] = {};
  ordered_json all_ = {{"cases", ordered_json::array()}};
};

int Run(const Options& options, const Settings& settings) {
  const std::vector<std::filesystem::path> cases = FindCases(options.paths);
  if (options.writes_output && cases.size() != 1) {
    if (IsFirstRank()) {
      fmt::print(stderr,
                 "switchyard replay: --output takes the tensors of one case, found {} cases\n",
                 cases.size());
    }
    return 2;
  }
  OnAllRanks([&] {
    if (options.writes_output && IsFirstRank()) RequireGoodOutput(options.output, cases[0]);
  });
  const auto pool = MakeThreadPool(settings);
  Arena arena;
  ExecContext context{*pool, arena};
  const replay::ReplayOptions replay_options = MakeReplayOptions(options, settings);
  Report report(options.json);
  for (const std::filesystem::path& path : cases) {
    const Outcome outcome = ReplayFile(path, context, replay_options);
    if (IsFirstRank()) report.Add(outcome);
  }
  const int status = IsFirstRank() ? report.End() : 0;
  // Rank 0 speaks for all.
  return World() == nullptr ? status
                            : AllGatherValue(*World(), status, Deadline::Never("replay"))[0];
}

// An option that is another name of a setting.
void AddAlias(CLI::App& app, Settings& settings, const std::string& flag,
              const std::string& setting) {
  app.add_option_function<std::string>(
      flag,
      [&settings, setting, flag](const std::string& value) { settings.Set(setting, value, flag); },
      fmt::format("the same as --{}", setting));
}

}  // namespace

std::function<int()> SetUpReplay(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  app.add_option("PATH", options->paths, "case files, or folders of them")->required();
  AddAlias(app, settings, "--runner", "moe-runner");
  AddAlias(app, settings, "--a2a", "moe-a2a");
  CLI::Option* output = app.add_option("--output", options->output,
                                       "safetensors file for the tensors that were computed");
  app.add_flag("--json", options->json, "machine-readable");
  AddSettingOptions(app, settings);
  return [options, &settings, output] {
    options->writes_output = output->count() > 0;
    return Run(*options, settings);
  };
}

}  // namespace switchyard::cli
