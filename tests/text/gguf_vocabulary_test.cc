// Tokenizers out of GGUF metadata: the ids of the tokenizers that the metadata was made from, and
// what is refused.
#include "switchyard/text/gguf_vocabulary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <limits>
#include <map>
#include <sstream>

#include "text/text_testing.h"

namespace switchyard {
namespace {

using testing::ErrorOf;
using testing::GoldenTokenizer;
using testing::GoldenTokenizers;
using testing::Ids;
using testing::Json;
using testing::LocalTokenizer;
using testing::Request;
using testing::SetRecordedDay;

constexpr int32_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;

// A vocabulary that owns its texts.
struct Converted {
  std::deque<std::string> texts;
  GgufVocabulary vocabulary;

  std::string_view Keep(std::string text) { return texts.emplace_back(std::move(text)); }
};

std::string Replaced(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

// What llama.cpp's converter takes for a control token whatever tokenizer.json says.
bool LooksSpecial(std::string_view token) {
  const auto between = [&](std::string_view first, std::string_view last) {
    return token.starts_with(first) && token.ends_with(last);
  };
  return token == "<pad>" || token == "<mask>" || between("<|", "|>") || between("<｜", "｜>") ||
         between("<unused", ">");
}

std::string Content(const Json& token) {
  return token.is_object() ? token["content"].get<std::string>() : token.get<std::string>();
}

void ConvertTokens(const Json& tokenizer, Converted& out) {
  std::map<uint32_t, std::string> tokens;
  std::map<uint32_t, int32_t> types;
  for (const auto& [text, id] : tokenizer["model"]["vocab"].items()) tokens[id] = text;
  for (const Json& added : tokenizer["added_tokens"]) {
    const uint32_t id = added["id"];
    const std::string text = added["content"];
    const bool control = added["special"] || LooksSpecial(text);
    tokens[id] = control ? text : Replaced(text, "▁", " ");
    types[id] = control ? kControl : kUserDefined;
  }
  // A model has more rows than its tokenizer has tokens.
  const uint32_t size = tokens.rbegin()->first + 4;
  for (uint32_t id = 0; id < size; ++id) {
    const auto token = tokens.find(id);
    const bool is_byte = token != tokens.end() && token->second.size() == 6 &&
                         token->second.starts_with("<0x") && out.vocabulary.model != "gpt2";
    out.vocabulary.tokens.push_back(
        out.Keep(token == tokens.end() ? "[PAD" + std::to_string(id) + "]" : token->second));
    out.vocabulary.token_type.push_back(token == tokens.end() ? kUnused
                                        : types.contains(id)  ? types[id]
                                        : is_byte             ? kByte
                                                              : kNormal);
  }
}

std::vector<std::pair<std::string, std::string>> Merges(const Json& tokenizer) {
  std::vector<std::pair<std::string, std::string>> merges;
  for (const Json& merge : tokenizer["model"]["merges"]) merges.emplace_back(merge[0], merge[1]);
  return merges;
}

// SentencePiece numbers pieces in the order in which it made them, then the characters.
void ConvertScores(const Json& tokenizer, Converted& out) {
  std::map<std::string, float> scores;
  float next = 0;
  for (const auto& [left, right] : Merges(tokenizer)) {
    if (scores.emplace(left + right, next).second) next -= 1;
  }
  const GgufVocabulary& vocabulary = out.vocabulary;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const auto score = scores.find(std::string(vocabulary.tokens[id]));
    const bool normal = vocabulary.token_type[id] == kNormal;
    out.vocabulary.scores.push_back(!normal                 ? -1000.0f
                                    : score != scores.end() ? score->second
                                                            : next--);
  }
}

// Does what llama.cpp's converter does with the files of a model.
Converted Convert(const TokenizerFiles& files, const std::string& model, const std::string& pre) {
  const Json tokenizer = Json::parse(files.tokenizer_json);
  const Json config = Json::parse(files.tokenizer_config_json.value());
  Converted out;
  out.vocabulary.model = model;
  out.vocabulary.pre = pre;
  ConvertTokens(tokenizer, out);
  if (model == "llama") {
    ConvertScores(tokenizer, out);
  } else {
    for (const auto& [left, right] : Merges(tokenizer)) {
      std::string merge = left;
      merge += ' ';
      merge += right;
      out.vocabulary.merges.push_back(out.Keep(std::move(merge)));
    }
  }
  const auto id_of = [&](const char* name) -> std::optional<uint32_t> {
    if (!config.contains(name) || config[name].is_null()) return std::nullopt;
    const std::vector<std::string_view>& tokens = out.vocabulary.tokens;
    return std::find(tokens.begin(), tokens.end(), Content(config[name])) - tokens.begin();
  };
  out.vocabulary.bos_token_id = id_of("bos_token");
  out.vocabulary.eos_token_id = id_of("eos_token");
  out.vocabulary.unknown_token_id = id_of("unk_token");
  out.vocabulary.padding_token_id = id_of("pad_token");
  const Json& post_processor = tokenizer["post_processor"];
  if (config.contains("add_bos_token")) {
    out.vocabulary.add_bos_token = config["add_bos_token"].get<bool>();
  } else if (post_processor.is_object() && post_processor["type"] == "TemplateProcessing") {
    out.vocabulary.add_bos_token = post_processor["single"][0].contains("SpecialToken");
  }
  if (config.contains("chat_template")) out.vocabulary.chat_template = config["chat_template"];
  if (files.chat_template_jinja) out.vocabulary.chat_template = *files.chat_template_jinja;
  return out;
}

std::shared_ptr<const Tokenizer> Load(const Converted& converted) {
  return Tokenizer::CreateFromGguf(converted.vocabulary);
}

// A golden tokenizer as a GGUF file has it, and what of it no metadata can say.
struct Kind {
  const char* golden;
  const char* model;
  const char* pre;
  std::optional<bool> add_space_prefix = std::nullopt;
  const char* reason = "";                                // why cases may differ
  bool (*may_differ)(const std::string& text) = nullptr;  // whether the reason applies to a text
  int encode = 0, skip = 0, decode = 0, chat = 0;         // cases of the large set that do differ
};

bool ContainsAny(const std::string& text, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return text.find(part) != std::string::npos; });
}

