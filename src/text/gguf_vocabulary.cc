#include "switchyard/text/gguf_vocabulary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>

#include "switchyard/core/error.h"
#include "text/gguf_pre_tokenizers.h"

namespace switchyard {
namespace {

// What a file may claim. Vocabularies have some hundred thousand tokens and merges; the longest
// tokens are runs of spaces.
constexpr size_t kMaxElements = size_t{1} << 22;
constexpr size_t kMaxTokenBytes = size_t{1} << 16;
// Every cut of a piece is looked up, so that a piece costs the square of its length.
constexpr size_t kMaxPieceBytes = 512;

constexpr std::string_view kSpace = "\u2581";  // stands for a space in "llama" and "gemma4"

enum TokenType : int32_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

[[noreturn]] void Fail(ErrorCode code, std::string_view field, std::string_view expected,
                       std::string_view found) {
  throw Error(code, fmt::format("tokenizer.{}: expected {}, found {}", field, expected, found));
}

// About a field tokenizer.ggml.*.
[[noreturn]] void Corrupt(std::string_view field, std::string_view expected,
                          std::string_view found) {
  Fail(ErrorCode::kCorruptData, fmt::format("ggml.{}", field), expected, found);
}

std::string Element(std::string_view field, size_t i) { return fmt::format("{}[{}]", field, i); }

// A name out of the file, fit for a message.
std::string Quoted(std::string_view name) {
  std::string shown(name.substr(0, 40));
  for (char& c : shown) {
    if (c < ' ' || c > '~') c = '?';
  }
  return name.empty() ? "nothing" : fmt::format("\"{}\"{}", shown, name.size() > 40 ? "…" : "");
}

// Bytes of the UTF-8 character that `text` starts with; 0 if it starts with none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned first = byte(0), second = byte(1);
  size_t size = 0;
  if (!text.empty() && first < 0x80) return 1;
  if (first >= 0xC2 && first < 0xE0) size = 2;
  if (first >= 0xE0 && first < 0xF0) size = 3;
  if (first >= 0xF0 && first < 0xF5) size = 4;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Longer than need be, surrogates, and what lies beyond Unicode.
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
      (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F)) {
    return 0;
  }
  return size;
}

// Where a text stops being UTF-8; its size if it does not.
size_t Utf8Bytes(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t size = CharacterBytes(text.substr(at));
    if (size == 0) break;
    at += size;
  }
  return at;
}

// The padding that converters write where a model has more rows than its tokenizer has tokens.
bool IsPadding(std::string_view token, int32_t type) {
  if (type != kUnused || !token.starts_with("[PAD") || !token.ends_with("]")) return false;
  const std::string_view number = token.substr(4, token.size() - 5);
  return !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
}

// What the shape of tokenizer.json depends on.
struct Layout {
  const text::PreTokenizer* words = nullptr;  // of byte-level BPE; null: BPE over text with kSpace
  bool from_scores = false;                   // merges come from scores
  bool space_prefix = false;
  bool add_bos = false;
  bool add_eos = false;
};

Layout LayoutOf(const GgufVocabulary& vocabulary) {
  Layout layout;
  if (vocabulary.model == "gpt2" && vocabulary.pre != "gemma4") {
    layout.words = text::FindPreTokenizer(vocabulary.pre);
    if (layout.words == nullptr) {
      Fail(ErrorCode::kUnsupported, "ggml.pre",
           fmt::format("one of gemma4, {}", text::PreTokenizerNames()), Quoted(vocabulary.pre));
    }
    layout.add_bos = layout.words->add_bos;
  } else if (vocabulary.model == "llama") {
    layout.from_scores = true;
    layout.space_prefix = vocabulary.add_space_prefix.value_or(true);
    layout.add_bos = true;
    if (vocabulary.remove_extra_whitespaces.value_or(false)) {
      Fail(ErrorCode::kUnsupported, "ggml.remove_extra_whitespaces",
           "false, for tokenizers that keep spaces as they are", "true");
    }
  } else if (vocabulary.model == "gemma4" || vocabulary.model == "gpt2") {
    layout.add_bos = true;
  } else {
    Fail(ErrorCode::kUnsupported, "ggml.model",
         "one of gpt2, llama, gemma4 (WordPiece, Unigram and other kinds are not read)",
         Quoted(vocabulary.model));
  }
  return layout;
}

