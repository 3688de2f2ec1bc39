// Errors and options of the tokenizer.
#include "switchyard/text/tokenizer.h"

#include <thread>

#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using Ids = std::vector<int32_t>;

testing::TextCase Small(const std::string& kind) {
  return {"small_" + kind, testing::SourceDir() / "tests/text/data" / kind};
}

template <typename Call>
Error Failure(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an error";
  return Error(ErrorCode::kInternal, "none");
}

TEST(Tokenizer, BadFilesAreNamed) {
  const TokenizerFiles good = Small("qwen_regex").Files();
  const auto message = [](const TokenizerFiles& files) {
    const Error error = Failure([&] { Tokenizer::Create(files); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruptData) << error.message();
    return error.message();
  };
  for (const std::string json : {"", "{", "null", "[]", "{}", R"({"version": "1.0"})", R"({"version": "9"})", "\xff",
                                 R"({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}})",
                                 R"({"version": "1.0", "decoder": 5, "model": {"type": "BPE"}})"}) {
    TokenizerFiles files = good;
    files.tokenizer_json = json;
    EXPECT_TRUE(message(files).starts_with("tokenizer.json: ")) << json;
  }
  TokenizerFiles files = good;
  files.tokenizer_config_json = "{";
  EXPECT_TRUE(message(files).starts_with("tokenizer_config.json: "));
  files.tokenizer_config_json = "[]";
  EXPECT_EQ(message(files), "tokenizer_config.json: expected an object");
  files.tokenizer_config_json = R"({"chat_template": "a\n{{ 1 + }}"})";
  EXPECT_TRUE(message(files).starts_with("tokenizer_config.json: chat_template: line 2: "));
  files.chat_template = "{% if %}";
  EXPECT_TRUE(message(files).starts_with("chat_template.jinja: line 1: "));
}

TEST(Tokenizer, TruncatedFilesNeverCrash) {
  const TokenizerFiles good = Small("metaspace_bytefallback").Files();
  for (size_t size = 0; size < good.tokenizer_json.size(); size += 97) {
    TokenizerFiles files = good;
    files.tokenizer_json.resize(size);
    EXPECT_THROW(Tokenizer::Create(files), Error) << size;
  }
}

TEST(Tokenizer, TemplateErrorsCanWait) {
  TokenizerFiles files = Small("qwen_regex").Files();
  files.chat_template = "{% if %}";
  const auto tokenizer = Tokenizer::Create(files, {.defer_template_errors = true});
  EXPECT_TRUE(tokenizer->HasChatTemplate());
  const Error error = Failure([&] { tokenizer->RenderChat({.messages_json = R"([{"role": "user"}])"}); });
  EXPECT_EQ(error.code(), ErrorCode::kCorruptData);
}

TEST(Tokenizer, WithoutTemplate) {
  TokenizerFiles files = Small("qwen_regex").Files();
  files.tokenizer_config_json.reset();
  // Without a list of added tokens in the config, this file would name the EOS.
  EXPECT_EQ(Tokenizer::Create(files)->eos_ids().size(), 1u);
  files.special_tokens_map_json.reset();
  const auto tokenizer = Tokenizer::Create(files);
  EXPECT_FALSE(tokenizer->HasChatTemplate());
  EXPECT_TRUE(tokenizer->eos_ids().empty());
  EXPECT_FALSE(tokenizer->bos_id().has_value());
  const Error error = Failure([&] { tokenizer->RenderChat({.messages_json = R"([{"role": "user"}])"}); });
  EXPECT_EQ(error.code(), ErrorCode::kFailedPrecondition);
}

TEST(Tokenizer, NamedTemplates) {
  TokenizerFiles files = Small("qwen_regex").Files();
  files.tokenizer_config_json =
      R"({"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]})";
  const auto tokenizer = Tokenizer::Create(files);
  const std::string messages = R"([{"role": "user", "content": "a"}])";
  EXPECT_EQ(tokenizer->RenderChat({.messages_json = messages}), "plain");
  EXPECT_EQ(tokenizer->RenderChat({.messages_json = messages, .tools_json = "[]"}), "tools");
}

TEST(Tokenizer, NamesOfSpecialTokens) {
  TokenizerFiles files = Small("qwen_regex").Files();
  files.special_tokens_map_json.reset();
  const auto with_eos = [&](const std::string& eos) {
    files.tokenizer_config_json = R"({"bos_token": null, "eos_token": )" + eos + "}";
    return Tokenizer::Create(files);
  };
  const int32_t end = Tokenizer::Create(files)->TokenToId("<|im_end|>").value();
  EXPECT_EQ(with_eos(R"("<|im_end|>")")->eos_ids(), Ids{end});
  EXPECT_EQ(with_eos(R"({"content": "<|im_end|>", "lstrip": false})")->eos_ids(), Ids{end});
  EXPECT_TRUE(with_eos("null")->eos_ids().empty());
  // As in transformers: a name makes a token special, and adds it if need be.
  const auto renamed = with_eos(R"("<think>")");
  EXPECT_EQ(renamed->Decode(renamed->Encode("a<think>b"), true), "ab");
  const auto added = with_eos(R"("<new>")");
  EXPECT_EQ(added->eos_ids(), Ids{static_cast<int32_t>(added->vocab_size()) - 1});
  EXPECT_EQ(added->Decode(added->Encode("a<new>b"), true), "ab");
}

TEST(Tokenizer, InvalidText) {
  const auto tokenizer = Small("qwen_regex").Load();
  const Error error = Failure([&] { tokenizer->Encode("abc\xff"); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.message(), "text: invalid UTF-8 at byte 3");
  EXPECT_TRUE(tokenizer->Encode("").empty());
  EXPECT_TRUE(tokenizer->Encode(std::string_view()).empty());
  EXPECT_EQ(tokenizer->Decode({}), "");
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(std::string_view("a\0b", 3))), std::string("a\0b", 3));
}

TEST(Tokenizer, IdsOutsideTheVocabulary) {
  const TokenizerFiles files = Small("qwen_regex").Files();
  const auto tokenizer = Tokenizer::Create(files);
  const auto bound = static_cast<int32_t>(tokenizer->id_bound());
  const std::string size = std::to_string(bound);
  for (const int32_t id : {-1, bound}) {
    const Error error = Failure([&] { tokenizer->Decode(Ids{0, id}); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.message(), "token id " + std::to_string(id) + " is outside the vocabulary of " + size + " ids");
  }
  // Rows of a padded embedding have no token, and decode to nothing.
  const auto padded = Tokenizer::Create(files, {.model_vocab_size = tokenizer->id_bound() + 10});
  const Ids ids = padded->Encode("ab");
  EXPECT_EQ(padded->Decode(Ids{bound, ids[0], bound + 9}), padded->Decode(Ids{ids[0]}));
  EXPECT_THROW(padded->Decode(Ids{bound + 10}), Error);
}

TEST(Tokenizer, ManyThreads) {
  const auto tokenizer = Small("qwen_regex").Load();
  const std::string text = "The quick brown fox, 中文 😀 <|im_end|> 12345";
  const Ids expected = tokenizer->Encode(text);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        EXPECT_EQ(tokenizer->Encode(text), expected);
        EXPECT_EQ(tokenizer->Decode(expected), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace switchyard
