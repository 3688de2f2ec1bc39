// The switchyard program: parses the command line, installs the log, runs a verb, explains
// failures.
#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <vector>

#include "common.h"
#include "ranks.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct VerbRow {
  const char* name;
  const char* help;
  VerbSetup set_up;
  bool on_all_ranks = false;  // under mpirun
};
constexpr VerbRow kVerbs[] = {
    {"run", "generate text, or chat", &SetUpRun, true},
    {"bench", "measure prefill and decode beside this machine's limits", &SetUpBench, true},
    {"eval", "perplexity of a text", &SetUpEval, true},
    {"logits", "logits of every position, to a file", &SetUpLogits, true},
    {"tokenize", "text to token ids and back, chat templates", &SetUpTokenize},
    {"inspect", "what is in a checkpoint and how it would be computed", &SetUpInspect, true},
    {"quantize", "write a checkpoint in another scheme", &SetUpQuantize},
    {"replay", "compute recorded MoE-layer cases again and compare", &SetUpReplay, true},
    {"simulate", "predict step time and traffic of layouts that do not fit here", &SetUpSimulate},
    {"info", "this machine and this build", &SetUpInfo},
    {"config", "every setting, its value and where it came from", &SetUpConfig},
};

void InstallLog(const std::string& level) {
  if (level == "off") return;
  const auto logger = std::make_shared<spdlog::logger>(
      "switchyard", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("switchyard: %^%l%$: %v");
  logger->set_level(spdlog::level::trace);
  const LogLevel lowest = level == "debug"   ? LogLevel::kDebug
                          : level == "info"  ? LogLevel::kInfo
                          : level == "error" ? LogLevel::kError
                                             : LogLevel::kWarning;
  SetLogSink(
      [logger](LogLevel log_level, std::string_view message,
               std::initializer_list<LogField> fields) {
        std::string line(message);
        for (const LogField& field : fields) line += fmt::format(" {}={}", field.key, field.value);
        constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                         spdlog::level::warn, spdlog::level::err};
        logger->log(kLevels[static_cast<size_t>(log_level)], line);
      },
      lowest);
}

int Main(int argc, char** argv) {
  Settings settings = Settings::FromEnvironment();
  CLI::App app("Switchyard runs mixture-of-experts language models on CPUs.", "switchyard");
  app.set_version_flag("--version", SWITCHYARD_VERSION);
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, std::function<int()>>> verbs;
  for (const VerbRow& row : kVerbs) {
    CLI::App* verb = app.add_subcommand(row.name, row.help);
    verbs.emplace_back(verb, row.set_up(*verb, settings));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::ostringstream others;
    const bool first = IsFirstRank();
    return app.exit(e, first ? std::cout : others, first ? std::cerr : others) == 0 ? 0 : 2;
  }
  InstallLog(IsFirstRank() ? settings.Get("log-level") : "off");
  for (size_t i = 0; i < verbs.size(); ++i) {
    if (!verbs[i].first->parsed()) continue;
    // What needs no model is rank 0's alone.
    return IsFirstRank() || kVerbs[i].on_all_ranks ? verbs[i].second() : 0;
  }
  return 2;
}

// Results that did not reach their reader are a failure, even if all went well before.
int CheckOutput(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  fmt::print(stderr, "switchyard: standard output could not be written to\n");
  return status == 0 ? 1 : status;
}

}  // namespace
}  // namespace switchyard::cli

int main(int argc, char** argv) {
  try {
    return switchyard::cli::RunOnRanks(argc, argv, [&] {
      return switchyard::cli::CheckOutput(switchyard::cli::Main(argc, argv));
    });
  } catch (const switchyard::Error& e) {
    fmt::print(stderr, "switchyard: {}: {}\n", switchyard::ErrorCodeName(e.code()),
               switchyard::cli::Printable(e.message()));
    return switchyard::ErrorExitStatus(e.code());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "switchyard: out of memory\n");
  } catch (const std::exception& e) {
    // A result that outgrows its buffer fails while it is printed.
    if (std::ferror(stdout) != 0) return switchyard::cli::CheckOutput(1);
    fmt::print(stderr, "switchyard: {}\n", e.what());
  }
  return 1;
}
