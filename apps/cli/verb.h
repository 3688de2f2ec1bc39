// A verb of the command line: one file each.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "switchyard/core/settings.h"

namespace switchyard::cli {

// Adds the verb to `app` and returns what runs when it is chosen: its exit status. Options are
// stored behind the function.
using VerbSetup = std::function<int()> (*)(CLI::App& app, Settings& settings);

std::function<int()> SetUpRun(CLI::App& app, Settings& settings);
std::function<int()> SetUpLogits(CLI::App& app, Settings& settings);
std::function<int()> SetUpEval(CLI::App& app, Settings& settings);
std::function<int()> SetUpTokenize(CLI::App& app, Settings& settings);
std::function<int()> SetUpInspect(CLI::App& app, Settings& settings);
std::function<int()> SetUpQuantize(CLI::App& app, Settings& settings);
std::function<int()> SetUpBench(CLI::App& app, Settings& settings);
std::function<int()> SetUpReplay(CLI::App& app, Settings& settings);
std::function<int()> SetUpSimulate(CLI::App& app, Settings& settings);
std::function<int()> SetUpInfo(CLI::App& app, Settings& settings);
std::function<int()> SetUpConfig(CLI::App& app, Settings& settings);

}  // namespace switchyard::cli
