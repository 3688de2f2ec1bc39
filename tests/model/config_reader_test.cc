#include "model/config_reader.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "switchyard/core/error.h"
#include "testing/goldens.h"
#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using testing::Cat;
using testing::ExpectError;

ConfigReader Parse(std::string_view text) { return ConfigReader::Parse("config.json", text); }

TEST(ConfigReader, ReadsEveryKindOfField) {
  ConfigReader config = Parse(R"({
    "hidden_size": 64, "rope_theta": 1e6, "int_as_number": 3, "negative": -2.5, "minus_one": -1,
    "tie": true, "model_type": "qwen3_moe", "eos_token_id": [1, 2], "pad_token_id": 7,
    "time_step_limit": [0.5, 2], "architectures": ["A", "B"],
    "rope_scaling": {"type": "yarn", "factor": 40}, "none": null})");
  EXPECT_EQ(config.file_name(), "config.json");
  EXPECT_EQ(config.Count("hidden_size", 1, 100), 64u);
  EXPECT_EQ(config.Number("rope_theta", 0, 1e9), 1e6);
  EXPECT_EQ(config.Number("int_as_number", 0, 10), 3.0);
  EXPECT_EQ(config.Number("negative", -10, 10), -2.5);
  EXPECT_EQ(config.Number("minus_one", -1, 1), -1.0);
  EXPECT_TRUE(config.Flag("tie"));
  EXPECT_EQ(config.Text("model_type"), "qwen3_moe");
  EXPECT_EQ(config.Counts("eos_token_id", 0, 10), (std::vector<size_t>{1, 2}));
  EXPECT_EQ(config.Counts("pad_token_id", 0, 10), std::vector<size_t>{7});
  EXPECT_EQ(config.Numbers("time_step_limit", 0, 10), (std::vector<double>{0.5, 2}));
  EXPECT_EQ(config.Texts("architectures"), (std::vector<std::string>{"A", "B"}));
  ConfigReader rope = config.Object("rope_scaling");
  EXPECT_EQ(rope.Text("type"), "yarn");
  EXPECT_EQ(rope.OptionalNumber("factor", 1, 100), 40.0);
  EXPECT_EQ(config.OptionalCount("none", 0, 1), std::nullopt);
  config.Finish();
}

TEST(ConfigReader, AbsentAndNullTakeTheDefault) {
  ConfigReader config = Parse(R"({"null": null})");
  for (std::string_view name : {"null", "absent"}) {
    EXPECT_FALSE(config.Has(name));
    EXPECT_EQ(config.Count(name, 1, 9, 5), 5u);
    EXPECT_EQ(config.OptionalCount(name, 1, 9), std::nullopt);
    EXPECT_EQ(config.Number(name, 0, 1, 0.5), 0.5);
    EXPECT_EQ(config.OptionalNumber(name, 0, 1), std::nullopt);
    EXPECT_TRUE(config.Flag(name, true));
    EXPECT_FALSE(config.Flag(name, false));
    EXPECT_EQ(config.Text(name, "x"), "x");
    EXPECT_EQ(config.Counts(name, 0, 9, {1, 2}), (std::vector<size_t>{1, 2}));
  }
  EXPECT_TRUE(config.IsNull("null"));
  EXPECT_FALSE(config.IsNull("absent"));
}

TEST(ConfigReader, PresentFieldBeatsTheDefault) {
  ConfigReader config = Parse(R"({"c": 3, "n": 0.25, "f": false, "t": "", "s": []})");
  EXPECT_TRUE(config.Has("f"));
  EXPECT_FALSE(config.IsNull("f"));
  EXPECT_EQ(config.Count("c", 1, 9, 5), 3u);
  EXPECT_EQ(config.Number("n", 0, 1, 0.5), 0.25);
  EXPECT_FALSE(config.Flag("f", true));
  EXPECT_EQ(config.Text("t", "x"), "");
  EXPECT_EQ(config.Counts("s", 0, 9, {1, 2}), std::vector<size_t>{});
  config.Finish();
}

