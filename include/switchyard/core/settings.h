// Every setting of the engine: one table with names, defaults, aliases and help; values with where
// they came from.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace switchyard {

// One line of core/settings.def.
struct SettingSpec {
  std::string_view name;           // as on the command line: "moe-runner"
  std::string_view default_value;  // as text
  std::string_view values;         // "auto|f32|bf16" for a choice, "count" (whole number >= 1),
                                   // "auto|count", "fraction" (0 to 1), "flag", "text"
  std::string_view aliases;        // names of the reference system that are read too, separated by
                                   // spaces; may be empty
  std::string_view help;
};

// All settings, in the order of the table.
std::span<const SettingSpec> AllSettings();

// SWITCHYARD_MOE_RUNNER for "moe-runner".
std::string SettingEnvName(std::string_view name);

// The values in force. Precedence: command line, then SWITCHYARD_<NAME>, then an alias, then the
// default.
class Settings {
 public:
  // Defaults only.
  Settings() = default;
  // Reads the environment. Errors: kInvalidArgument naming the variable, its value and what is
  // allowed.
  static Settings FromEnvironment();

  // Errors: kNotFound with the closest known name; kInvalidArgument naming `source`, the value and
  //   what is allowed.
  void Set(std::string_view name, std::string_view value, std::string_view source);

  // The value as text. Errors: kNotFound with the closest known name.
  const std::string& Get(std::string_view name) const;
  // A count; `automatic` if it is "auto".
  size_t GetCount(std::string_view name, size_t automatic = 0) const;
  double GetFraction(std::string_view name) const;
  bool GetFlag(std::string_view name) const;
  // "default", "--threads", "SWITCHYARD_THREADS", …
  const std::string& Source(std::string_view name) const;
  bool IsDefault(std::string_view name) const { return Source(name) == "default"; }

 private:
  struct Value {
    std::string text;
    std::string source;
  };
  const Value& Lookup(std::string_view name) const;

  mutable std::map<std::string, Value, std::less<>> values_;
};

// The known name with the smallest edit distance to `name`, or empty if none is close.
std::string_view ClosestName(std::string_view name, std::span<const std::string_view> known);

}  // namespace switchyard