// The tokens of a file, checked, with their ids.
class Tokens {
 public:
  Tokens(const GgufVocabulary& vocabulary, const Layout& layout)
      : types_(vocabulary.token_type), texts_(vocabulary.tokens) {
    const size_t size = texts_.size();
    if (size == 0) Corrupt("tokens", "an array of at least one string", "none");
    if (size > kMaxElements)
      Corrupt("tokens", fmt::format("at most {}", kMaxElements), fmt::format("{}", size));
    if (!types_.empty() && types_.size() != size) {
      Corrupt("token_type", fmt::format("{}, one for each token", size),
              fmt::format("{}", types_.size()));
    }
    ids_.reserve(size);
    for (uint32_t id = 0; id < size; ++id) Add(id);
    if (ids_.empty()) Corrupt("tokens", "at least one token", "only empty and unused ones");
    if (layout.words == nullptr) RestoreSpaces();
  }

  size_t size() const { return texts_.size(); }
  std::string_view Text(uint32_t id) const { return texts_[id]; }
  int32_t Type(uint32_t id) const { return types_.empty() ? kNormal : types_[id]; }
  bool Has(std::string_view text) const { return ids_.contains(text); }
  std::optional<uint32_t> Find(std::string_view text) const {
    const auto found = ids_.find(text);
    return found == ids_.end() ? std::nullopt : std::optional<uint32_t>(found->second);
  }
  // Calls visit(id, text, type) for each token, in the order of ids.
  template <typename Visit>
  void ForEach(Visit&& visit) const {
    for (uint32_t id = 0; id < size(); ++id) {
      const std::string_view text = Text(id);
      if (!text.empty() && !IsPadding(text, Type(id))) visit(id, text, Type(id));
    }
  }

 private:
  void Add(uint32_t id) {
    const std::string_view text = Text(id);
    const int32_t type = Type(id);
    if (type < kNormal || type > kByte)
      Corrupt(Element("token_type", id), "1 to 6", fmt::format("{}", type));
    if (text.size() > kMaxTokenBytes) {
      Corrupt(Element("tokens", id), fmt::format("at most {} bytes", kMaxTokenBytes),
              fmt::format("{}", text.size()));
    }
    if (const size_t at = Utf8Bytes(text); at < text.size())
      Corrupt(Element("tokens", id), "UTF-8", fmt::format("another byte at {}", at));
    if (text.empty() || IsPadding(text, type)) return;
    const auto [other, is_new] = ids_.emplace(text, id);
    if (!is_new) {
      Corrupt(Element("tokens", id), "a text of its own",
              fmt::format("that of token {}", other->second));
    }
  }

  // Converters write user-defined tokens with spaces where the model, and its merges, have kSpace.
  void RestoreSpaces() {
    for (uint32_t id = 0; id < size(); ++id) {
      if (Type(id) != kUserDefined || Text(id).find(' ') == std::string_view::npos) continue;
      std::string text;
      for (char c : Text(id)) {
        if (c == ' ') {
          text += kSpace;
        } else {
          text += c;
        }
      }
      if (Has(text)) continue;
      ids_.erase(Text(id));
      texts_[id] = restored_.emplace_back(std::move(text));
      ids_.emplace(texts_[id], id);
    }
  }

  const std::vector<int32_t>& types_;
  std::vector<std::string_view> texts_;
  std::deque<std::string> restored_;
  std::unordered_map<std::string_view, uint32_t> ids_;
};

using Merge = std::pair<std::string_view, std::string_view>;

Merge ReadMerge(const GgufVocabulary& vocabulary, const Tokens& tokens, size_t i) {
  const std::string_view merge = vocabulary.merges[i];
  // A token may start with the separator, which is a space, but not contain another.
  const size_t space = merge.find(' ', 1);
  if (space == std::string_view::npos)
    Corrupt(Element("merges", i), "two tokens with a space between", "no space");
  const Merge parts = {merge.substr(0, space), merge.substr(space + 1)};
  const auto require = [&](std::string_view what, std::string_view text) {
    if (!tokens.Has(text))
      Corrupt(Element("merges", i), fmt::format("{} that is a token", what), "one that is not");
  };
  require("a left part", parts.first);
  require("a right part", parts.second);
  require("a result", std::string(parts.first).append(parts.second));
  return parts;
}

std::vector<Merge> ReadMerges(const GgufVocabulary& vocabulary, const Tokens& tokens) {
  const size_t size = vocabulary.merges.size();
  if (size == 0) Corrupt("merges", "an array of at least one string", "none");
  if (size > kMaxElements)
    Corrupt("merges", fmt::format("at most {}", kMaxElements), fmt::format("{}", size));
  std::vector<Merge> merges;
  merges.reserve(size);
  for (size_t i = 0; i < size; ++i) merges.push_back(ReadMerge(vocabulary, tokens, i));
  return merges;
}

