#include "switchyard/text/hub_vocabulary.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "switchyard/core/error.h"
#include "text/gguf_pre_tokenizers.h"

namespace switchyard {
namespace {

using nlohmann::json;

constexpr size_t kMaxIds = size_t{1} << 22;

enum TokenType : int32_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

[[noreturn]] void Corrupt(std::string_view what) {
  throw Error(ErrorCode::kCorruptData, fmt::format("tokenizer.json: {}", what));
}
[[noreturn]] void Unsupported(std::string_view what) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("tokenizer.json: {}: GGUF has no such tokenizer", what));
}

json Parse(std::string_view name, const std::string& text) {
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded() || !parsed.is_object())
    throw Error(ErrorCode::kCorruptData, fmt::format("{}: is no JSON object", name));
  return parsed;
}

// A field of an object; null if it is absent.
const json& Field(const json& object, std::string_view name) {
  static const json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(name);
  return found == object.end() ? kNull : *found;
}
std::string Text(const json& object, std::string_view name) {
  const json& field = Field(object, name);
  return field.is_string() ? field.get<std::string>() : std::string();
}
bool Flag(const json& object, std::string_view name, bool otherwise = false) {
  const json& field = Field(object, name);
  return field.is_boolean() ? field.get<bool>() : otherwise;
}

// The steps of a normalizer, pre-tokenizer or post-processor that may be one or a list.
std::vector<json> StepsOf(const json& object, std::string_view list) {
  if (object.is_null()) return {};
  if (Text(object, "type") != "Sequence") return {object};
  std::vector<json> steps;
  for (const json& step : Field(object, list)) steps.push_back(step);
  return steps;
}

class Reader {
 public:
  explicit Reader(const TokenizerFiles& files)
      : tokenizer_(Parse("tokenizer.json", files.tokenizer_json)),
        config_(files.tokenizer_config_json
                    ? Parse("tokenizer_config.json", *files.tokenizer_config_json)
                    : json::object()),
        model_(Field(tokenizer_, "model")) {
    if (!model_.is_object()) Corrupt("\"model\" is missing");
    if (!Text(model_, "type").empty() && Text(model_, "type") != "BPE")
      Unsupported(fmt::format("\"model.type\" is {}", Text(model_, "type")));
    if (files.chat_template_jinja) out_.vocabulary.chat_template = *files.chat_template_jinja;
  }

  HubVocabulary Read() {
    ReadTokens();
    ReadMerges();
    ReadKind();
    ReadNames();
    ReadPostProcessor();
    ReadChatTemplate();
    out_.vocabulary.tokens.assign(out_.texts.begin(), out_.texts.end());
    if (out_.vocabulary.model == "gpt2")
      out_.vocabulary.merges.assign(out_.merges.begin(), out_.merges.end());
    return std::move(out_);
  }

