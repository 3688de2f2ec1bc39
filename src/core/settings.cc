#include "switchyard/core/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <vector>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

constexpr SettingSpec kSettings[] = {
#define SY_SETTING(name, default_value, values, aliases, help) \
  {name, default_value, values, aliases, help},
#include "core/settings.def"
#undef SY_SETTING
};

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    if (end != 0) parts.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return parts;
}

const SettingSpec& Spec(std::string_view name) {
  for (const SettingSpec& spec : kSettings) {
    if (spec.name == name) return spec;
  }
  std::vector<std::string_view> known;
  for (const SettingSpec& spec : kSettings) known.push_back(spec.name);
  const std::string_view close = ClosestName(name, known);
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no setting \"{}\"{}", name,
                          close.empty() ? "" : fmt::format("; did you mean \"{}\"?", close)));
}

bool ParseCount(std::string_view text, size_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
}

bool IsFraction(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && value >= 0 && value <= 1;
}

bool IsFlagText(std::string_view text) {
  return text == "0" || text == "1" || text == "true" || text == "false";
}

// Empty if `value` is allowed, else what would be.
std::string WhatIsAllowed(const SettingSpec& spec, std::string_view value) {
  if (spec.values == "text") return "";
  size_t count = 0;
  if (spec.values == "fraction") return IsFraction(value) ? "" : "a number of 0 to 1";
  if (spec.values == "flag") return IsFlagText(value) ? "" : "0, 1, true or false";
  // Words and, if the last choice is "count", numbers.
  std::vector<std::string_view> choices = Split(spec.values, '|');
  const bool takes_count = choices.back() == "count";
  if (takes_count) choices.pop_back();
  if (takes_count && ParseCount(value, count) && count >= 1) return "";
  if (std::ranges::find(choices, value) != choices.end()) return "";
  if (!takes_count) return fmt::format("one of {}", spec.values);
  return fmt::format("{}{}a whole number of at least 1", fmt::join(choices, ", "),
                     choices.empty() ? "" : " or ");
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

}  // namespace

std::span<const SettingSpec> AllSettings() { return kSettings; }

std::string SettingEnvName(std::string_view name) {
  std::string env = "SWITCHYARD_";
  for (char c : name)
    env += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return env;
}

Settings Settings::FromEnvironment() {
  Settings settings;
  for (const SettingSpec& spec : kSettings) {
    std::vector<std::string> names = {SettingEnvName(spec.name)};
    for (std::string_view alias : Split(spec.aliases, ' ')) names.emplace_back(alias);
    for (const std::string& name : names) {
      if (const char* value = std::getenv(name.c_str()); value != nullptr && *value != '\0') {
        settings.Set(spec.name, value, name);
        break;
      }
    }
  }
  return settings;
}

void Settings::Set(std::string_view name, std::string_view value, std::string_view source) {
  const SettingSpec& spec = Spec(name);
  if (const std::string allowed = WhatIsAllowed(spec, value); !allowed.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: expected {}, found \"{}\"", source, allowed, value));
  }
  values_[std::string(name)] = Value{std::string(value), std::string(source)};
}

const Settings::Value& Settings::Lookup(std::string_view name) const {
  const auto found = values_.find(name);
  if (found != values_.end()) return found->second;
  return values_.emplace(name, Value{std::string(Spec(name).default_value), "default"})
      .first->second;
}

const std::string& Settings::Get(std::string_view name) const { return Lookup(name).text; }

size_t Settings::GetCount(std::string_view name, size_t automatic) const {
  size_t value = automatic;
  ParseCount(Get(name), value);
  return value;
}

double Settings::GetFraction(std::string_view name) const {
  const std::string& text = Get(name);
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

bool Settings::GetFlag(std::string_view name) const {
  return Get(name) == "1" || Get(name) == "true";
}

const std::string& Settings::Source(std::string_view name) const { return Lookup(name).source; }

std::string_view ClosestName(std::string_view name, std::span<const std::string_view> known) {
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (std::string_view candidate : known) {
    const size_t distance = EditDistance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace switchyard
