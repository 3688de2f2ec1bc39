// Verb tokenize: text to ids, ids to text, messages to the text that a chat template makes of them.
// Needs no weights.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "common.h"
#include "switchyard/core/error.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct Options {
  std::string model, text, file, decode, chat, tools, chat_template, kwargs;
  bool ids = false;
  bool generation_prompt = false;
  bool continue_final_message = false;
  bool no_special_tokens = false;
  bool plain = false;
  bool keep_special = false;
  bool safe = false;
};

std::shared_ptr<const Tokenizer> OpenWithTemplate(const Options& options) {
  const std::shared_ptr<const ModelFiles> files = OpenModelFiles(options.model);
  if (options.chat_template.empty()) return OpenTokenizer(files);
  TokenizerFiles contents = ReadTokenizerFiles(files);
  contents.chat_template_jinja = ReadFile(options.chat_template);
  return Tokenizer::Create(contents);
}

int PrintIds(const std::vector<int32_t>& ids) {
  fmt::print("{}\n", fmt::join(ids, ","));
  return 0;
}

// A file with the messages alone (an array), or an object with "messages" and perhaps "tools".
ChatRequest ReadChat(const Options& options) {
  ChatRequest request;
  request.messages_json = ReadFile(options.chat);
  nlohmann::ordered_json parsed =
      nlohmann::ordered_json::parse(request.messages_json, nullptr, false);
  if (parsed.is_discarded())
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: not valid JSON", options.chat));
  if (parsed.is_object() && parsed.contains("messages")) {
    if (parsed.contains("tools")) request.tools_json = parsed["tools"].dump();
    request.messages_json = parsed["messages"].dump();
  }
  if (!options.tools.empty()) request.tools_json = ReadFile(options.tools);
  request.kwargs_json = options.kwargs;
  request.add_generation_prompt = options.generation_prompt;
  request.continue_final_message = options.continue_final_message;
  return request;
}

int Run(const Options& options, bool has_text) {
  const std::shared_ptr<const Tokenizer> tokenizer = OpenWithTemplate(options);
  if (!options.decode.empty()) {
    fmt::print("{}\n", tokenizer->Decode(ParseIds(options.decode), !options.keep_special));
    return 0;
  }
  if (!options.chat.empty()) {
    const ChatRequest request = ReadChat(options);
    if (options.ids) return PrintIds(tokenizer->ChatIds(request, options.safe));
    // The rendered text and nothing else, so that it can be compared byte by byte.
    const std::string text = tokenizer->RenderChat(request);
    std::fwrite(text.data(), 1, text.size(), stdout);
    return 0;
  }
  const std::string text =
      has_text ? options.text : ReadFile(options.file.empty() ? "-" : options.file);
  RequireUtf8(text, has_text ? "--text" : options.file.empty() ? "standard input" : options.file);
  return PrintIds(tokenizer->Encode(
      text, {.add_special_tokens = !options.no_special_tokens, .parse_special = !options.plain}));
}

}  // namespace

std::function<int()> SetUpTokenize(CLI::App& app, Settings&) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  CLI::Option* text = app.add_option("--text", options->text,
                                     "text to encode; without --text and --file: standard input");
  CLI::Option* file = app.add_option("--file", options->file, "file to encode")->excludes(text);
  CLI::Option* decode = app.add_option("--decode", options->decode, "ids to decode: 1,2,3")
                            ->excludes(text)
                            ->excludes(file);
  CLI::Option* chat = app.add_option("--chat", options->chat,
                                     "JSON file of messages to render with the chat template")
                          ->excludes(text)
                          ->excludes(file)
                          ->excludes(decode);
  app.add_option("--tools", options->tools, "JSON file of tools for --chat")->needs(chat);
  app.add_option("--template", options->chat_template,
                 "a template file to use in place of the model's");
  app.add_option("--kwargs", options->kwargs,
                 "JSON object of further template variables, e.g. {\"enable_thinking\": false}");
  app.add_flag("--generation-prompt", options->generation_prompt,
               "end the rendered chat with the start of an answer");
  app.add_flag("--continue-final-message", options->continue_final_message,
               "leave the last message open");
  CLI::Option* ids = app.add_flag("--ids", options->ids, "print ids (of --chat too)");
  app.add_flag("--safe", options->safe,
               "with --chat --ids: control tokens written in messages stay plain text")
      ->needs(chat)
      ->needs(ids);
  app.add_flag("--no-special-tokens", options->no_special_tokens,
               "do not add what the tokenizer adds around a text (BOS)");
  app.add_flag("--plain", options->plain, "control tokens written in the text stay plain text");
  app.add_flag("--keep-special", options->keep_special, "with --decode: print control tokens too");
  return [options, text] { return Run(*options, text->count() > 0); };
}

}  // namespace switchyard::cli