const Kind kKinds[] = {
    {.golden = "gpt2_bytelevel", .model = "gpt2", .pre = "gpt-2"},
    {.golden = "llama3_regex", .model = "gpt2", .pre = "llama-bpe"},
    {.golden = "o200k_regex", .model = "gpt2", .pre = "gpt-4o"},
    {.golden = "qwen_regex", .model = "gpt2", .pre = "qwen2"},
    {.golden = "deepseek_regex",
     .model = "gpt2",
     .pre = "deepseek-v3",
     .reason = "the converter makes every <｜token｜> a control token, which decoding can skip",
     .may_differ =
         [](const std::string& text) {
           return ContainsAny(text, {"<｜User", "<｜Assistant", "<｜tool"});
         },
     .skip = 43,
     .decode = 5},
    {.golden = "gemma_bytefallback", .model = "gemma4", .pre = ""},
    {.golden = "gemma_bytefallback", .model = "llama", .pre = "default", .add_space_prefix = false},
    {.golden = "spm_prepend_bytefallback", .model = "llama", .pre = "default"},
    {.golden = "metaspace_bytefallback",
     .model = "llama",
     .pre = "default",
     .reason = "no field tells a space before every stretch of text from one before the whole text"
               " that does not start with a space",
     .may_differ =
         [](const std::string& text) {
           return text.starts_with(" ") || text.starts_with("▁") ||
                  ContainsAny(text, {"<unk>", "<s>", "</s>", "INST]", "_TOOLS]", "TOOL_"});
         },
     .encode = 46,
     .chat = 44},
    {.golden = "added_token_flags",
     .model = "gpt2",
     .pre = "dbrx",
     .reason = "no field says lstrip, rstrip or single_word",
     .may_differ =
         [](const std::string& text) {
           return ContainsAny(text, {"<L>", "<R>", "<LR>", "wholeword"});
         },
     .encode = 10},
};

