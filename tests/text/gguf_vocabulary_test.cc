// Tokenizers out of GGUF metadata: the ids of the tokenizers that the metadata was made from, and
// what is refused.
#include "switchyard/text/gguf_vocabulary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <limits>
#include <map>
#include <set>

#include "text/text_testing.h"

namespace switchyard {
namespace {

using testing::ErrorOf;
using testing::GoldenTokenizer;
using testing::GoldenTokenizers;
using testing::Ids;
using testing::Json;
using testing::LocalTokenizer;

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
    out.vocabulary.tokens.push_back(out.Keep(
        token == tokens.end() ? "[PAD" + std::to_string(id) + "]" : token->second));
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
    out.vocabulary.scores.push_back(!normal ? -1000.0f : score != scores.end() ? score->second : next--);
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
    for (const auto& [left, right] : Merges(tokenizer))
      out.vocabulary.merges.push_back(out.Keep(left + " " + right));
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

TEST(GgufVocabularyTest, Explore) {
  struct K { const char *name, *model, *pre; };
  const K kinds[] = {{"deepseek_regex","gpt2","deepseek-v3"},{"gpt2_bytelevel","gpt2","gpt-2"},{"llama3_regex","gpt2","llama-bpe"},{"o200k_regex","gpt2","gpt-4o"},{"qwen_regex","gpt2","qwen2"},{"gemma_bytefallback","gemma4",""},{"gemma_bytefallback","llama","default"},{"metaspace_bytefallback","llama","default"},{"spm_prepend_bytefallback","llama","default"},{"added_token_flags","gpt2","dbrx"}};
  for (const K& k : kinds) for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    if (golden.name != k.name) continue;
    Converted c = Convert(golden.files, k.model, k.pre);
    if (golden.name == "gemma_bytefallback") c.vocabulary.add_space_prefix = false;
    auto t = Tokenizer::CreateFromGguf(c.vocabulary);
    const Json expected = golden.Cases("expected_tokens.json");
    int n=0, ids=0, plain=0, dec=0, skip=0;
    for (const Json& e : expected["encode"]) {
      ++n;
      const std::string text = e["text"];
      bool a = t->Encode(text) == Ids(e["ids"]);
      if (!a) std::printf("  %s ids: %s\n", k.name, Json(text).dump().substr(0,90).c_str());
      ids += a;
      plain += t->Encode(text, {.add_special_tokens=false}) == Ids(e["ids_without_special"]);
      dec += t->Decode(Ids(e["ids_without_special"]), false) == e["decoded"].get<std::string>();
      bool s = t->Decode(Ids(e["ids"]), true) == e["decoded_skip_special"].get<std::string>();
      if (!s) std::printf("  %s skip: %s -> %s want %s\n", k.name, Json(text).dump().substr(0,60).c_str(), t->Decode(Ids(e["ids"]), true).substr(0,60).c_str(), e["decoded_skip_special"].get<std::string>().substr(0,60).c_str());
      skip += s;
    }
    int m=0, d=0, ds=0;
    for (const Json& e : expected["decode"]) {
      ++m;
      d += t->Decode(Ids(e["ids"]), false) == e["text"].get<std::string>();
      ds += !e.contains("text_skip_special") || t->Decode(Ids(e["ids"]), true) == e["text_skip_special"].get<std::string>();
    }
    std::printf("%s as %s: of %d: ids %d plain %d decoded %d skip %d; of %d: %d %d\n", k.name, k.model, n, ids, plain, dec, skip, m, d, ds);
  }
}

}  // namespace
}  // namespace switchyard