TEST(ConfigReader, MissingFieldNamesFileFieldAndExpectation) {
  ConfigReader config = Parse(R"({"null": null})");
  constexpr auto kCode = ErrorCode::kCorruptData;
  ExpectError(kCode, {"config.json", "\"x\"", "missing", "a whole number from 1 to 9"},
              [&] { config.Count("x", 1, 9); });
  ExpectError(kCode, {"\"null\"", "is null", "a whole number"},
              [&] { config.Count("null", 1, 9); });
  ExpectError(kCode, {"\"x\"", "missing", "a number from -1 to 0.5"},
              [&] { config.Number("x", -1, 0.5); });
  ExpectError(kCode, {"\"x\"", "missing", "true or false"}, [&] { config.Flag("x"); });
  ExpectError(kCode, {"\"x\"", "missing", "a string"}, [&] { config.Text("x"); });
  ExpectError(kCode, {"\"x\"", "missing", "array"}, [&] { config.Counts("x", 0, 1); });
  ExpectError(kCode, {"\"x\"", "missing", "an array"}, [&] { config.Numbers("x", 0, 1); });
  ExpectError(kCode, {"\"x\"", "missing", "an array of strings"}, [&] { config.Texts("x"); });
  ExpectError(kCode, {"\"x\"", "missing", "an object"}, [&] { config.Object("x"); });
}

TEST(ConfigReader, CountRefusesEverythingElse) {
  const std::pair<std::string_view, std::string_view> values[] = {
      {"-1", "found -1"},
      {"-0", "found -0"},
      {"8.0", "found 8.0"},
      {"1e2", "found 1e2"},
      {"true", "found true"},
      {"\"8\"", "found \"8\""},
      {"[8]", "found [8]"},
      {"{\"a\": 8}", "found {\"a\": 8}"},
      {"0", "found 0"},
      {"101", "found 101"},
      {"18446744073709551615", "found 18446744073709551615"},
      {"18446744073709551616", "found 18446744073709551616"},
      {"-99999999999999999999", "found -99999999999999999999"}};
  for (const auto& [value, found] : values) {
    ConfigReader config = Parse(Cat({"{\"n\": ", value, "}"}));
    ExpectError(ErrorCode::kCorruptData,
                {"config.json", "\"n\"", "a whole number from 1 to 100", found},
                [&] { config.Count("n", 1, 100); });
    ExpectError(ErrorCode::kCorruptData, {"\"n\"", found}, [&] { config.Count("n", 1, 100, 5); });
    ExpectError(ErrorCode::kCorruptData, {"\"n\"", found},
                [&] { config.OptionalCount("n", 1, 100); });
  }
}

TEST(ConfigReader, CountReachesTheWholeRange) {
  ConfigReader config = Parse(R"({"max": 18446744073709551615, "zero": 0})");
  constexpr size_t kMax = std::numeric_limits<size_t>::max();
  EXPECT_EQ(config.Count("max", 0, kMax), kMax);
  EXPECT_EQ(config.Count("zero", 0, 0), 0u);
}

TEST(ConfigReader, NumberRefusesEverythingElse) {
  for (std::string_view value :
       {"true", "\"1\"", "[1]", "{}", "-0.5", "1.5", "1e300", "99999999999999999999"}) {
    ConfigReader config = Parse(Cat({"{\"n\": ", value, "}"}));
    ExpectError(ErrorCode::kCorruptData, {"config.json", "\"n\"", "a number from 0 to 1", "found"},
                [&] { config.Number("n", 0, 1); });
    ExpectError(ErrorCode::kCorruptData, {"\"n\""}, [&] { config.Number("n", 0, 1, 0.5); });
    ExpectError(ErrorCode::kCorruptData, {"\"n\""}, [&] { config.OptionalNumber("n", 0, 1); });
  }
}