// The golden tokenizers that a kind is about: of the small set, of the large, or of both.
std::vector<const GoldenTokenizer*> GoldensOf(const Kind& kind) {
  std::vector<const GoldenTokenizer*> found;
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    if (golden.name == kind.golden) found.push_back(&golden);
  }
  return found;
}

Converted Convert(const GoldenTokenizer& golden, const Kind& kind) {
  Converted converted = Convert(golden.files, kind.model, kind.pre);
  converted.vocabulary.add_space_prefix = kind.add_space_prefix;
  return converted;
}

// Counts the cases that differ, each of which must be one that may.
class Differences {
 public:
  explicit Differences(const Kind& kind) : kind_(kind) {}

  // Whether the case is the same.
  void Add(bool same, const std::string& text, const char* what) {
    if (same) return;
    ++count_;
    EXPECT_TRUE(kind_.may_differ != nullptr && kind_.may_differ(text)) << what << ": " << text;
  }
  int count() const { return count_; }

 private:
  const Kind& kind_;
  int count_ = 0;
};

TEST(GgufVocabularyTest, EqualsTheOriginal) {
  for (const Kind& kind : kKinds) {
    for (const GoldenTokenizer* golden : GoldensOf(kind)) {
      SCOPED_TRACE(std::string(kind.golden) + " as " + kind.model);
      const auto tokenizer = Load(Convert(*golden, kind));
      const Tokenizer& original = *golden->tokenizer;
      EXPECT_EQ(tokenizer->vocab_size(), original.vocab_size());
      EXPECT_EQ(tokenizer->bos_id(), original.bos_id());
      EXPECT_EQ(tokenizer->eos_id(), original.eos_id());
      const Json expected = golden->Cases("expected_tokens.json");
      Differences encode(kind), plain(kind), decode(kind), skip(kind), decode_skip(kind);
      for (const Json& c : expected["encode"]) {
        const std::string text = c["text"];
        encode.Add(tokenizer->Encode(text) == Ids(c["ids"]), text, "encode");
        plain.Add(
            tokenizer->Encode(text, {.add_special_tokens = false}) == Ids(c["ids_without_special"]),
            text, "encode without special tokens");
        decode.Add(tokenizer->Decode(Ids(c["ids_without_special"]), false) ==
                       c["decoded"].get<std::string>(),
                   text, "decode");
        skip.Add(
            tokenizer->Decode(Ids(c["ids"]), true) == c["decoded_skip_special"].get<std::string>(),
            text, "decode without special tokens");
      }
      for (const Json& c : expected["decode"]) {
        const std::string text = c["text"];
        decode.Add(tokenizer->Decode(Ids(c["ids"]), false) == text, text, "decode ids");
        if (!c.contains("text_skip_special")) continue;
        decode_skip.Add(
            tokenizer->Decode(Ids(c["ids"]), true) == c["text_skip_special"].get<std::string>(),
            text, "decode ids without special tokens");
      }
      std::printf("%s as %s: %zu texts, %zu id lists; differ: %d encoded, %d and %d decoded%s%s\n",
                  kind.golden, kind.model, expected["encode"].size(), expected["decode"].size(),
                  encode.count(), skip.count(), decode_skip.count(), kind.may_differ ? "; " : "",
                  kind.reason);
      EXPECT_EQ(encode.count(), kind.encode);
      EXPECT_EQ(plain.count(), kind.encode);
      EXPECT_EQ(decode.count(), 0);
      EXPECT_EQ(skip.count(), kind.skip);
      EXPECT_EQ(decode_skip.count(), kind.decode);
    }
  }
}

