// Text to token ids and back, and chats to prompts. Results equal those of transformers' fast tokenizers; what
// differs is listed in docs/text.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/text/chat_template.h"

struct swt_tokenizer;

namespace switchyard {

// Contents (not paths) of a model's tokenizer files; they may be embedded in the program.
struct TokenizerFiles {
  std::string tokenizer_json;                        // tokenizer.json, required
  std::optional<std::string> tokenizer_config_json;  // tokenizer_config.json: names of special tokens, template
  std::optional<std::string> special_tokens_map_json;
  // chat_template.jinja, or a template of the user's. It replaces the one in tokenizer_config.json.
  std::optional<std::string> chat_template;
  // Further templates by name, e.g. {"tool_use", ...}, which is chosen when a request has tools.
  std::vector<std::pair<std::string, std::string>> named_chat_templates;
};

struct TokenizerOptions {
  // Rows of the model's embedding (vocab_size of config.json), 0 if unknown. It is often padded beyond the
  // tokenizer: ids below it that have no token decode to nothing.
  uint32_t model_vocab_size = 0;
  // A chat template that does not compile is an error only when it is used, instead of in Create.
  bool defer_template_errors = false;
};

struct EncodeOptions {
  // Add what the tokenizer's post-processor adds, e.g. a BOS. Off for rendered chats, which hold their own.
  bool add_special_tokens = true;
  // Read the text of a control token ("<|im_end|>") as that token. Off: it is encoded as plain text.
  bool parse_special = true;
};

// How ChatIds treats control tokens in messages and tools.
enum class ChatSafety {
  kPlain,  // as transformers does by default: their text becomes the token, so a user can forge turns
  kSafe,   // control tokens come only from the template; in user text they are plain text
};

// Immutable, and safe to use from many threads.
class Tokenizer {
 public:
  // Errors: kCorruptData names the file and, for templates, the line.
  static std::shared_ptr<const Tokenizer> Create(const TokenizerFiles& files, const TokenizerOptions& options = {});
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ids of `text`, which must be UTF-8 and may be empty or hold NUL. Time is linear in the length but for the
  // logarithm in merging one long word.
  // Errors: kInvalidArgument if `text` is not UTF-8 (names the byte).
  std::vector<int32_t> Encode(std::string_view text, const EncodeOptions& options = {}) const;

  // Text of `ids`, with special tokens left out if `skip_special`. Bytes that are not UTF-8 become U+FFFD.
  // Errors: kInvalidArgument if an id is negative or not below id_bound() (names both).
  std::string Decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The token as the vocabulary writes it ("Ġthe"); nothing for ids without a token.
  std::optional<std::string> IdToToken(int32_t id) const;
  std::optional<int32_t> TokenToId(std::string_view token) const;

  // Number of tokens, added ones included.
  size_t vocab_size() const;
  // One more than the largest id that Decode accepts.
  uint32_t id_bound() const;
  // Ids that Decode skips: tokens flagged special, and those that tokenizer_config.json names.
  const std::vector<int32_t>& special_ids() const { return special_ids_; }
  // Of eos_token in tokenizer_config.json; empty if it names none. generation_config.json may add more.
  const std::vector<int32_t>& eos_ids() const { return eos_ids_; }
  std::optional<int32_t> bos_id() const { return bos_id_; }

  bool HasChatTemplate() const;
  // The prompt as text.
  // Errors: kFailedPrecondition if the model has no template; otherwise as ChatTemplate::Render.
  std::string RenderChat(const ChatRequest& request) const;
  // The prompt as ids. The template writes the BOS if there is to be one; none is added. With kSafe the caller still
  // validates roles, because templates build tokens from them. Messages without control text give the same ids in
  // both modes.
  // Errors: as RenderChat.
  std::vector<int32_t> ChatIds(const ChatRequest& request, ChatSafety safety) const;

 private:
  friend class StreamingDetokenizer;
  explicit Tokenizer(swt_tokenizer* handle);
  std::optional<int32_t> NamedId(std::string_view name) const;

  swt_tokenizer* handle_;
  std::vector<int32_t> special_ids_;
  std::vector<int32_t> eos_ids_;
  std::optional<int32_t> bos_id_;
};

}  // namespace switchyard