TEST(ConfigReader, OtherGettersRefuseWrongTypes) {
  constexpr auto kCode = ErrorCode::kCorruptData;
  ConfigReader config =
      Parse(R"({"n": 1, "s": "x", "a": [1, -1], "t": ["x", 3], "o": {"p": 1.5}})");
  ExpectError(kCode, {"\"n\"", "true or false", "found 1"}, [&] { config.Flag("n"); });
  ExpectError(kCode, {"\"s\"", "true or false", "found \"x\""}, [&] { config.Flag("s", true); });
  ExpectError(kCode, {"\"n\"", "a string", "found 1"}, [&] { config.Text("n"); });
  ExpectError(kCode, {"\"a\"", "a string", "found [1, -1]"}, [&] { config.Text("a", "x"); });
  ExpectError(kCode, {"\"a[1]\"", "from 0 to 9", "found -1"}, [&] { config.Counts("a", 0, 9); });
  ExpectError(kCode, {"\"s\"", "array", "found \"x\""}, [&] { config.Counts("s", 0, 9, {}); });
  ExpectError(kCode, {"\"n\"", "from 2 to 9", "found 1"}, [&] { config.Counts("n", 2, 9); });
  ExpectError(kCode, {"\"a[1]\"", "found -1"}, [&] { config.Numbers("a", 0, 9); });
  ExpectError(kCode, {"\"n\"", "an array", "found 1"}, [&] { config.Numbers("n", 0, 9); });
  ExpectError(kCode, {"\"t[1]\"", "a string", "found 3"}, [&] { config.Texts("t"); });
  ExpectError(kCode, {"\"s\"", "an array of strings"}, [&] { config.Texts("s"); });
  ExpectError(kCode, {"\"n\"", "an object", "found 1"}, [&] { config.Object("n"); });
  ConfigReader sub = config.Object("o");
  ExpectError(kCode, {"config.json", "\"o.p\"", "found 1.5"}, [&] { sub.Count("p", 0, 9); });
  ExpectError(kCode, {"\"o.q\"", "missing"}, [&] { sub.Count("q", 0, 9); });
}

TEST(ConfigReader, LongValuesAreCutInMessages) {
  std::string text = "{\"long\": [";
  for (int i = 0; i < 1000; ++i) text += "\"\xc3\xa9\", ";
  text += Cat({"1], \"s\": \"", std::string(1000, 'y'), "\"}"});
  for (std::string_view name : {"long", "s"}) {
    ConfigReader config = Parse(text);
    try {
      config.Flag(name);
      FAIL();
    } catch (const Error& error) {
      EXPECT_LT(error.message().size(), 200u) << error.message();
      EXPECT_NE(error.message().find("..."), std::string::npos);
    }
  }
}

TEST(ConfigReader, UnknownFieldIsRefusedByName) {
  ConfigReader config = Parse(R"({"hidden_size": 64, "foo": 3})");
  config.Count("hidden_size", 1, 100);
  ExpectError(ErrorCode::kUnsupported,
              {"config.json: unknown field \"foo\" (value 3): it may change the mathematics, so "
               "the model is refused"},
              [&] { config.Finish(); });
}

TEST(ConfigReader, EveryUnknownFieldIsNamed) {
  ConfigReader config = Parse(R"({"a": 1, "b": {"c": true}, "d": "x", "e": [1], "known": 1})");
  config.Count("known", 0, 1);
  ExpectError(ErrorCode::kUnsupported,
              {"4 unknown fields", "\"a\" (value 1)", "\"b\" (value {\"c\": true})",
               "\"d\" (value \"x\")", "\"e\" (value [1])"},
              [&] { config.Finish(); });
}

TEST(ConfigReader, LongListOfUnknownFieldsEndsWithACount) {
  std::string text = "{\"x0\": 0";
  for (int i = 1; i < 60; ++i) text += Cat({", \"x", std::to_string(i), "\": 0"});
  const ConfigReader config = Parse(text + "}");
  ExpectError(ErrorCode::kUnsupported, {"60 unknown fields", "\"x0\"", "and 10 more"},
              [&] { config.Finish(); });
}

TEST(ConfigReader, FieldsOfSubobjectsAreCheckedByTheParent) {
  ConfigReader config =
      Parse(R"({"rope_scaling": {"type": "x", "foo": 1, "inner": {"bar": 2, "n": null}}})");
  {
    ConfigReader rope = config.Object("rope_scaling");
    rope.Text("type");
    ConfigReader inner = rope.Object("inner");
    ExpectError(ErrorCode::kUnsupported, {"\"rope_scaling.inner.bar\" (value 2)"},
                [&] { inner.Finish(); });
  }
  ExpectError(ErrorCode::kUnsupported,
              {"2 unknown fields", "\"rope_scaling.foo\" (value 1)",
               "\"rope_scaling.inner.bar\" (value 2)"},
              [&] { config.Finish(); });
}

