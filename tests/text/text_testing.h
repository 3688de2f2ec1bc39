// Golden tokenizers for the tests of this layer: the large set, or the small one in
// tests/text/data.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/text/tokenizer.h"
#include "testing/goldens.h"

namespace switchyard::testing {

using Json = nlohmann::ordered_json;

inline std::optional<std::string> ReadIfThere(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct GoldenTokenizer {
  std::string name;
  std::filesystem::path folder;
  TokenizerFiles files;
  std::shared_ptr<const Tokenizer> tokenizer;

  // The recorded cases of one file; null when this tokenizer has none.
  Json Cases(const std::string& file) const {
    const std::optional<std::string> text = ReadIfThere(folder / file);
    return text ? Json::parse(*text) : Json();
  }
};

inline GoldenTokenizer LoadGoldenTokenizer(const std::filesystem::path& folder) {
  GoldenTokenizer golden;
  golden.name = folder.filename().string();
  golden.folder = folder;
  golden.files.tokenizer_json = ReadIfThere(folder / "tokenizer.json").value();
  golden.files.tokenizer_config_json = ReadIfThere(folder / "tokenizer_config.json");
  golden.files.chat_template_jinja = ReadIfThere(folder / "chat_template.jinja");
  golden.tokenizer = Tokenizer::Create(golden.files);
  return golden;
}

// All of them, loaded once: the small set first, then the large one if it is there.
inline const std::vector<GoldenTokenizer>& GoldenTokenizers() {
  static const std::vector<GoldenTokenizer> tokenizers = [] {
    std::vector<std::filesystem::path> folders;
    std::vector<std::filesystem::path> roots = {SourceDir() / "tests/text/data"};
    if (GoldenDir()) roots.push_back(*GoldenDir() / "tokenizers");
    for (const std::filesystem::path& root : roots) {
      std::vector<std::filesystem::path> found;
      for (const auto& entry : std::filesystem::directory_iterator(root)) {
        if (std::filesystem::exists(entry.path() / "tokenizer.json")) found.push_back(entry.path());
      }
      std::sort(found.begin(), found.end());
      folders.insert(folders.end(), found.begin(), found.end());
    }
    std::vector<GoldenTokenizer> loaded;
    for (const std::filesystem::path& folder : folders)
      loaded.push_back(LoadGoldenTokenizer(folder));
    return loaded;
  }();
  return tokenizers;
}

// The qwen_regex tokenizer of the small set, which is always there.
inline const GoldenTokenizer& LocalTokenizer() { return GoldenTokenizers().front(); }

inline std::vector<int32_t> Ids(const Json& ids) { return ids.get<std::vector<int32_t>>(); }

// The request of a recorded case.
inline ChatRequest Request(const Json& messages, Json kwargs = Json::object()) {
  ChatRequest request;
  request.messages_json = messages.dump();
  request.add_generation_prompt = false;
  auto take = [&](const char* name) {
    Json value = kwargs.contains(name) ? kwargs[name] : Json();
    kwargs.erase(name);
    return value;
  };
  const Json generate = take("add_generation_prompt"), finish = take("continue_final_message"),
             tools = take("tools");
  if (generate.is_boolean()) request.add_generation_prompt = generate;
  if (finish.is_boolean()) request.continue_final_message = finish;
  if (!tools.is_null()) request.tools_json = tools.dump();
  request.kwargs_json = kwargs.dump();
  return request;
}

// The day on which a case was recorded, if its template printed it, becomes the day of the test.
inline void SetRecordedDay(const std::string& rendered) {
  static const std::regex kDay("Current date: (\\d{4})-(\\d{2})-(\\d{2})");
  std::smatch day;
  ::unsetenv("SOURCE_DATE_EPOCH");
  if (!std::regex_search(rendered, day, kDay)) return;
  std::tm noon{};
  noon.tm_year = std::stoi(day[1]) - 1900;
  noon.tm_mon = std::stoi(day[2]) - 1;
  noon.tm_mday = std::stoi(day[3]);
  noon.tm_hour = 12;
  ::setenv("SOURCE_DATE_EPOCH", std::to_string(::timegm(&noon)).c_str(), 1);
}

// The error that `work` throws; fails the test if it throws none.
template <typename Work>
Error ErrorOf(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an Error";
  return Error(ErrorCode::kInternal, "");
}

}  // namespace switchyard::testing
