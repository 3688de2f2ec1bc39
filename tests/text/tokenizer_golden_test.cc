// Every recorded tokenizer against the ids and texts that transformers gave.
#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using testing::OrderedJson;
using Ids = std::vector<int32_t>;

class TokenizerGolden : public testing::TextCaseTest {};

TEST_P(TokenizerGolden, Encode) {
  const auto tokenizer = GetParam().Load();
  const OrderedJson expected = GetParam().Expected("expected_tokens.json");
  EXPECT_EQ(tokenizer->vocab_size(), expected.at("vocab_size").get<size_t>());
  size_t passed = 0;
  for (const OrderedJson& test : expected.at("encode")) {
    const std::string text = test.at("text");
    SCOPED_TRACE(text);
    const Ids with = tokenizer->Encode(text);
    const Ids without = tokenizer->Encode(text, {.add_special_tokens = false});
    EXPECT_EQ(with, test.at("ids").get<Ids>());
    EXPECT_EQ(without, test.at("ids_without_special").get<Ids>());
    EXPECT_EQ(tokenizer->Decode(without), test.at("decoded").get<std::string>());
    EXPECT_EQ(tokenizer->Decode(with, true), test.at("decoded_skip_special").get<std::string>());
    passed += HasFailure() ? 0 : 1;
  }
  RecordProperty("cases", static_cast<int>(expected.at("encode").size()));
  RecordProperty("passed", static_cast<int>(passed));
}

TEST_P(TokenizerGolden, Decode) {
  const auto tokenizer = GetParam().Load();
  const OrderedJson expected = GetParam().Expected("expected_tokens.json");
  for (const OrderedJson& test : expected.at("decode")) {
    SCOPED_TRACE(test.dump());
    const Ids ids = test.at("ids").get<Ids>();
    EXPECT_EQ(tokenizer->Decode(ids), test.at("text").get<std::string>());
    if (test.contains("text_skip_special")) {
      EXPECT_EQ(tokenizer->Decode(ids, true), test.at("text_skip_special").get<std::string>());
    }
  }
  RecordProperty("cases", static_cast<int>(expected.at("decode").size()));
}

TEST_P(TokenizerGolden, TokensAndIds) {
  const auto tokenizer = GetParam().Load();
  for (int32_t id = 0; id < static_cast<int32_t>(tokenizer->id_bound()); ++id) {
    const auto token = tokenizer->IdToToken(id);
    ASSERT_TRUE(token.has_value()) << id;
    EXPECT_EQ(tokenizer->TokenToId(*token), id) << *token;
  }
  EXPECT_FALSE(tokenizer->IdToToken(static_cast<int32_t>(tokenizer->id_bound())).has_value());
  EXPECT_FALSE(tokenizer->IdToToken(-1).has_value());
  EXPECT_FALSE(tokenizer->TokenToId("no such token").has_value());
}

SY_FOR_EACH_TEXT_CASE(TokenizerGolden);

}  // namespace
}  // namespace switchyard
