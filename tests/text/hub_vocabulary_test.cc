// Vocabularies of tokenizer.json as GGUF metadata: the tokenizer that is made of them again gives
// the same ids.
#include "switchyard/text/hub_vocabulary.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "testing/errors.h"
#include "testing/goldens.h"

namespace switchyard {
namespace {

using testing::ExpectError;
namespace fs = std::filesystem;

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TokenizerFiles Read(const fs::path& folder) {
  TokenizerFiles files;
  files.tokenizer_json = ReadAll(folder / "tokenizer.json");
  if (fs::exists(folder / "tokenizer_config.json"))
    files.tokenizer_config_json = ReadAll(folder / "tokenizer_config.json");
  if (fs::exists(folder / "chat_template.jinja"))
    files.chat_template_jinja = ReadAll(folder / "chat_template.jinja");
  return files;
}

void ExpectSameIds(const TokenizerFiles& files, const std::vector<std::string>& texts) {
  const auto original = Tokenizer::Create(files);
  const HubVocabulary hub = ReadHubVocabulary(files);
  const auto again = Tokenizer::CreateFromGguf(hub.vocabulary);
  for (const std::string& text : texts) {
    for (bool special : {false, true}) {
      const EncodeOptions options = {.add_special_tokens = special, .parse_special = true};
      EXPECT_EQ(again->Encode(text, options), original->Encode(text, options)) << text;
    }
  }
}

const std::vector<std::string> kTexts = {
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "It's 12345 o'clock,\n\n\tand 3.14!",
    "na\xc3\xafve caf\xc3\xa9 \xe6\xbc\xa2\xe5\xad\x97 \xf0\x9f\x98\x80",
    "don't DON'T we'LL",
    "x=y;{}[]()<>/*+-*/",
    "\r\n\r\n end"};

TEST(HubVocabulary, OfTheDefaultModel) {
  const TokenizerFiles files = Read(testing::SourceDir() / "models/default");
  ExpectSameIds(files, kTexts);
  const HubVocabulary hub = ReadHubVocabulary(files);
  EXPECT_EQ(hub.vocabulary.model, "gpt2");
  EXPECT_EQ(hub.vocabulary.pre, "grok-2");
  EXPECT_FALSE(hub.vocabulary.chat_template.empty());
  EXPECT_EQ(hub.vocabulary.add_bos_token, false);
}

TEST(HubVocabulary, OfTheRecordedTokenizers) {
  SY_SKIP_WITHOUT_GOLDENS();
  const std::vector<std::pair<std::string, std::string>> kinds = {
      {"qwen_regex", "qwen2"},       {"gpt2_bytelevel", "gpt-2"},
      {"llama3_regex", "llama-bpe"}, {"deepseek_regex", "deepseek-v3"},
      {"o200k_regex", "gpt-4o"},     {"spm_prepend_bytefallback", "default"}};
  for (const auto& [kind, pre] : kinds) {
    const fs::path folder = *testing::GoldenDir() / "tokenizers" / kind;
    SCOPED_TRACE(kind);
    EXPECT_EQ(ReadHubVocabulary(Read(folder)).vocabulary.pre, pre);
    std::vector<std::string> texts = kTexts;
    const auto recorded = nlohmann::json::parse(ReadAll(folder / "expected_tokens.json"));
    for (const auto& line : recorded.at("encode")) texts.push_back(line.at("text"));
    ExpectSameIds(Read(folder), texts);
  }
}

TEST(HubVocabulary, WhatGgufHasNoKindForIsRefused) {
  TokenizerFiles files = Read(testing::SourceDir() / "models/default");
  const auto with = [&](const std::string& field, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(files.tokenizer_json);
    json[nlohmann::json::json_pointer(field)] = value;
    TokenizerFiles changed = files;
    changed.tokenizer_json = json.dump();
    return changed;
  };
  ExpectError(ErrorCode::kUnsupported, {"model.type", "Unigram"},
              [&] { ReadHubVocabulary(with("/model/type", "Unigram")); });
  ExpectError(ErrorCode::kUnsupported, {"pre_tokenizer", "no known way"}, [&] {
    ReadHubVocabulary(with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "x"));
  });
  ExpectError(ErrorCode::kUnsupported, {"normalizer", "Lowercase"}, [&] {
    ReadHubVocabulary(with("/normalizer", {{"type", "Lowercase"}}));
  });
  ExpectError(ErrorCode::kCorruptData, {"id of a token"},
              [&] { ReadHubVocabulary(with("/added_tokens/0/id", -1)); });
  files.tokenizer_json = "[";
  ExpectError(ErrorCode::kCorruptData, {"tokenizer.json"}, [&] { ReadHubVocabulary(files); });
}

}  // namespace
}  // namespace switchyard