TEST(GgufVocabularyTest, ChatEqualsTheOriginal) {
  for (const Kind& kind : kKinds) {
    for (const GoldenTokenizer* golden : GoldensOf(kind)) {
      const Json expected = golden->Cases("expected_chat.json");
      if (expected.is_null()) continue;
      const auto tokenizer = Load(Convert(*golden, kind));
      Differences ids(kind);
      for (const Json& c : expected["cases"]) {
        SCOPED_TRACE(golden->name + " " + c["conversation"].dump() + " " + c["kwargs"].dump());
        const ChatRequest request = Request(c["messages"], c["kwargs"]);
        if (c.contains("error")) {
          EXPECT_EQ(ErrorOf([&] { tokenizer->RenderChat(request); }).message(),
                    ErrorOf([&] { golden->tokenizer->RenderChat(request); }).message());
          continue;
        }
        const std::string rendered = c["rendered"];
        SetRecordedDay(rendered);
        EXPECT_EQ(tokenizer->RenderChat(request), rendered);
        if (c.contains("ids"))
          ids.Add(tokenizer->ChatIds(request, false) == Ids(c["ids"]), rendered, "chat");
      }
      std::printf("%s as %s: %zu conversations; differ: %d\n", kind.golden, kind.model,
                  expected["cases"].size(), ids.count());
      EXPECT_EQ(ids.count(), kind.chat);
    }
  }
}

// How text is prepared and cut is what tokenizer.json says, to the letter.
TEST(GgufVocabularyTest, CutsTextAsTheOriginalFile) {
  for (const Kind& kind : kKinds) {
    for (const GoldenTokenizer* golden : GoldensOf(kind)) {
      if (std::string(kind.model) != "gpt2" || std::string(kind.pre) == "gpt-2") continue;
      const Json original = Json::parse(golden->files.tokenizer_json);
      const Json made =
          Json::parse(MakeTokenizerFiles(Convert(*golden, kind).vocabulary).tokenizer_json);
      EXPECT_EQ(made["pre_tokenizer"], original["pre_tokenizer"]) << kind.golden;
      EXPECT_EQ(made["normalizer"], original["normalizer"]) << kind.golden;
      EXPECT_EQ(made["decoder"], original["decoder"]) << kind.golden;
    }
  }
}

// The metadata of the tokenizer that is always there.
Converted Good() { return Convert(LocalTokenizer().files, "gpt2", "qwen2"); }

// A vocabulary of pieces, as SentencePiece makes them.
Converted GoodPieces() {
  Converted out;
  out.vocabulary.model = "llama";
  const struct {
    const char* text;
    float score;
    int32_t type;
  } pieces[] = {{"<unk>", 0, 2},      {"<s>", 0, kControl}, {"</s>", 0, kControl},
                {"<0x0A>", 0, kByte}, {"▁", -9, kNormal},   {"a", -10, kNormal},
                {"b", -11, kNormal},  {"c", -12, kNormal},  {"ab", -2, kNormal},
                {"bc", -1, kNormal},  {"▁a", -3, kNormal},  {"abc", -4, kNormal}};
  for (const auto& piece : pieces) {
    out.vocabulary.tokens.push_back(piece.text);
    out.vocabulary.scores.push_back(piece.score);
    out.vocabulary.token_type.push_back(piece.type);
  }
  return out;
}

// The names of tokenizer.ggml.pre that are known, out of the message about one that is not.
std::vector<std::string> KnownPreTokenizers() {
  Converted unknown = Good();
  unknown.vocabulary.pre = "?";
  const std::string message = ErrorOf([&] { Load(unknown); }).message();
  std::vector<std::string> names;
  const size_t first = message.find("one of ") + 7, last = message.find(", found");
  std::istringstream list(Replaced(message.substr(first, last - first), ",", " "));
  for (std::string name; list >> name;) names.push_back(name);
  return names;
}

TEST(GgufVocabularyTest, EveryPreTokenizerLoadsAndKeepsAllText) {
  const std::string text =
      "Hello there, I'LL  pay\t$1234567.89 \r\n\r\n  to 東京 and हिन्दी; ٣٤٥ naïve caf\u0065\u0301! "
      "x_y  <|im_end|> 가나다\n";
  const std::vector<std::string> names = KnownPreTokenizers();
  EXPECT_GE(names.size(), 60u);
  for (const std::string& name : names) {
    if (name == "gemma4") continue;  // of other vocabularies
    SCOPED_TRACE(name);
    Converted converted = Good();
    converted.vocabulary.pre = name;
    const auto tokenizer = Load(converted);
    const std::vector<int32_t> ids = tokenizer->Encode(text);
    const bool composed = tokenizer->Decode(ids, false) == Replaced(text, "e\u0301", "é");
    EXPECT_TRUE(composed || tokenizer->Decode(ids, false) == text);
  }
}

