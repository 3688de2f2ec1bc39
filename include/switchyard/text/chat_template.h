// Chat templates: messages in, prompt text out, as transformers' apply_chat_template renders it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct swt_template;

namespace switchyard {

// One chat to render. Everything structured is JSON, so that requests pass through without conversion.
struct ChatRequest {
  // Array of message objects, at least one. Fields whose value is null count as absent; "reasoning_content" and
  // "thinking" are copied to each other. Content given as a list of parts goes to the template as it is.
  std::string messages_json;
  // Array of tool objects (JSON schemas). Absent means no tools; "[]" means an empty list.
  std::optional<std::string> tools_json = std::nullopt;
  // Object of further template variables, e.g. {"enable_thinking": false}. They override the names of special tokens
  // and may set "documents"; "messages", "tools" and the two fields below cannot be set here.
  std::optional<std::string> kwargs_json = std::nullopt;
  // Ends the prompt with the header of a new assistant message.
  bool add_generation_prompt = false;
  // Leaves this field of the last message open ("content", or "reasoning_content"), so that the model continues it.
  // Excludes add_generation_prompt.
  std::optional<std::string> continue_final_message = std::nullopt;
};

// A template without a tokenizer. Immutable; Render may be called from many threads.
//
// The engine has no file access and no loader. Work, memory and recursion of one rendering are limited, with budgets
// that grow with the request, so that a hostile template stops with an error in under a second.
class ChatTemplate {
 public:
  // Compiles `source`. `label` names it in messages. `special_tokens_json` is an object such as
  // {"bos_token": "<s>"}, whose members are variables of the template.
  // Errors: kCorruptData if the template has a syntax error, or uses an unknown tag, filter or test (names the line);
  //   kInvalidArgument if special_tokens_json is not an object.
  static std::shared_ptr<const ChatTemplate> Create(std::string_view source,
                                                    std::string_view label = "chat_template.jinja",
                                                    std::string_view special_tokens_json = "{}");
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // Errors: kInvalidArgument if the JSON is malformed, or the template refuses the messages or fails on them (names
  //   the line); kResourceExhausted if a limit stopped it.
  std::string Render(const ChatRequest& request) const;

 private:
  explicit ChatTemplate(swt_template* handle) : handle_(handle) {}

  swt_template* handle_;
};

}  // namespace switchyard
