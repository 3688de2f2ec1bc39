// Encoding and decoding against transformers, hostile text, and bad inputs.
#include "switchyard/text/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "text/text_testing.h"

namespace switchyard {
namespace {

using testing::ErrorOf;
using testing::GoldenTokenizer;
using testing::GoldenTokenizers;
using testing::Ids;
using testing::Json;
using testing::LocalTokenizer;

TEST(TokenizerTest, EqualsTransformers) {
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    const Json expected = golden.Cases("expected_tokens.json");
    int right = 0;
    for (const Json& c : expected["encode"]) {
      const std::string text = c["text"];
      SCOPED_TRACE(text);
      const bool same = golden.tokenizer->Encode(text) == Ids(c["ids"]);
      EXPECT_TRUE(same);
      EXPECT_EQ(golden.tokenizer->Encode(text, {.add_special_tokens = false}),
                Ids(c["ids_without_special"]));
      EXPECT_EQ(golden.tokenizer->Decode(Ids(c["ids_without_special"]), false),
                c["decoded"].get<std::string>());
      EXPECT_EQ(golden.tokenizer->Decode(Ids(c["ids"]), true),
                c["decoded_skip_special"].get<std::string>());
      right += same;
    }
    int decoded = 0;
    for (const Json& c : expected["decode"]) {
      const std::string text = golden.tokenizer->Decode(Ids(c["ids"]), false);
      EXPECT_EQ(text, c["text"].get<std::string>()) << c["ids"];
      decoded += text == c["text"].get<std::string>();
      if (c.contains("text_skip_special")) {
        EXPECT_EQ(golden.tokenizer->Decode(Ids(c["ids"]), true),
                  c["text_skip_special"].get<std::string>())
            << c["ids"];
      }
    }
    std::printf("%s: encode %d of %zu, decode %d of %zu\n", golden.name.c_str(), right,
                expected["encode"].size(), decoded, expected["decode"].size());
  }
}

TEST(TokenizerTest, PlainSpecialTokensStayText) {
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    const std::vector<int32_t>& special = golden.tokenizer->special_ids();
    for (int32_t id : special) {
      const std::string token = golden.tokenizer->IdToToken(id);
      EXPECT_EQ(golden.tokenizer->TokenToId(token), id);
      const std::vector<int32_t> ids = golden.tokenizer->Encode(
          "a" + token + "b", {.add_special_tokens = false, .parse_special = false});
      for (int32_t got : ids) {
        // The unknown token is what characters outside the vocabulary become, not a control token.
        if (golden.tokenizer->IdToToken(got) == "<unk>") continue;
        EXPECT_FALSE(std::binary_search(special.begin(), special.end(), got)) << token;
      }
    }
  }
}

TEST(TokenizerTest, SentinelCharactersAreText) {
  const Tokenizer& tokenizer = *LocalTokenizer().tokenizer;
  const std::string text = "a\xEF\xB7\x91z\xEF\xB7\x94";
  const std::vector<int32_t> ids =
      tokenizer.Encode(text, {.add_special_tokens = false, .parse_special = false});
  EXPECT_EQ(ids, tokenizer.Encode(text, {.add_special_tokens = false}));
  EXPECT_EQ(tokenizer.Decode(ids), text);
}