 private:
  void Add(const std::string& text, const json& id, int32_t type) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= kMaxIds)
      Corrupt("the id of a token is out of range");
    const auto at = id.get<size_t>();
    std::vector<int32_t>& types = out_.vocabulary.token_type;
    for (size_t i = out_.texts.size(); i <= at; ++i) {
      out_.texts.push_back(fmt::format("[PAD{}]", i));
      types.push_back(kUnused);
    }
    out_.texts[at] = text;
    types[at] = type;
    ids_[text] = static_cast<uint32_t>(at);
  }

  void ReadTokens() {
    const json& vocab = Field(model_, "vocab");
    if (!vocab.is_object() || vocab.empty()) Corrupt("\"model.vocab\" is missing");
    for (const auto& [text, id] : vocab.items()) Add(text, id, kNormal);
    for (const json& token : Field(tokenizer_, "added_tokens")) {
      Add(Text(token, "content"), Field(token, "id"),
          Flag(token, "special") ? kControl : kUserDefined);
    }
    const auto unknown = ids_.find(Text(model_, "unk_token"));
    if (unknown == ids_.end()) return;
    out_.vocabulary.token_type[unknown->second] = kUnknown;
    out_.vocabulary.unknown_token_id = unknown->second;
  }

  // Merges are "left right", or pairs.
  void ReadMerges() {
    for (const json& merge : Field(model_, "merges")) {
      if (merge.is_string()) {
        out_.merges.push_back(merge.get<std::string>());
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        const auto left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
        if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos)
          Unsupported("\"model.merges\": a part holds a space");
        out_.merges.push_back(fmt::format("{} {}", left, right));
      } else {
        Corrupt("\"model.merges\" holds something that is no merge");
      }
    }
  }

  void ReadKind() {
    const std::vector<json> words = StepsOf(Field(tokenizer_, "pre_tokenizer"), "pretokenizers");
    const bool of_bytes = std::ranges::any_of(
        words, [](const json& step) { return Text(step, "type") == "ByteLevel"; });
    if (of_bytes) return ReadByteLevel(words);
    ReadSentencePiece(words);
  }

  void ReadByteLevel(const std::vector<json>& words) {
    text::PreTokenizer wanted;
    std::vector<std::string> patterns, behaviors;
    for (const json& step : words) {
      const std::string type = Text(step, "type");
      if (type == "Split" && Field(Field(step, "pattern"), "Regex").is_string() &&
          !Flag(step, "invert")) {
        patterns.push_back(Text(Field(step, "pattern"), "Regex"));
        behaviors.push_back(Text(step, "behavior"));
      } else if (type == "Digits") {
        wanted.digits = true;
      } else if (type == "ByteLevel" && !Flag(step, "add_prefix_space")) {
        wanted.gpt2_pattern = Flag(step, "use_regex", true);
      } else {
        Unsupported(fmt::format("\"pre_tokenizer\" has the step {}", type));
      }
    }
    if (patterns.size() > wanted.splits.size()) Unsupported("\"pre_tokenizer\" has many steps");
    for (size_t i = 0; i < patterns.size(); ++i) wanted.splits[i] = {patterns[i], behaviors[i]};
    for (const json& step : StepsOf(Field(tokenizer_, "normalizer"), "normalizers")) {
      if (Text(step, "type") != "NFC")
        Unsupported(fmt::format("\"normalizer\" is {}", Text(step, "type")));
      wanted.nfc = true;
    }
    wanted.ignore_merges = Flag(model_, "ignore_merges");
    const std::string_view name = text::PreTokenizerNameOf(wanted);
    if (name.empty()) Unsupported("\"pre_tokenizer\" cuts words in no known way");
    out_.vocabulary.model = "gpt2";
    out_.vocabulary.pre = name;
  }

  // Prepend and Replace before the text is cut, or Metaspace instead.
  void ReadSentencePiece(const std::vector<json>& words) {
    if (!Flag(model_, "byte_fallback")) Unsupported("neither byte-level nor with byte fallback");
    bool prefix = false, replaces = false;
    for (const json& step : StepsOf(Field(tokenizer_, "normalizer"), "normalizers")) {
      prefix = prefix || Text(step, "type") == "Prepend";
      replaces = replaces || Text(step, "type") == "Replace";
    }
    for (const json& step : words) {
      if (Text(step, "type") != "Metaspace")
        Unsupported(fmt::format("\"pre_tokenizer\" has the step {}", Text(step, "type")));
      replaces = true;
      prefix = prefix || Text(step, "prepend_scheme") == "first" ||
               Text(step, "prepend_scheme") == "always";
    }
    if (!replaces) Unsupported("\"normalizer\" leaves spaces as they are");
    out_.vocabulary.model = "llama";
    out_.vocabulary.pre = "default";
    out_.vocabulary.add_space_prefix = prefix;
    MarkBytes();
    ScoreByMerges();
  }

  void MarkBytes() {
    for (size_t id = 0; id < out_.texts.size(); ++id) {
      const std::string& text = out_.texts[id];
      if (text.size() == 6 && text.starts_with("<0x") && text.ends_with(">"))
        out_.vocabulary.token_type[id] = kByte;
    }
  }

  // A piece that is made sooner has the higher score; what no merge makes has the lowest.
  void ScoreByMerges() {
    std::vector<float>& scores = out_.vocabulary.scores;
    scores.assign(out_.texts.size(), -1e9f);
    float next = 0;
    std::string last;
    for (const std::string& merge : out_.merges) {
      std::string piece = merge;
      piece.erase(piece.find(' ', 1), 1);
      const auto id = ids_.find(piece);
      if (id == ids_.end()) Corrupt("\"model.merges\" makes a piece that is no token");
      if (scores[id->second] > -1e9f) {
        // All ways to make a piece must follow one another: one score ranks them all.
        if (piece != last) Unsupported("\"model.merges\" are in an order that scores cannot give");
        continue;
      }
      scores[id->second] = next;
      next -= 1;
      last = std::move(piece);
    }
  }

  std::optional<uint32_t> IdOf(std::string_view name) const {
    const json& field = Field(config_, name);
    const std::string text = field.is_string() ? field.get<std::string>() : Text(field, "content");
    const auto found = ids_.find(text);
    return text.empty() || found == ids_.end() ? std::nullopt
                                               : std::optional<uint32_t>(found->second);
  }

  void ReadNames() {
    GgufVocabulary& vocabulary = out_.vocabulary;
    vocabulary.bos_token_id = IdOf("bos_token");
    vocabulary.eos_token_id = IdOf("eos_token");
    vocabulary.padding_token_id = IdOf("pad_token");
    if (!vocabulary.unknown_token_id) vocabulary.unknown_token_id = IdOf("unk_token");
  }

  // Tokens before and after every text.
  void ReadPostProcessor() {
    bool bos = false, eos = false;
    for (const json& step : StepsOf(Field(tokenizer_, "post_processor"), "processors")) {
      if (Text(step, "type") != "TemplateProcessing") continue;
      bool is_before = true;
      for (const json& item : Field(step, "single")) {
        const std::string token = Text(Field(item, "SpecialToken"), "id");
        if (token.empty()) {
          is_before = false;
          continue;
        }
        const auto id = ids_.find(token);
        if (id == ids_.end()) Corrupt("\"post_processor\" adds something that is no token");
        (is_before ? bos : eos) = true;
        (is_before ? out_.vocabulary.bos_token_id : out_.vocabulary.eos_token_id) = id->second;
      }
    }
    out_.vocabulary.add_bos_token = bos;
    out_.vocabulary.add_eos_token = eos;
  }

  void ReadChatTemplate() {
    GgufVocabulary& vocabulary = out_.vocabulary;
    if (!vocabulary.chat_template.empty()) return;
    const json& field = Field(config_, "chat_template");
    if (field.is_string()) vocabulary.chat_template = field.get<std::string>();
    if (!field.is_array()) return;
    for (const json& named : field) {
      const std::string name = Text(named, "name");
      (name == "default" ? vocabulary.chat_template : vocabulary.named_chat_templates[name]) =
          Text(named, "template");
    }
  }

  json tokenizer_, config_;
  const json& model_;
  HubVocabulary out_;
  std::unordered_map<std::string, uint32_t> ids_;
};

}  // namespace

HubVocabulary ReadHubVocabulary(const TokenizerFiles& files) {
  try {
    return Reader(files).Read();
  } catch (const json::exception& error) {
    Corrupt(error.what());
  }
}

}  // namespace switchyard
