// Verb config: every setting, its value and where it came from.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "common.h"
#include "verb.h"

namespace switchyard::cli {

std::function<int()> SetUpConfig(CLI::App& app, Settings& settings) {
  auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "machine-readable");
  AddSettingOptions(app, settings);
  return [json, &settings] {
    if (*json) {
      nlohmann::ordered_json all;
      for (const SettingSpec& spec : AllSettings()) {
        all[std::string(spec.name)] = {{"value", settings.Get(spec.name)},
                                       {"source", settings.Source(spec.name)}};
      }
      fmt::print("{}\n", all.dump());
      return 0;
    }
    for (const SettingSpec& spec : AllSettings()) {
      fmt::print("{:<20} {:<10} {:<28} {}\n", spec.name, settings.Get(spec.name),
                 settings.Source(spec.name), spec.help);
    }
    return 0;
  };
}

}  // namespace switchyard::cli