TEST(ConfigReader, IgnoredAndNullFieldsPassFinish) {
  ConfigReader config = Parse(R"({"torch_dtype": "bfloat16", "old": {"deep": 1}, "none": null})");
  config.Ignore({"torch_dtype", "old", "not_there"});
  config.Finish();
}

TEST(ConfigReader, HasAndNamesDoNotMarkAsRead) {
  const ConfigReader config = Parse(R"({"b": 1, "a": null})");
  EXPECT_TRUE(config.Has("b"));
  EXPECT_TRUE(config.IsNull("a"));
  EXPECT_EQ(config.Names(), (std::vector<std::string>{"a", "b"}));
  ExpectError(ErrorCode::kUnsupported, {"\"b\""}, [&] { config.Finish(); });
}

TEST(ConfigReader, RefuseNamesFieldValueAndReason) {
  ConfigReader config = Parse(R"({"o": {"act": "relu6"}})");
  const ConfigReader sub = config.Object("o");
  ExpectError(ErrorCode::kUnsupported,
              {"config.json: field \"o.act\" (value \"relu6\"): only silu is known"},
              [&] { sub.Refuse("act", "only silu is known"); });
  ExpectError(ErrorCode::kUnsupported, {"\"o.x\" (absent): is needed"},
              [&] { sub.Refuse("x", "is needed"); });
}

TEST(ConfigReader, SubreaderKeepsTheDocumentAlive) {
  const auto make = [] { return Parse(R"({"o": {"n": 5}})").Object("o"); };
  ConfigReader sub = make();
  ConfigReader moved = std::move(sub);
  EXPECT_EQ(moved.Count("n", 0, 9), 5u);
  moved.Finish();
}

TEST(ConfigReader, BadJsonNamesLineAndColumn) {
  ExpectError(ErrorCode::kCorruptData, {"config.json", "not valid JSON", "line 2, column 7"},
              [] { Parse("{\"a\": 1,\n  \"b\" 2}"); });
  constexpr std::string_view kBad[] = {"{",
                                       "{\"a\": 1",
                                       "{\"a\": 1,}",
                                       "{} {}",
                                       "{a: 1}",
                                       "{\"a\": 01}",
                                       "{\"a\": .5}",
                                       "{\"a\": 'x'}",
                                       "// comment\n{}",
                                       "{\"a\": \"\t\"}",
                                       "{\"a\": \"\\ud800\"}",
                                       "{\"a\": \"\xff\"}",
                                       "{\"a\": \"\xed\xa0\x80\"}",
                                       "\xff\xfe{\0}\0",
                                       "{\"a\": \"x",
                                       "nul"};
  for (std::string_view text : kBad) {
    ExpectError(ErrorCode::kCorruptData, {"config.json", "not valid JSON", "line", "column"},
                [&] { Parse(text); });
  }
}

TEST(ConfigReader, NanAndInfinityAreNoJson) {
  for (std::string_view value : {"NaN", "Infinity", "-Infinity", "nan", "1e400", "-1e400"}) {
    ExpectError(ErrorCode::kCorruptData, {"config.json", "not valid JSON"}, [&] {
      Parse(Cat({"{\"a\": ", value, "}"}));
    });
  }
}

TEST(ConfigReader, NumberThatOverflowsNamesLineAndColumn) {
  ExpectError(ErrorCode::kCorruptData, {"'1e400'", "line 1, column 11"},
              [] { Parse("{\"a\": 1e400}"); });
  ExpectError(ErrorCode::kCorruptData, {"'1e400'", "line 3, column 6"},
              [] { Parse("{\n\"a\":\n 1e400}"); });
}

TEST(ConfigReader, TextThatIsNoObjectIsRefused) {
  for (std::string_view text : {"[]", "1", "\"x\"", "null", "true", "[{}]"}) {
    ExpectError(ErrorCode::kCorruptData,
                {"config.json", "expected a JSON object", Cat({"found ", text})},
                [&] { Parse(text); });
  }
  for (std::string_view text : {"", " \n\t\r "}) {
    ExpectError(ErrorCode::kCorruptData, {"config.json", "is empty"}, [&] { Parse(text); });
  }
}