// SentencePiece joins the two pieces that make the piece of the highest score. As merges: every cut
// of a piece into two pieces, the highest score first; within a score, the order of transformers'
// converter: longer left parts first, then longer right parts, then lower ids.
class ScoreMerges {
 public:
  ScoreMerges(const GgufVocabulary& vocabulary, const Tokens& tokens) : tokens_(tokens) {
    const std::vector<float>& scores = vocabulary.scores;
    if (scores.size() != tokens.size()) {
      Corrupt("scores", fmt::format("{}, one for each token", tokens.size()),
              fmt::format("{}", scores.size()));
    }
    for (uint32_t id = 0; id < scores.size(); ++id) {
      if (!std::isfinite(scores[id]))
        Corrupt(Element("scores", id), "a finite number", fmt::format("{}", scores[id]));
    }
    tokens.ForEach([&](uint32_t id, std::string_view text, int32_t type) {
      if (IsPiece(type)) Cut(id, text, scores[id]);
    });
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      if (a.score != b.score) return a.score > b.score;
      if (a.left_characters != b.left_characters) return a.left_characters > b.left_characters;
      return a.right_characters > b.right_characters;
    });
  }

  std::vector<Merge> Take() const {
    std::vector<Merge> merges;
    merges.reserve(found_.size());
    for (const Found& found : found_) merges.push_back(found.parts);
    return merges;
  }

 private:
  struct Found {
    Merge parts;
    float score;
    size_t left_characters, right_characters;
  };

  // Control tokens, the unknown token and bytes are never made of others.
  static bool IsPiece(int32_t type) {
    return type == kNormal || type == kUserDefined || type == kUnused;
  }

  bool IsPiece(std::string_view text) const {
    const std::optional<uint32_t> id = tokens_.Find(text);
    return id && IsPiece(tokens_.Type(*id));
  }

  void Cut(uint32_t id, std::string_view text, float score) {
    if (text.size() > kMaxPieceBytes) {
      Corrupt(Element("tokens", id), fmt::format("a piece of at most {} bytes", kMaxPieceBytes),
              fmt::format("{}", text.size()));
    }
    const size_t first = found_.size();
    size_t characters = 0;
    for (size_t at = 0; at < text.size();) {
      at += CharacterBytes(text.substr(at));
      ++characters;
      const Merge parts = {text.substr(0, at), text.substr(at)};
      if (IsPiece(parts.first) && IsPiece(parts.second))
        found_.push_back({parts, score, characters, 0});
    }
    for (size_t i = first; i < found_.size(); ++i)
      found_[i].right_characters = characters - found_[i].left_characters;
  }

  const Tokens& tokens_;
  std::vector<Found> found_;
};

// Appends to a JSON text.
class JsonText {
 public:
  JsonText& operator<<(std::string_view raw) {
    text_ += raw;
    return *this;
  }
  JsonText& operator<<(uint32_t number) {
    fmt::format_to(std::back_inserter(text_), "{}", number);
    return *this;
  }
  JsonText& operator<<(bool value) { return *this << std::string_view(value ? "true" : "false"); }
  JsonText& operator<<(const char* raw) { return *this << std::string_view(raw); }

  // A string in quotes.
  JsonText& Quote(std::string_view text) {
    text_ += '"';
    for (char c : text) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        fmt::format_to(std::back_inserter(text_), "\\u{:04x}", static_cast<unsigned char>(c));
      } else {
        text_ += c;
      }
    }
    text_ += '"';
    return *this;
  }

  // A comma before all elements of a list but the first.
  JsonText& Comma() {
    if (!text_.ends_with('[') && !text_.ends_with('{')) text_ += ',';
    return *this;
  }

  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

void WriteAddedTokens(JsonText& json, const Tokens& tokens) {
  json << "[";
  tokens.ForEach([&](uint32_t id, std::string_view text, int32_t type) {
    if (type != kUnknown && type != kControl && type != kUserDefined) return;
    json.Comma() << R"({"id":)" << id << R"(,"content":)";
    json.Quote(text) << R"(,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false)"
                     << R"(,"special":)" << (type != kUserDefined) << "}";
  });
  json << "]";
}

void WriteNormalizer(JsonText& json, const Layout& layout) {
  if (layout.words != nullptr) {
    json << (layout.words->nfc ? R"({"type":"NFC"})" : "null");
    return;
  }
  json << R"({"type":"Sequence","normalizers":[)";
  if (layout.space_prefix) (json << R"({"type":"Prepend","prepend":)").Quote(kSpace) << "},";
  (json << R"({"type":"Replace","pattern":{"String":" "},"content":)").Quote(kSpace) << "}]}";
}