// Into how long runs of digits each kind cuts seven of them, of which all could be one token.
TEST(GgufVocabularyTest, PreTokenizersGroupDigits) {
  const std::map<std::string, std::vector<size_t>> expected = {
      {"gpt-2", {7}},
      {"starcoder", {1, 1, 1, 1, 1, 1, 1}},
      {"llama-bpe", {3, 3, 1}},
      {"glm4", {3, 3, 1}},
      {"qwen2", {1, 1, 1, 1, 1, 1, 1}},
      {"qwen35", {1, 1, 1, 1, 1, 1, 1}},
      {"deepseek-llm", {1, 1, 1, 1, 1, 1, 1}},
      {"deepseek-coder", {1, 1, 1, 1, 1, 1, 1}},
      {"deepseek-v3", {3, 3, 1}},
      {"gpt-4o", {3, 3, 1}},
      {"minimax-m2", {3, 3, 1}},
      {"tekken", {1, 1, 1, 1, 1, 1, 1}},
      {"kimi-k2", {3, 3, 1}},
      {"bailingmoe2", {1, 1, 1, 1, 1, 1, 1}},
      {"seed-coder", {1, 1, 1, 1, 1, 1, 1}},
      {"superbpe", {1, 3, 3}},
      {"cohere2moe", {1, 3, 3}},
      {"exaone-moe", {1, 1, 1, 1, 1, 1, 1}},
      {"minicpm5", {3, 3, 1}},
  };
  for (const auto& [name, lengths] : expected) {
    GgufVocabulary vocabulary;
    vocabulary.model = "gpt2";
    vocabulary.pre = name;
    vocabulary.tokens = {"1", "11", "111", "1111", "11111", "111111", "1111111"};
    vocabulary.merges = {"1 1",      "11 1",  "111 1",   "1111 1",  "11111 1",
                         "111111 1", "11 11", "111 111", "1111 11", "1111 111"};
    const auto tokenizer = Tokenizer::CreateFromGguf(vocabulary);
    std::vector<size_t> got;
    for (int32_t id : tokenizer->Encode("1111111")) got.push_back(tokenizer->IdToToken(id).size());
    EXPECT_EQ(got, lengths) << name;
  }
}

TEST(GgufVocabularyTest, WordsOfKimiEndAtHan) {
  GgufVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "kimi-k2";
  // "中" and "a中", as bytes.
  vocabulary.tokens = {"a", "ä", "¸", "Ń", "ä¸", "ä¸Ń", "aä¸Ń"};
  vocabulary.merges = {"ä ¸", "ä¸ Ń", "a ä¸Ń"};
  EXPECT_EQ(Tokenizer::CreateFromGguf(vocabulary)->Encode("a中"), (std::vector<int32_t>{0, 5}));
  vocabulary.pre = "qwen2";
  EXPECT_EQ(Tokenizer::CreateFromGguf(vocabulary)->Encode("a中"), (std::vector<int32_t>{6}));
}

TEST(GgufVocabularyTest, PiecesAreJoinedByScore) {
  const auto tokenizer = Load(GoodPieces());
  const auto pieces = [&](const std::string& text) {
    std::string joined;
    for (int32_t id : tokenizer->Encode(text, {.add_special_tokens = false}))
      joined += (joined.empty() ? "" : " ") + tokenizer->IdToToken(id);
    return joined;
  };
  // "bc" comes before "ab", then the rest of "abc" is joined from "a" and "bc".
  EXPECT_EQ(pieces("xabc"), "▁ <unk> abc");
  EXPECT_EQ(pieces("ab"), "▁ ab");
  EXPECT_EQ(pieces("a b\nb"), "▁a ▁ b <0x0A> b");
  EXPECT_EQ(pieces("<s>a"), "<s> ▁a");
  EXPECT_EQ(tokenizer->Encode("a"), (std::vector<int32_t>{1, 10}));
  EXPECT_EQ(tokenizer->bos_id(), 1);  // the ids of SentencePiece, where the file does not say
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("ab c")), "ab c");

  Converted no_prefix = GoodPieces();
  no_prefix.vocabulary.add_space_prefix = false;
  no_prefix.vocabulary.add_bos_token = false;
  no_prefix.vocabulary.add_eos_token = true;
  EXPECT_EQ(Load(no_prefix)->Encode("a b"), (std::vector<int32_t>{5, 4, 6, 2}));
  EXPECT_EQ(Load(no_prefix)->Decode(Load(no_prefix)->Encode(" a")), " a");
}