TEST(ConfigReader, NulDoesNotHideWhatFollows) {
  using std::string_view_literals::operator""sv;
  ExpectError(ErrorCode::kCorruptData, {"config.json", "NUL at byte 2"},
              [] { Parse("{}\0{\"a\": 1}"sv); });
}

TEST(ConfigReader, DuplicateKeysAreRefused) {
  ExpectError(ErrorCode::kCorruptData, {"config.json", "\"a\"", "twice", "1", "2"},
              [] { Parse(R"({"a": 1, "b": 0, "a": 2})"); });
  ExpectError(ErrorCode::kCorruptData, {"\"o.p.a\"", "twice"},
              [] { Parse(R"({"o": {"p": {"a": 1, "a": 1}}})"); });
  ExpectError(ErrorCode::kCorruptData, {"\"\"", "twice"}, [] { Parse(R"({"": 1, "": 1})"); });
}

TEST(ConfigReader, DepthIsLimited) {
  const auto nested = [](size_t depth) {  // the object and depth - 1 arrays in it
    return Cat({"{\"a\": ", std::string(depth - 1, '['), std::string(depth - 1, ']'), "}"});
  };
  Parse(nested(ConfigReader::kMaxDepth));
  ExpectError(ErrorCode::kCorruptData, {"config.json", "nested", "64"},
              [&] { Parse(nested(ConfigReader::kMaxDepth + 1)); });
  ExpectError(ErrorCode::kCorruptData, {"nested"}, [] { Parse(std::string(1 << 20, '[')); });
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  ExpectError(ErrorCode::kCorruptData, {"nested"}, [&] { Parse(objects); });
}

TEST(ConfigReader, SizeIsLimited) {
  std::string values = "{\"a\": [0";
  for (size_t i = 0; i < ConfigReader::kMaxValues; ++i) values += ",0";
  ExpectError(ErrorCode::kCorruptData, {"config.json", "more than 2097152 values"},
              [&] { Parse(values + "]}"); });
  const std::string spaces(ConfigReader::kMaxBytes + 1, ' ');
  ExpectError(ErrorCode::kCorruptData, {"config.json", "67108865 bytes"}, [&] { Parse(spaces); });
}

TEST(ConfigReader, ByteOrderMarkIsSkipped) {
  EXPECT_TRUE(Parse("\xef\xbb\xbf{\"a\": 1}").Has("a"));
}

TEST(QuoteForMessage, EscapesAndCuts) {
  EXPECT_EQ(QuoteForMessage("plain"), "\"plain\"");
  EXPECT_EQ(QuoteForMessage("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(QuoteForMessage("\n\x1b[31m"), "\"\\x0a\\x1b[31m\"");
  EXPECT_EQ(QuoteForMessage("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"),
            "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
  // Bytes that are no UTF-8: a lone lead, a long form, a surrogate, past U+10FFFF.
  EXPECT_EQ(QuoteForMessage("\xc3"), "\"\\xc3\"");
  EXPECT_EQ(QuoteForMessage("\xc0\x80"), "\"\\xc0\\x80\"");
  EXPECT_EQ(QuoteForMessage("\xed\xa0\x80"), "\"\\xed\\xa0\\x80\"");
  EXPECT_EQ(QuoteForMessage("\xf4\x90\x80\x80"), "\"\\xf4\\x90\\x80\\x80\"");
  EXPECT_EQ(QuoteForMessage("abcdef", 3), "\"abc...\"");
  EXPECT_EQ(QuoteForMessage("a\xc3\xa9", 2), "\"a...\"");
}

// Every configuration of the golden set is JSON that we can read.
TEST(ConfigReader, ParsesAllGoldenConfigs) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t num_read = 0;
  for (const auto& golden : std::filesystem::directory_iterator(*testing::GoldenDir() / "models")) {
    for (const char* name : {"config.json", "generation_config.json"}) {
      std::ifstream file(golden.path() / "checkpoint" / name, std::ios::binary);
      if (!file) continue;
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      EXPECT_FALSE(ConfigReader::Parse(name, text).Names().empty()) << golden.path();
      ++num_read;
    }
  }
  EXPECT_GE(num_read, 56u);
}

}  // namespace
}  // namespace switchyard