void WritePreTokenizer(JsonText& json, const Layout& layout) {
  if (layout.words == nullptr) {
    json << "null";
    return;
  }
  json << R"({"type":"Sequence","pretokenizers":[)";
  for (const text::Split& split : layout.words->splits) {
    if (split.pattern.empty()) continue;
    (json << R"({"type":"Split","pattern":{"Regex":)").Quote(split.pattern)
        << R"(},"behavior":")" << split.behavior << R"(","invert":false},)";
  }
  if (layout.words->digits) json << R"({"type":"Digits","individual_digits":true},)";
  json << R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":)"
       << layout.words->gpt2_pattern << "}]}";
}

void WriteDecoder(JsonText& json, const Layout& layout) {
  if (layout.words != nullptr) {
    json << R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true})";
    return;
  }
  (json << R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":)").Quote(kSpace)
      << R"(},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"})";
  if (layout.space_prefix) json << R"(,{"type":"Strip","content":" ","start":1,"stop":0})";
  json << "]}";
}

// The tokens with a name of their own.
struct NamedTokens {
  std::optional<uint32_t> bos, eos, unknown, separator, padding, mask;
};

NamedTokens NamesOf(const GgufVocabulary& vocabulary, const Layout& layout, const Tokens& tokens) {
  const auto checked = [&](std::string_view field, std::optional<uint32_t> id) {
    if (id && *id >= tokens.size())
      Corrupt(field, fmt::format("an id below {}", tokens.size()), fmt::format("{}", *id));
    // A token of no text is none.
    return id && tokens.Has(tokens.Text(*id)) ? id : std::nullopt;
  };
  const auto is_ordinary = [&](uint32_t id) { return tokens.Type(id) == kNormal; };
  // The ids that SentencePiece gives unless told otherwise, which files may leave out.
  const auto usual = [&](std::optional<uint32_t> id, uint32_t otherwise) {
    const bool has = layout.from_scores && otherwise < tokens.size() &&
                     (vocabulary.token_type.empty() || !is_ordinary(otherwise));
    return id || !has ? id : otherwise;
  };
  // Converters write the padding of a model, which may be any token; a name would make it special.
  const auto special = [&](std::string_view field, std::optional<uint32_t> id) {
    id = checked(field, id);
    return id && !is_ordinary(*id) ? id : std::nullopt;
  };
  checked("eot_token_id", vocabulary.eot_token_id);
  return {.bos = checked("bos_token_id", usual(vocabulary.bos_token_id, 1)),
          .eos = checked("eos_token_id", usual(vocabulary.eos_token_id, 2)),
          .unknown = special("unknown_token_id", usual(vocabulary.unknown_token_id, 0)),
          .separator = special("seperator_token_id", vocabulary.seperator_token_id),
          .padding = special("padding_token_id", vocabulary.padding_token_id),
          .mask = special("mask_token_id", vocabulary.mask_token_id)};
}

// Whether a token goes before or after each text. An explicit wish needs the token.
bool Adds(std::string_view flag, std::optional<bool> wish, bool usual, std::string_view id_field,
          std::optional<uint32_t> id) {
  if (wish.value_or(false) && !id)
    Corrupt(id_field, fmt::format("the id of a token, for {} is true", flag), "none");
  return wish.value_or(usual) && id;
}

void WritePostProcessor(JsonText& json, const Layout& layout, const Tokens& tokens,
                        const NamedTokens& names) {
  std::vector<uint32_t> added;
  const auto special = [&](bool adds, std::optional<uint32_t> id) {
    if (!adds) return;
    json.Comma() << R"({"SpecialToken":{"id":)";
    json.Quote(tokens.Text(*id)) << R"(,"type_id":0}})";
    if (std::find(added.begin(), added.end(), *id) == added.end()) added.push_back(*id);
  };
  const auto sequence = [&](std::string_view name) {
    special(layout.add_bos, names.bos);
    json.Comma() << R"({"Sequence":{"id":")" << name << R"(","type_id":0}})";
    special(layout.add_eos, names.eos);
  };
  json << R"({"type":"TemplateProcessing","single":[)";
  sequence("A");
  json << R"(],"pair":[)";
  sequence("A");
  sequence("B");
  json << R"(],"special_tokens":{)";
  for (uint32_t id : added) {
    const std::string_view text = tokens.Text(id);
    json.Comma().Quote(text) << R"(:{"id":)";
    json.Quote(text) << R"(,"ids":[)" << id << R"(],"tokens":[)";
    json.Quote(text) << "]}";
  }
  json << "}}";
}