// Converters write the runs of spaces of Gemma with spaces, which its merges are not about.
TEST(GgufVocabularyTest, UserDefinedSpacesAreTheModelsOwn) {
  GgufVocabulary vocabulary;
  vocabulary.model = "gemma4";
  vocabulary.tokens = {"a", "▁", "  ", "b ", "b▁"};
  vocabulary.token_type = {kNormal, kNormal, kUserDefined, kUserDefined, kNormal};
  vocabulary.merges = {"▁ ▁"};
  const auto tokenizer = Tokenizer::CreateFromGguf(vocabulary);
  EXPECT_EQ(tokenizer->Encode("a  a a"), (std::vector<int32_t>{0, 2, 0, 1, 0}));
  EXPECT_EQ(tokenizer->IdToToken(2), "▁▁");
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{0, 2, 0}), "a  a");
  EXPECT_EQ(tokenizer->IdToToken(3), "b ");  // the other text has a token of its own
}

TEST(GgufVocabularyTest, BosAndEosAsTheFileSays) {
  Converted converted = Good();
  EXPECT_EQ(Load(converted)->Encode("a").size(), 1u);
  converted.vocabulary.bos_token_id = 701;
  EXPECT_EQ(Load(converted)->Encode("a").size(), 1u);
  converted.vocabulary.add_bos_token = true;
  converted.vocabulary.add_eos_token = true;
  const std::vector<int32_t> ids = Load(converted)->Encode("a");
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids.front(), 701);
  EXPECT_EQ(ids.back(), 702);
  converted.vocabulary.pre = "llama-bpe";
  converted.vocabulary.add_bos_token.reset();
  converted.vocabulary.add_eos_token.reset();
  EXPECT_EQ(Load(converted)->Encode("a").front(), 701);  // what the kind does
  converted.vocabulary.bos_token_id.reset();
  EXPECT_EQ(Load(converted)->Encode("a").size(), 1u);
}

// The padding id of a model may be any token's; text with it must stay text.
TEST(GgufVocabularyTest, OrdinaryTokensDoNotBecomeSpecial) {
  Converted converted = Good();
  const std::vector<int32_t> special = Load(converted)->special_ids();
  const std::vector<int32_t> ids = Load(converted)->Encode("oh!!");
  converted.vocabulary.padding_token_id = Load(converted)->TokenToId("!");
  converted.vocabulary.unknown_token_id = converted.vocabulary.padding_token_id;
  EXPECT_EQ(Load(converted)->special_ids(), special);
  EXPECT_EQ(Load(converted)->Encode("oh!!"), ids);

  Converted pieces = GoodPieces();
  std::fill(pieces.vocabulary.token_type.begin(), pieces.vocabulary.token_type.end(), kNormal);
  EXPECT_TRUE(Load(pieces)->special_ids().empty());
  pieces.vocabulary.token_type.clear();  // where nothing is said, the usual ids are BOS and EOS
  EXPECT_EQ(Load(pieces)->special_ids(), (std::vector<int32_t>{1, 2}));
}

