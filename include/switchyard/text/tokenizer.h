// Text to ids and back, and conversations to ids, as transformers does it for the same files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// Contents of the files of a model folder.
struct TokenizerFiles {
  std::string tokenizer_json;
  std::optional<std::string> tokenizer_config_json;
  std::optional<std::string>
      chat_template_jinja;  // wins over the template in tokenizer_config.json
};

struct GgufVocabulary;  // switchyard/text/gguf_vocabulary.h

// What surrounds a text, and what control tokens written in it mean.
struct EncodeOptions {
  bool add_special_tokens = true;  // what the post-processor adds, usually BOS
  bool parse_special = true;       // if false, the text of special tokens is ordinary text
};

// A conversation as JSON, the way the OpenAI API spells it.
struct ChatRequest {
  std::string messages_json;  // array of objects
  std::string tools_json;     // array; empty: none
  std::string kwargs_json;    // object, further variables of the template; empty: none
  bool add_generation_prompt = true;
  bool continue_final_message =
      false;  // ends inside the last message; needs add_generation_prompt = false
};

// Immutable; any number of threads may use one.
class Tokenizer {
 public:
  // Throws kCorruptData, naming the file (and for a chat template the line).
  static std::shared_ptr<const Tokenizer> Create(const TokenizerFiles& files);

  // Throws what MakeTokenizerFiles does, and kCorruptData for a chat template, naming the field.
  static std::shared_ptr<const Tokenizer> CreateFromGguf(const GgufVocabulary& vocabulary);

  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  ~Tokenizer();

  // Throws kInvalidArgument for invalid UTF-8, with the offset of its first byte.
  std::vector<int32_t> Encode(std::string_view text, const EncodeOptions& options = {}) const;

  // Ids that no token has (the padding of a model's vocabulary) decode to nothing; a negative id
  // throws kInvalidArgument.
  std::string Decode(std::span<const int32_t> ids, bool skip_special = true) const;

  // The token as it is spelled in the vocabulary ("Ġthe", "▁the", "<0x0A>"). Throws
  // kInvalidArgument if there is none.
  std::string IdToToken(int32_t id) const;
  std::optional<int32_t> TokenToId(std::string_view token) const;

  size_t vocab_size() const { return vocab_size_; }                         // with added tokens
  const std::vector<int32_t>& special_ids() const { return special_ids_; }  // ascending
  std::optional<int32_t> eos_id() const;  // of tokenizer_config.json or the GGUF metadata
  std::optional<int32_t> bos_id() const;

  // Whether the model brings a chat template; without one RenderChat and ChatIds are refused.
  bool HasChatTemplate() const;

  // Throws kInvalidArgument for what the template refuses (with its own words) and for a request
  // that is not the JSON above, kResourceExhausted for a template that runs too long or makes too
  // much text.
  std::string RenderChat(const ChatRequest& request) const;

  // The ids of the rendered conversation. With `safe`, no control token comes from a string of the
  // request: what looks like one is encoded as ordinary text. Without it, the result is what
  // transformers gives.
  std::vector<int32_t> ChatIds(const ChatRequest& request, bool safe = true) const;

 private:
  friend class StreamingDetokenizer;
  explicit Tokenizer(void* handle);

  void* handle_;
  size_t vocab_size_ = 0;
  std::vector<int32_t> special_ids_;
};

}  // namespace switchyard