void WriteModel(JsonText& json, const Layout& layout, const Tokens& tokens,
                const NamedTokens& names, const std::vector<Merge>& merges) {
  const bool of_text = layout.words == nullptr;
  json << R"({"type":"BPE","dropout":null,"unk_token":)";
  if (of_text && names.unknown) {
    json.Quote(tokens.Text(*names.unknown));
  } else {
    json << "null";
  }
  json << R"(,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":)" << of_text
       << R"(,"byte_fallback":)" << of_text << R"(,"ignore_merges":)"
       << (!of_text && layout.words->ignore_merges) << R"(,"vocab":{)";
  // With the added tokens, so that each keeps its id.
  tokens.ForEach(
      [&](uint32_t id, std::string_view text, int32_t) { json.Comma().Quote(text) << ":" << id; });
  json << R"(},"merges":[)";
  for (const Merge& merge : merges) {
    (json.Comma() << "[").Quote(merge.first) << ",";
    json.Quote(merge.second) << "]";
  }
  json << "]}";
}

std::string MakeConfig(const GgufVocabulary& vocabulary, const Tokens& tokens,
                       const NamedTokens& names) {
  JsonText json;
  json << "{";
  const auto name = [&](std::string_view key, std::optional<uint32_t> id) {
    if (id) (json.Comma().Quote(key) << ":").Quote(tokens.Text(*id));
  };
  name("bos_token", names.bos);
  name("eos_token", names.eos);
  name("unk_token", names.unknown);
  name("sep_token", names.separator);
  name("pad_token", names.padding);
  name("mask_token", names.mask);
  json.Comma() << R"("chat_template":[)";
  const auto chat_template = [&](std::string_view key, std::string_view text) {
    const auto check = [&](std::string_view what, std::string_view checked) {
      if (const size_t at = Utf8Bytes(checked); at < checked.size()) {
        Fail(ErrorCode::kCorruptData, fmt::format("chat_template: {} {}", what, Quoted(key)),
             "UTF-8", fmt::format("another byte at {}", at));
      }
    };
    check("the name", key);
    check("the template", text);
    (json.Comma() << R"({"name":)").Quote(key) << R"(,"template":)";
    json.Quote(text) << "}";
  };
  if (!vocabulary.chat_template.empty()) chat_template("default", vocabulary.chat_template);
  for (const auto& [key, text] : vocabulary.named_chat_templates) {
    if (key != "default" || vocabulary.chat_template.empty()) chat_template(key, text);
  }
  json << "]}";
  return json.Take();
}

}  // namespace

TokenizerFiles MakeTokenizerFiles(const GgufVocabulary& vocabulary) {
  Layout layout = LayoutOf(vocabulary);
  const Tokens tokens(vocabulary, layout);
  const NamedTokens names = NamesOf(vocabulary, layout, tokens);
  layout.add_bos =
      Adds("add_bos_token", vocabulary.add_bos_token, layout.add_bos, "bos_token_id", names.bos);
  layout.add_eos =
      Adds("add_eos_token", vocabulary.add_eos_token, layout.add_eos, "eos_token_id", names.eos);
  const std::vector<Merge> merges =
      layout.from_scores ? ScoreMerges(vocabulary, tokens).Take() : ReadMerges(vocabulary, tokens);
  JsonText json;
  json << R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":)";
  WriteAddedTokens(json, tokens);
  json << R"(,"normalizer":)";
  WriteNormalizer(json, layout);
  json << R"(,"pre_tokenizer":)";
  WritePreTokenizer(json, layout);
  json << R"(,"post_processor":)";
  WritePostProcessor(json, layout, tokens, names);
  json << R"(,"decoder":)";
  WriteDecoder(json, layout);
  json << R"(,"model":)";
  WriteModel(json, layout, tokens, names, merges);
  json << "}";
  TokenizerFiles files;
  files.tokenizer_json = json.Take();
  files.tokenizer_config_json = MakeConfig(vocabulary, tokens, names);
  return files;
}

std::shared_ptr<const Tokenizer> Tokenizer::CreateFromGguf(const GgufVocabulary& vocabulary) {
  const TokenizerFiles files = MakeTokenizerFiles(vocabulary);
  try {
    return Create(files);
  } catch (const Error& error) {
    // What is left to be wrong is a chat template.
    constexpr std::string_view kFile = "tokenizer_config.json: ";
    const std::string& message = error.message();
    if (!message.starts_with(kFile)) throw;
    throw Error(error.code(), "tokenizer.chat_template: " + message.substr(kFile.size()));
  }
}

}  // namespace switchyard
