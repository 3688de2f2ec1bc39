// Streaming: pieces together equal the whole, and no piece ends inside a character.
#include "switchyard/text/detokenizer.h"

#include <random>

#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using testing::OrderedJson;
using Ids = std::vector<int32_t>;

// Whether `text` is UTF-8 as a whole; the parser of the JSON library checks it.
bool IsUtf8(std::string_view text) {
  try {
    (void)testing::Json(std::string(text)).dump();
    return true;
  } catch (const testing::Json::exception&) {
    return false;
  }
}

std::string Stream(StreamingDetokenizer& stream, const Ids& ids) {
  std::string all;
  for (const int32_t id : ids) {
    const std::string_view piece = stream.Push(id);
    EXPECT_TRUE(IsUtf8(piece)) << "a piece ends inside a character";
    all += piece;
  }
  all += stream.Finish();
  return all;
}

class Detokenizer : public testing::TextCaseTest {};

TEST_P(Detokenizer, GoldenCases) {
  const auto tokenizer = GetParam().Load();
  const OrderedJson expected = GetParam().Expected("expected_tokens.json");
  for (const bool skip : {false, true}) {
    StreamingDetokenizer stream(*tokenizer, skip);
    for (const OrderedJson& test : expected.at("encode")) {
      const Ids ids = test.at("ids").get<Ids>();
      EXPECT_EQ(Stream(stream, ids), tokenizer->Decode(ids, skip)) << test.at("text");
    }
    for (const OrderedJson& test : expected.at("decode")) {
      const Ids ids = test.at("ids").get<Ids>();
      EXPECT_EQ(Stream(stream, ids), tokenizer->Decode(ids, skip)) << test.dump();
    }
  }
}

TEST_P(Detokenizer, RandomIds) {
  const auto tokenizer = GetParam().Load();
  const auto bound = static_cast<int32_t>(tokenizer->id_bound());
  // A fixed seed: a failure repeats.
  std::mt19937 random(20250131);
  std::uniform_int_distribution<int32_t> any(0, bound - 1);
  // The lowest ids hold single bytes in every recorded vocabulary, so this half mixes broken characters.
  std::uniform_int_distribution<int32_t> low(0, std::min(bound - 1, 262));
  for (int round = 0; round < 400; ++round) {
    Ids ids(1 + random() % 60);
    for (int32_t& id : ids) id = round % 2 == 0 ? any(random) : low(random);
    for (const bool skip : {false, true}) {
      StreamingDetokenizer stream(*tokenizer, skip);
      ASSERT_EQ(Stream(stream, ids), tokenizer->Decode(ids, skip)) << testing::Json(ids).dump();
    }
  }
}

TEST_P(Detokenizer, OutsideTheVocabulary) {
  const auto tokenizer = GetParam().Load();
  StreamingDetokenizer stream(*tokenizer);
  const auto bound = static_cast<int32_t>(tokenizer->id_bound());
  for (const int32_t id : {-1, bound, bound + 1000}) {
    EXPECT_THROW(stream.Push(id), Error) << id;
  }
  EXPECT_EQ(Stream(stream, tokenizer->Encode("abc", {.add_special_tokens = false})), "abc");
}

SY_FOR_EACH_TEXT_CASE(Detokenizer);

TEST(DetokenizerLifetime, OutlivesTheTokenizerAndMoves) {
  auto tokenizer = testing::TextCases().front().Load();
  const Ids ids = tokenizer->Encode("hello", {.add_special_tokens = false});
  StreamingDetokenizer first(*tokenizer);
  tokenizer.reset();
  StreamingDetokenizer second(std::move(first));
  EXPECT_EQ(Stream(second, ids), "hello");
}

}  // namespace
}  // namespace switchyard
