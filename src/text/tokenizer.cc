#include "switchyard/text/tokenizer.h"

#include "text/ffi.h"

namespace switchyard {

std::shared_ptr<const Tokenizer> Tokenizer::Create(const TokenizerFiles& files, const TokenizerOptions& options) {
  std::vector<swt_named_template> named;
  named.reserve(files.named_chat_templates.size());
  for (const auto& [name, source] : files.named_chat_templates) {
    named.push_back({text::Borrow(std::string_view(name)), text::Borrow(std::string_view(source))});
  }
  swt_files raw{};
  raw.tokenizer_json = text::Borrow(std::string_view(files.tokenizer_json));
  raw.tokenizer_config = text::Borrow(files.tokenizer_config_json);
  raw.special_tokens_map = text::Borrow(files.special_tokens_map_json);
  raw.chat_template = text::Borrow(files.chat_template);
  raw.named_templates = named.data();
  raw.num_named_templates = named.size();
  raw.model_vocab_size = options.model_vocab_size;
  raw.defer_template_errors = options.defer_template_errors ? 1 : 0;

  swt_tokenizer* handle = nullptr;
  text::OwnedBuffer error;
  text::Check(swt_tokenizer_new(&raw, &handle, &error.raw), error);
  return std::shared_ptr<const Tokenizer>(new Tokenizer(handle));
}

Tokenizer::Tokenizer(swt_tokenizer* handle) : handle_(handle) {
  text::OwnedIds special;
  swt_special_ids(handle_, &special.raw);
  special_ids_ = special.Ids();
  if (const auto eos = NamedId("eos_token")) eos_ids_.push_back(*eos);
  bos_id_ = NamedId("bos_token");
}

Tokenizer::~Tokenizer() { swt_tokenizer_free(handle_); }

std::optional<int32_t> Tokenizer::NamedId(std::string_view name) const {
  uint32_t id = 0;
  if (swt_named_id(handle_, text::Borrow(name), &id) == 0) return std::nullopt;
  return static_cast<int32_t>(id);
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, const EncodeOptions& options) const {
  text::OwnedIds out;
  text::OwnedBuffer error;
  text::Check(swt_encode(handle_, text::Borrow(text), options.add_special_tokens ? 1 : 0,
                         options.parse_special ? 1 : 0, &out.raw, &error.raw),
              error);
  return out.Ids();
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  for (const int32_t id : ids) {
    if (id < 0) {
      throw Error(ErrorCode::kInvalidArgument, "token id " + std::to_string(id) + " is outside the vocabulary of " +
                                                   std::to_string(id_bound()) + " ids");
    }
  }
  text::OwnedBuffer out, error;
  text::Check(swt_decode(handle_, reinterpret_cast<const uint32_t*>(ids.data()), ids.size(), skip_special ? 1 : 0,
                         &out.raw, &error.raw),
              error);
  return out.Text();
}

std::optional<std::string> Tokenizer::IdToToken(int32_t id) const {
  text::OwnedBuffer out;
  if (id < 0 || swt_id_to_token(handle_, static_cast<uint32_t>(id), &out.raw) == 0) return std::nullopt;
  return out.Text();
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  uint32_t id = 0;
  if (swt_token_to_id(handle_, text::Borrow(token), &id) == 0) return std::nullopt;
  return static_cast<int32_t>(id);
}

size_t Tokenizer::vocab_size() const { return swt_vocab_size(handle_); }

uint32_t Tokenizer::id_bound() const { return swt_id_bound(handle_); }

bool Tokenizer::HasChatTemplate() const { return swt_has_chat_template(handle_) != 0; }

std::string Tokenizer::RenderChat(const ChatRequest& request) const {
  const swt_chat chat = text::ToChat(request);
  text::OwnedBuffer out, error;
  text::Check(swt_chat_render(handle_, &chat, &out.raw, &error.raw), error);
  return out.Text();
}

std::vector<int32_t> Tokenizer::ChatIds(const ChatRequest& request, ChatSafety safety) const {
  const swt_chat chat = text::ToChat(request);
  text::OwnedIds out;
  text::OwnedBuffer error;
  text::Check(swt_chat_ids(handle_, &chat, safety == ChatSafety::kSafe ? 1 : 0, &out.raw, &error.raw), error);
  return out.Ids();
}

}  // namespace switchyard
