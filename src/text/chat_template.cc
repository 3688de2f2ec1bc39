#include "switchyard/text/chat_template.h"

#include "text/ffi.h"

namespace switchyard {
namespace text {

void Check(int32_t status, const OwnedBuffer& error) {
  if (status == SWT_OK) return;
  ErrorCode code = ErrorCode::kInternal;
  if (status == SWT_INVALID_ARGUMENT) code = ErrorCode::kInvalidArgument;
  if (status == SWT_FAILED_PRECONDITION) code = ErrorCode::kFailedPrecondition;
  if (status == SWT_CORRUPT_DATA) code = ErrorCode::kCorruptData;
  if (status == SWT_RESOURCE_EXHAUSTED) code = ErrorCode::kResourceExhausted;
  throw Error(code, error.Text());
}

swt_chat ToChat(const ChatRequest& request) {
  swt_chat chat{};
  chat.messages = Borrow(std::string_view(request.messages_json));
  chat.tools = Borrow(request.tools_json);
  chat.kwargs = Borrow(request.kwargs_json);
  chat.continue_field = Borrow(request.continue_final_message);
  chat.add_generation_prompt = request.add_generation_prompt ? 1 : 0;
  return chat;
}

}  // namespace text

std::shared_ptr<const ChatTemplate> ChatTemplate::Create(std::string_view source, std::string_view label,
                                                         std::string_view special_tokens_json) {
  swt_template* handle = nullptr;
  text::OwnedBuffer error;
  text::Check(swt_template_new(text::Borrow(label), text::Borrow(source), text::Borrow(special_tokens_json), &handle,
                               &error.raw),
              error);
  return std::shared_ptr<const ChatTemplate>(new ChatTemplate(handle));
}

ChatTemplate::~ChatTemplate() { swt_template_free(handle_); }

std::string ChatTemplate::Render(const ChatRequest& request) const {
  const swt_chat chat = text::ToChat(request);
  text::OwnedBuffer out, error;
  text::Check(swt_template_render(handle_, &chat, &out.raw, &error.raw), error);
  return out.Text();
}

}  // namespace switchyard
