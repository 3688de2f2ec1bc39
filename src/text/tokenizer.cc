#include "switchyard/text/tokenizer.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "text/ffi.h"

namespace switchyard {
namespace {

const sy_text_tokenizer* Handle(void* handle) {
  return static_cast<const sy_text_tokenizer*>(handle);
}

std::optional<int32_t> Id(int64_t id) {
  return id < 0 ? std::nullopt : std::optional<int32_t>(static_cast<int32_t>(id));
}

sy_text_chat Chat(const ChatRequest& request) {
  return {text::View(request.messages_json), text::View(request.tools_json),
          text::View(request.kwargs_json), request.add_generation_prompt,
          request.continue_final_message};
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::Create(const TokenizerFiles& files) {
  sy_text_view config = {}, chat_template = {};
  if (files.tokenizer_config_json) config = text::View(*files.tokenizer_config_json);
  if (files.chat_template_jinja) chat_template = text::View(*files.chat_template_jinja);
  sy_text_tokenizer* handle = nullptr;
  sy_text_bytes error = {};
  text::Check(sy_text_tokenizer_new(
                  text::View(files.tokenizer_json), files.tokenizer_config_json ? &config : nullptr,
                  files.chat_template_jinja ? &chat_template : nullptr, &handle, &error),
              error);
  return std::shared_ptr<const Tokenizer>(new Tokenizer(handle));
}

Tokenizer::Tokenizer(void* handle)
    : handle_(handle), vocab_size_(sy_text_vocab_size(Handle(handle))) {
  sy_text_ids ids = {};
  sy_text_bytes error = {};
  text::Check(sy_text_special_ids(Handle(handle_), &ids, &error), error);
  special_ids_ = text::Take(ids);
}

Tokenizer::~Tokenizer() { sy_text_tokenizer_free(static_cast<sy_text_tokenizer*>(handle_)); }

std::vector<int32_t> Tokenizer::Encode(std::string_view text, const EncodeOptions& options) const {
  sy_text_ids ids = {};
  sy_text_bytes error = {};
  text::Check(sy_text_encode(Handle(handle_), text::View(text), options.add_special_tokens,
                             options.parse_special, &ids, &error),
              error);
  return text::Take(ids);
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::vector<uint32_t> unsigned_ids;
  unsigned_ids.reserve(ids.size());
  for (int32_t id : ids) {
    if (id < 0)
      throw Error(ErrorCode::kInvalidArgument, fmt::format("decode: the id {} is negative", id));
    unsigned_ids.push_back(static_cast<uint32_t>(id));
  }
  sy_text_bytes text = {}, error = {};
  text::Check(sy_text_decode(Handle(handle_), unsigned_ids.data(), unsigned_ids.size(),
                             skip_special, &text, &error),
              error);
  return text::Take(text);
}

std::string Tokenizer::IdToToken(int32_t id) const {
  if (id < 0)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("there is no token with the id {}", id));
  sy_text_bytes token = {}, error = {};
  text::Check(sy_text_id_to_token(Handle(handle_), static_cast<uint32_t>(id), &token, &error),
              error);
  return text::Take(token);
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  return Id(sy_text_token_to_id(Handle(handle_), text::View(token)));
}

std::optional<int32_t> Tokenizer::eos_id() const { return Id(sy_text_eos_id(Handle(handle_))); }

std::optional<int32_t> Tokenizer::bos_id() const { return Id(sy_text_bos_id(Handle(handle_))); }

bool Tokenizer::HasChatTemplate() const { return sy_text_has_chat_template(Handle(handle_)); }

std::string Tokenizer::RenderChat(const ChatRequest& request) const {
  const sy_text_chat chat = Chat(request);
  sy_text_bytes text = {}, error = {};
  text::Check(sy_text_render_chat(Handle(handle_), &chat, &text, &error), error);
  return text::Take(text);
}

std::vector<int32_t> Tokenizer::ChatIds(const ChatRequest& request, bool safe) const {
  const sy_text_chat chat = Chat(request);
  sy_text_ids ids = {};
  sy_text_bytes error = {};
  text::Check(sy_text_chat_ids(Handle(handle_), &chat, safe, &ids, &error), error);
  return text::Take(ids);
}

}  // namespace switchyard
