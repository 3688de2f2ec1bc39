// Streaming equals decoding at once, and never shows half a character.
#include "switchyard/text/detokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "text/text_testing.h"

namespace switchyard {
namespace {

using testing::ErrorOf;
using testing::GoldenTokenizer;
using testing::GoldenTokenizers;
using testing::Ids;
using testing::Json;
using testing::LocalTokenizer;

// Whole sequences only; an unfinished one would fail this.
bool IsUtf8(const std::string& text) {
  return !Json(text).dump(-1, ' ', false, Json::error_handler_t::ignore).empty() &&
         Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)) == text;
}

void ExpectStreamsLikeDecode(const std::shared_ptr<const Tokenizer>& tokenizer,
                             const std::vector<int32_t>& ids) {
  for (bool skip_special : {true, false}) {
    StreamingDetokenizer stream(tokenizer, skip_special);
    std::string text;
    for (int32_t id : ids) {
      const std::string piece = stream.Add(id);
      ASSERT_TRUE(IsUtf8(piece)) << piece;
      text += piece;
    }
    text += stream.Finish();
    ASSERT_EQ(text, tokenizer->Decode(ids, skip_special)) << Json(ids).dump();
  }
}

TEST(StreamingDetokenizerTest, GoldenCases) {
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    const Json expected = golden.Cases("expected_tokens.json");
    for (const Json& c : expected["encode"])
      ExpectStreamsLikeDecode(golden.tokenizer, Ids(c["ids"]));
    for (const Json& c : expected["decode"])
      ExpectStreamsLikeDecode(golden.tokenizer, Ids(c["ids"]));
  }
}

TEST(StreamingDetokenizerTest, RandomIds) {
  std::mt19937 random(7);
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    const auto size = static_cast<int32_t>(golden.tokenizer->vocab_size());
    for (int round = 0; round < 300; ++round) {
      // Few different ids make runs of bytes, spaces and special tokens likely.
      std::vector<int32_t> choice(1 + random() % 12);
      for (int32_t& id : choice)
        id = static_cast<int32_t>(random() % static_cast<uint32_t>(size + 3));
      std::vector<int32_t> ids(random() % 60);
      for (int32_t& id : ids) {
        id = round % 2 ? choice[random() % choice.size()]
                       : static_cast<int32_t>(random() % static_cast<uint32_t>(size + 3));
      }
      ExpectStreamsLikeDecode(golden.tokenizer, ids);
    }
  }
}

TEST(StreamingDetokenizerTest, CharactersOverSeveralTokens) {
  const auto& tokenizer = LocalTokenizer().tokenizer;
  // Byte-level spelling of the four bytes of an emoji, and of a space.
  auto id = [&](const char* token) { return tokenizer->TokenToId(token).value(); };
  StreamingDetokenizer stream(tokenizer);
  EXPECT_EQ(stream.Add(id("ð")), "");
  EXPECT_EQ(stream.Add(id("Ł")), "");
  EXPECT_EQ(stream.Add(id("ĺ")), "");
  EXPECT_EQ(stream.Add(id("Ģ")), "😀");
  // A byte that can start nothing is certain at once; an unfinished start is certain with the next
  // byte.
  EXPECT_EQ(stream.Add(id("Ģ")), "\uFFFD");
  EXPECT_EQ(stream.Add(id("ð")), "");
  EXPECT_EQ(stream.Add(id("A")), "\uFFFDA");
  EXPECT_EQ(stream.Add(id("ð")), "");
  EXPECT_EQ(stream.Finish(), "\uFFFD");
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(ErrorOf([&] { stream.Add(-5); }).code(), ErrorCode::kInvalidArgument);
}

TEST(StreamingDetokenizerTest, ConstantWorkPerToken) {
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    const auto start = std::chrono::steady_clock::now();
    for (int32_t id = 0; id < static_cast<int32_t>(golden.tokenizer->vocab_size()); id += 7) {
      StreamingDetokenizer stream(golden.tokenizer, false);
      for (int i = 0; i < 1000; ++i) stream.Add(id);
      stream.Finish();
    }
    // About a microsecond each; quadratic work would take minutes.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
}

TEST(StreamingDetokenizerTest, OutlivesItsTokenizer) {
  auto tokenizer = Tokenizer::Create(LocalTokenizer().files);
  const std::vector<int32_t> ids = tokenizer->Encode("hello there");
  StreamingDetokenizer stream(tokenizer);
  tokenizer.reset();
  StreamingDetokenizer moved = std::move(stream);
  std::string text;
  for (int32_t id : ids) text += moved.Add(id);
  EXPECT_EQ(text + moved.Finish(), "hello there");
}

}  // namespace
}  // namespace switchyard