TEST(TokenizerTest, Vocabulary) {
  const Tokenizer& tokenizer = *LocalTokenizer().tokenizer;
  EXPECT_EQ(tokenizer.TokenToId("<|im_end|>"), tokenizer.eos_id());
  EXPECT_FALSE(tokenizer.bos_id().has_value());
  EXPECT_EQ(tokenizer.special_ids(), (std::vector<int32_t>{700, 701, 702}));
  EXPECT_EQ(tokenizer.vocab_size(), 709u);
  EXPECT_FALSE(tokenizer.TokenToId("no such token at all").has_value());
  EXPECT_EQ(ErrorOf([&] { (void)tokenizer.IdToToken(709); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(tokenizer.Decode(std::vector<int32_t>{}), "");
  const std::vector<int32_t> padded = {709, 5000, 2147483647};
  EXPECT_EQ(tokenizer.Decode(padded), "");
  const std::vector<int32_t> negative = {-1};
  EXPECT_EQ(ErrorOf([&] { (void)tokenizer.Decode(negative); }).code(), ErrorCode::kInvalidArgument);
}

TEST(TokenizerTest, BadText) {
  const Tokenizer& tokenizer = *LocalTokenizer().tokenizer;
  for (const char* bad :
       {"abc\x80", "abc\xC0\x80", "abc\xED\xA0\x80", "abc\xF5\x80\x80\x80", "abc\xE4\xBD"}) {
    const Error error = ErrorOf([&] { (void)tokenizer.Encode(bad); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message().find("byte 3"), std::string::npos) << error.message();
  }
  EXPECT_TRUE(tokenizer.Encode("").empty());
  const std::string zero("a\0b", 3);
  EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(zero)), zero);
}

TEST(TokenizerTest, BadFiles) {
  const TokenizerFiles good = LocalTokenizer().files;
  auto expect = [](const TokenizerFiles& files, const std::string& name) {
    const Error error = ErrorOf([&] { (void)Tokenizer::Create(files); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruptData) << error.message();
    EXPECT_EQ(error.message().substr(0, name.size()), name) << error.message();
  };
  TokenizerFiles files = good;
  for (const std::string& bad :
       {std::string(), std::string("{}"), std::string("[1"), std::string(100000, '['),
        good.tokenizer_json.substr(0, good.tokenizer_json.size() / 2)}) {
    files.tokenizer_json = bad;
    expect(files, "tokenizer.json: ");
  }
  files = good;
  files.tokenizer_config_json = "[]";
  expect(files, "tokenizer_config.json: ");
  files.tokenizer_config_json = R"({"chat_template": [{"name": "default"}]})";
  expect(files, "tokenizer_config.json: ");
  files = good;
  files.chat_template_jinja = "line one\n{% if %}\n";
  expect(files, "chat_template.jinja: chat template \"default\": line 2");
  files.chat_template_jinja = "{% include 'other' %}";
  expect(files, "chat_template.jinja: ");
  files.chat_template_jinja = "\xFF";
  EXPECT_EQ(ErrorOf([&] { (void)Tokenizer::Create(files); }).code(), ErrorCode::kInvalidArgument);

  // A file cut anywhere is refused, not a crash.
  for (size_t size = 0; size + 2 < good.tokenizer_json.size(); size += 97) {
    TokenizerFiles cut = good;
    cut.tokenizer_json.resize(size);
    EXPECT_THROW((void)Tokenizer::Create(cut), Error);
  }
}

TEST(TokenizerTest, ConfigDecidesAboutBosAndEos) {
  TokenizerFiles files = LocalTokenizer().files;
  files.tokenizer_config_json =
      R"({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": true,
          "add_eos_token": true})";
  const auto tokenizer = Tokenizer::Create(files);
  const std::vector<int32_t> ids = tokenizer->Encode("hello");
  EXPECT_EQ(ids.front(), 701);
  EXPECT_EQ(ids.back(), 702);
  EXPECT_EQ(tokenizer->bos_id(), 701);
  EXPECT_FALSE(tokenizer->HasChatTemplate());
}

TEST(TokenizerTest, ConfigAddsTokens) {
  TokenizerFiles files = LocalTokenizer().files;
  files.tokenizer_config_json =
      R"({"pad_token": "[a new pad]", "additional_special_tokens": ["[extra]"]})";
  const auto tokenizer = Tokenizer::Create(files);
  EXPECT_EQ(tokenizer->vocab_size(), 711u);
  EXPECT_EQ(tokenizer->Encode("[extra]").size(), 1u);
  EXPECT_EQ(tokenizer->special_ids().size(), 5u);
}

TEST(TokenizerTest, SharedBetweenThreads) {
  const Tokenizer& tokenizer = *LocalTokenizer().tokenizer;
  const std::string text = "The quick brown fox, 12345 times. 你好 😀";
  const std::vector<int32_t> expected = tokenizer.Encode(text);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        if (tokenizer.Encode(text) != expected || tokenizer.Decode(expected) != text) ADD_FAILURE();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace switchyard
