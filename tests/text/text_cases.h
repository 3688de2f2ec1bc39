// The recorded tokenizers: files and expected results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/text/tokenizer.h"
#include "testing/goldens.h"

namespace switchyard::testing {

using Json = nlohmann::json;
// Keeps the order of object keys, which templates print.
using OrderedJson = nlohmann::ordered_json;

inline std::optional<std::string> ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// One folder with tokenizer files and expected_*.json.
struct TextCase {
  std::string name;  // the kind; "small_" before it for the subsets in this repository
  std::filesystem::path folder;

  TokenizerFiles Files() const {
    TokenizerFiles files;
    files.tokenizer_json = ReadText(folder / "tokenizer.json").value();
    files.tokenizer_config_json = ReadText(folder / "tokenizer_config.json");
    files.special_tokens_map_json = ReadText(folder / "special_tokens_map.json");
    files.chat_template = ReadText(folder / "chat_template.jinja");
    return files;
  }
  std::shared_ptr<const Tokenizer> Load() const { return Tokenizer::Create(Files()); }
  OrderedJson Expected(const std::string& file) const {
    const auto text = ReadText(folder / file);
    return text ? OrderedJson::parse(*text) : OrderedJson::object();
  }
};

inline std::vector<TextCase> TextCases() {
  std::vector<TextCase> cases;
  const auto add = [&](const std::filesystem::path& root, const std::string& prefix) {
    if (!std::filesystem::is_directory(root)) return;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      if (std::filesystem::exists(entry.path() / "tokenizer.json")) {
        cases.push_back({prefix + entry.path().filename().string(), entry.path()});
      }
    }
  };
  add(SourceDir() / "tests" / "text" / "data", "small_");
  if (GoldenDir()) add(*GoldenDir() / "tokenizers", "");
  std::sort(cases.begin(), cases.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return cases;
}

// Those that come with recorded chats.
inline std::vector<TextCase> ChatCases() {
  std::vector<TextCase> cases = TextCases();
  std::erase_if(cases, [](const TextCase& test) { return !std::filesystem::exists(test.folder / "expected_chat.json"); });
  return cases;
}

class TextCaseTest : public ::testing::TestWithParam<TextCase> {};

#define SY_FOR_EACH_TEXT_CASE(fixture)                                                              \
  INSTANTIATE_TEST_SUITE_P(All, fixture, ::testing::ValuesIn(::switchyard::testing::TextCases()), \
                           [](const auto& info) { return info.param.name; })

// A chat case of expected_chat.json as a request.
inline ChatRequest ToRequest(const OrderedJson& test) {
  ChatRequest request;
  request.messages_json = test.at("messages").dump();
  OrderedJson kwargs = test.at("kwargs");
  if (kwargs.contains("tools")) request.tools_json = kwargs["tools"].dump();
  request.add_generation_prompt = kwargs.value("add_generation_prompt", false);
  if (kwargs.value("continue_final_message", false)) request.continue_final_message = "content";
  for (const char* key : {"tools", "add_generation_prompt", "continue_final_message"}) kwargs.erase(key);
  request.kwargs_json = kwargs.dump();
  return request;
}

}  // namespace switchyard::testing