TEST(GgufVocabularyTest, TokensThatAreNone) {
  Converted converted = Good();
  const size_t size = Load(converted)->vocab_size();
  const int32_t last = static_cast<int32_t>(converted.vocabulary.tokens.size());
  converted.vocabulary.tokens.insert(converted.vocabulary.tokens.end(), {"", "", "[PADx]"});
  converted.vocabulary.token_type.insert(converted.vocabulary.token_type.end(),
                                         {kNormal, kNormal, kUnused});
  const auto tokenizer = Load(converted);
  EXPECT_EQ(tokenizer->vocab_size(), size + 1);
  EXPECT_EQ(tokenizer->IdToToken(last + 2), "[PADx]");
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{last - 1, last, last + 1}), "");
}

TEST(GgufVocabularyTest, NamedChatTemplates) {
  Converted converted = Good();
  converted.vocabulary.chat_template = "plain {{ eos_token }}";
  converted.vocabulary.named_chat_templates = {{"tool_use", "tools"}};
  const auto tokenizer = Load(converted);
  ChatRequest request;
  request.messages_json = "[]";
  EXPECT_EQ(tokenizer->RenderChat(request), "plain <|im_end|>");
  request.tools_json = R"([{"name": "f"}])";
  EXPECT_EQ(tokenizer->RenderChat(request), "tools");
  converted.vocabulary.chat_template.clear();
  converted.vocabulary.named_chat_templates.clear();
  EXPECT_FALSE(Load(converted)->HasChatTemplate());
}

// What a change to good metadata is refused with.
void ExpectRefused(Converted converted, void (*change)(GgufVocabulary&), const std::string& message,
                   ErrorCode code = ErrorCode::kCorruptData) {
  change(converted.vocabulary);
  const Error error = ErrorOf([&] { Load(converted); });
  EXPECT_EQ(error.code(), code) << error.message();
  EXPECT_EQ(error.message().substr(0, message.size()), message);
  EXPECT_EQ(error.message().find('\n'), std::string::npos);
}

TEST(GgufVocabularyTest, RefusesOtherKinds) {
  const ErrorCode code = ErrorCode::kUnsupported;
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.model = "bert"; },
      "tokenizer.ggml.model: expected one of gpt2, llama, gemma4 (WordPiece, Unigram and other "
      "kinds are not read), found \"bert\"",
      code);
  for (const char* model : {"t5", "rwkv", "plamo2", "none", "", "GPT2"}) {
    Converted converted = Good();
    converted.vocabulary.model = model;
    EXPECT_EQ(ErrorOf([&] { Load(converted); }).code(), code) << model;
  }
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.pre = "qwen\xFF\n2"; },
      "tokenizer.ggml.pre: expected one of gemma4, default, gpt-2,", code);
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.pre = ""; }, "tokenizer.ggml.pre: expected one of", code);
  ExpectRefused(
      GoodPieces(), [](GgufVocabulary& v) { v.remove_extra_whitespaces = true; },
      "tokenizer.ggml.remove_extra_whitespaces: expected false, for tokenizers that keep spaces as "
      "they are, found true",
      code);
}

TEST(GgufVocabularyTest, RefusesBadTokens) {
  ExpectRefused(
      Good(),
      [](GgufVocabulary& v) {
        v.tokens.clear();
        v.token_type.clear();
      },
      "tokenizer.ggml.tokens: expected an array of at least one string, found none");
  ExpectRefused(
      Good(),
      [](GgufVocabulary& v) {
        v.tokens = {"", "[PAD1]"};
        v.token_type = {kNormal, kUnused};
        v.merges.clear();
        v.eos_token_id.reset();
        v.padding_token_id.reset();
      },
      "tokenizer.ggml.tokens: expected at least one token, found only empty and unused ones");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.tokens.resize((size_t{1} << 22) + 1); },
      "tokenizer.ggml.tokens: expected at most 4194304, found 4194305");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.tokens[7] = v.tokens[3]; },
      "tokenizer.ggml.tokens[7]: expected a text of its own, found that of token 3");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.tokens[7] = "ab\xC0\x80"; },
      "tokenizer.ggml.tokens[7]: expected UTF-8, found another byte at 2");
  for (const char* bad :
       {"\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE4\xBD", "\xF0\x8F\xBF\xBF"}) {
    Converted converted = Good();
    converted.vocabulary.tokens[7] = bad;
    EXPECT_EQ(ErrorOf([&] { Load(converted); }).code(), ErrorCode::kCorruptData) << bad;
  }
  static const std::string kLong(65537, 'x');
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.tokens[7] = kLong; },
      "tokenizer.ggml.tokens[7]: expected at most 65536 bytes, found 65537");
  ExpectRefused(
      GoodPieces(), [](GgufVocabulary& v) { v.tokens[7] = std::string_view(kLong).substr(0, 513); },
      "tokenizer.ggml.tokens[7]: expected a piece of at most 512 bytes, found 513");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.token_type.pop_back(); },
      "tokenizer.ggml.token_type: expected 712, one for each token, found 711");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.token_type[5] = 7; },
      "tokenizer.ggml.token_type[5]: expected 1 to 6, found 7");
}

TEST(GgufVocabularyTest, RefusesBadMergesAndScores) {
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges.clear(); },
      "tokenizer.ggml.merges: expected an array of at least one string, found none");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges.resize((size_t{1} << 22) + 1); },
      "tokenizer.ggml.merges: expected at most 4194304, found 4194305");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges[2] = "ab"; },
      "tokenizer.ggml.merges[2]: expected two tokens with a space between, found no space");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges[2] = ""; },
      "tokenizer.ggml.merges[2]: expected two tokens with a space between, found no space");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges[2] = "no-such-token a"; },
      "tokenizer.ggml.merges[2]: expected a left part that is a token, found one that is not");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges[2] = "a no-such-token"; },
      "tokenizer.ggml.merges[2]: expected a right part that is a token, found one that is not");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.merges[2] = "! !"; },
      "tokenizer.ggml.merges[2]: expected a result that is a token, found one that is not");
  ExpectRefused(
      GoodPieces(), [](GgufVocabulary& v) { v.scores.clear(); },
      "tokenizer.ggml.scores: expected 12, one for each token, found 0");
  ExpectRefused(
      GoodPieces(), [](GgufVocabulary& v) { v.scores.push_back(0); },
      "tokenizer.ggml.scores: expected 12, one for each token, found 13");
  ExpectRefused(
      GoodPieces(),
      [](GgufVocabulary& v) { v.scores[4] = std::numeric_limits<float>::quiet_NaN(); },
      "tokenizer.ggml.scores[4]: expected a finite number, found nan");
}

TEST(GgufVocabularyTest, RefusesBadIdsAndTemplates) {
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.bos_token_id = 712; },
      "tokenizer.ggml.bos_token_id: expected an id below 712, found 712");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.eos_token_id = 0xFFFFFFFF; },
      "tokenizer.ggml.eos_token_id: expected an id below 712, found 4294967295");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.eot_token_id = 712; }, "tokenizer.ggml.eot_token_id: ");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.unknown_token_id = 712; },
      "tokenizer.ggml.unknown_token_id: ");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.seperator_token_id = 712; },
      "tokenizer.ggml.seperator_token_id: ");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.padding_token_id = 712; },
      "tokenizer.ggml.padding_token_id: ");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.mask_token_id = 712; }, "tokenizer.ggml.mask_token_id: ");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.add_bos_token = true; },
      "tokenizer.ggml.bos_token_id: expected the id of a token, for add_bos_token is true, found "
      "none");
  ExpectRefused(
      Good(),
      [](GgufVocabulary& v) {
        v.eos_token_id.reset();
        v.add_eos_token = true;
      },
      "tokenizer.ggml.eos_token_id: expected the id of a token, for add_eos_token is true, found "
      "none");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.chat_template = "one\n{% if %}"; },
      "tokenizer.chat_template: chat template \"default\": line 2");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.chat_template = "a\xFF"; },
      "tokenizer.chat_template: the template \"default\": expected UTF-8, found another byte at 1");
  ExpectRefused(
      Good(), [](GgufVocabulary& v) { v.chat_template.assign((size_t{1} << 20) + 1, 'x'); },
      "tokenizer.chat_template: chat template \"default\": ");
}

}  // namespace
}  // namespace switchyard
