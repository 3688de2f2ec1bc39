// Verb run: one answer to a prompt, or an interactive chat. Text streams to standard output as it
// comes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "common.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/engine/engine.h"
#include "switchyard/model/generation_config.h"
#include "switchyard/text/detokenizer.h"
#include "switchyard/text/stop_matcher.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct Options {
  std::string model, prompt, system;
  std::optional<size_t> max_new_tokens;
  std::optional<double> temperature, top_p, min_p, repeat_penalty;
  std::optional<size_t> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stops;
  bool raw = false;
};

// Set by Ctrl-C; read once per token.
std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void OnInterrupt(int) { g_interrupted.store(true); }

void CatchInterrupt() {
  struct sigaction action = {};
  action.sa_handler = &OnInterrupt;  // without SA_RESTART, so that a waiting read ends too
  sigaction(SIGINT, &action, nullptr);
}

// What the user said, else what the checkpoint recommends.
SamplingOptions MakeSampling(const Options& options, const GenerationDefaults& defaults) {
  SamplingOptions sampling;
  sampling.temperature =
      options.temperature.value_or(defaults.do_sample ? defaults.temperature.value_or(1.0) : 0.0);
  sampling.top_k = options.top_k.value_or(defaults.top_k.value_or(0));
  sampling.top_p = options.top_p.value_or(defaults.top_p.value_or(1.0));
  sampling.min_p = options.min_p.value_or(defaults.min_p.value_or(0.0));
  sampling.repeat_penalty =
      options.repeat_penalty.value_or(defaults.repetition_penalty.value_or(1.0));
  sampling.seed = options.seed.value_or(std::random_device{}());
  ValidateSampling(sampling);
  Log(LogLevel::kInfo, "sampling",
      {{"temperature", fmt::format("{}", sampling.temperature)},
       {"seed", std::to_string(sampling.seed)}});
  return sampling;
}

// Every id that ends an answer: of config.json, generation_config.json and the tokenizer, joined.
std::vector<int32_t> StopIds(const ModelConfig& config, const GenerationDefaults& defaults,
                             const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  for (const std::vector<size_t>* list : {&config.eos_ids, &defaults.eos_ids}) {
    for (size_t id : *list) ids.push_back(static_cast<int32_t>(id));
  }
  if (tokenizer.eos_id()) ids.push_back(*tokenizer.eos_id());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void Print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

struct Answer {
  std::string text;
  size_t num_tokens = 0;
  FinishReason finish = FinishReason::kNone;
};

// Everything that answers have in common.
class Talker {
 public:
  Talker(const Options& options, const Settings& settings)
      : options_(options),
        loaded_(LoadModel({.model = options.model, .act_dtype = "auto"}, settings)),
        tokenizer_(OpenTokenizer(loaded_.files)),
        engine_(*loaded_.executor,
                {.prefill_chunk = PassTokens(loaded_, settings), .max_sequences = 1}) {
    const GenerationDefaults defaults = ReadGenerationConfig(*loaded_.files);
    sampling_ = MakeSampling(options, defaults);
    stop_ids_ = StopIds(loaded_.model->config(), defaults, *tokenizer_);
  }

  const Tokenizer& tokenizer() const { return *tokenizer_; }

  std::vector<int32_t> EncodeRaw(const std::string& text) const { return tokenizer_->Encode(text); }

  // Messages through the chat template; control tokens written in them stay plain text.
  std::vector<int32_t> EncodeChat(const nlohmann::ordered_json& messages) const {
    ChatRequest request;
    request.messages_json = messages.dump();
    return tokenizer_->ChatIds(request);
  }

  // Generates and prints until something ends the answer.
  Answer Reply(std::vector<int32_t> prompt) {
    g_interrupted.store(false);
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_new_tokens = options_.max_new_tokens.value_or(loaded_.executor->context_length());
    request.sampling = sampling_;
    request.stop_ids = stop_ids_;
    const double start = SecondsSinceStart();
    double first = 0;
    const RequestId id = engine_.Submit(std::move(request));
    StreamingDetokenizer detokenizer(tokenizer_);
    StopMatcher matcher(options_.stops);
    Answer answer;
    std::shared_ptr<const Error> error;
    const auto emit = [&](std::string text) {
      Print(text);
      answer.text += text;
    };
    while (engine_.HasWork()) {
      if (g_interrupted.load()) engine_.Cancel(id);
      for (const TokenEvent& event : engine_.Step()) {
        answer.finish = event.finish;
        if (event.error != nullptr) error = event.error;
        if (event.token < 0 || event.finish == FinishReason::kStop) continue;
        if (answer.num_tokens++ == 0) first = SecondsSinceStart();
        emit(matcher.Add(detokenizer.Add(event.token)));
        if (matcher.stopped()) engine_.Cancel(id);
      }
    }
    if (error != nullptr) throw Error(*error);
    if (!matcher.stopped()) {
      emit(matcher.Add(detokenizer.Finish()));
      emit(matcher.Finish());
    } else {
      answer.finish = FinishReason::kStop;
    }
    const double decode_seconds = SecondsSinceStart() - first;
    Log(LogLevel::kInfo, "answer",
        {{"tokens", std::to_string(answer.num_tokens)},
         {"finish", std::string(FinishReasonName(answer.finish))},
         {"first_token_s", fmt::format("{:.3f}", first - start)},
         {"since_process_start_s", fmt::format("{:.3f}", first)},
         {"tokens_per_s",
          fmt::format("{:.1f}", answer.num_tokens > 1
                                    ? static_cast<double>(answer.num_tokens - 1) / decode_seconds
                                    : 0.0)}});
    return answer;
  }

 private:
  const Options& options_;
  LoadedModel loaded_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  Engine engine_;
  SamplingOptions sampling_;
  std::vector<int32_t> stop_ids_;
};

nlohmann::ordered_json FirstMessages(const Options& options) {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  if (!options.system.empty())
    messages.push_back({{"role", "system"}, {"content", options.system}});
  return messages;
}

int AnswerOnce(const Options& options, Talker& talker) {
  const bool chat = !options.raw && talker.tokenizer().HasChatTemplate();
  if (!options.system.empty() && !chat) {
    throw Error(ErrorCode::kInvalidArgument,
                options.raw ? "--system has no effect with --raw: leave one of them out"
                            : "--system needs a chat template, and this model has none");
  }
  std::vector<int32_t> prompt;
  if (chat) {
    nlohmann::ordered_json messages = FirstMessages(options);
    messages.push_back({{"role", "user"}, {"content", options.prompt}});
    prompt = talker.EncodeChat(messages);
  } else {
    prompt = talker.EncodeRaw(options.prompt);
  }
  const Answer answer = talker.Reply(std::move(prompt));
  Print("\n");
  return answer.finish == FinishReason::kCancelled ? 130 : 0;
}

int Chat(const Options& options, Talker& talker) {
  const bool use_template = !options.raw && talker.tokenizer().HasChatTemplate();
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (terminal) {
    fmt::print(
        stderr, "{}\n",
        use_template
            ? "Chat. Ctrl-C stops an answer (at the prompt: ends), /clear forgets, /exit ends."
            : "Each line is continued as it is. Ctrl-C stops, /exit ends.");
  }
  nlohmann::ordered_json messages = FirstMessages(options);
  std::string line;
  while (true) {
    if (terminal) fmt::print(stderr, "> ");
    if (!std::getline(std::cin, line)) break;
    while (line.ends_with(' ') || line.ends_with('\r')) line.pop_back();
    if (line == "/exit") break;
    if (line == "/clear") {
      messages = FirstMessages(options);
      continue;
    }
    if (line.empty()) continue;
    try {
      RequireUtf8(line, "the line");
      if (use_template) {
        messages.push_back({{"role", "user"}, {"content", line}});
        const Answer answer = talker.Reply(talker.EncodeChat(messages));
        messages.push_back({{"role", "assistant"}, {"content", answer.text}});
      } else {
        talker.Reply(talker.EncodeRaw(line));
      }
      Print("\n");
    } catch (const Error& e) {
      // The conversation goes on without the turn that failed.
      if (use_template && !messages.empty() && messages.back()["role"] == "user")
        messages.erase(messages.size() - 1);
      fmt::print(stderr, "switchyard: {}: {}{}\n", ErrorCodeName(e.code()), e.message(),
                 use_template && terminal ? " (/clear forgets the conversation)" : "");
      if (!terminal) return ErrorExitStatus(e.code());
    }
  }
  if (terminal) fmt::print(stderr, "\n");
  return 0;
}

int Run(const Options& options, const Settings& settings, bool has_prompt) {
  if (options.max_new_tokens == size_t{0}) {
    throw Error(ErrorCode::kInvalidArgument, "-n must be at least 1, found 0");
  }
  if (has_prompt && options.prompt.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "-p: the prompt is empty: at least one character is needed to start from");
  }
  RequireUtf8(options.prompt, "-p");
  RequireUtf8(options.system, "--system");
  for (const std::string& stop : options.stops) {
    RequireUtf8(stop, "--stop");
    if (stop.empty())
      throw Error(ErrorCode::kInvalidArgument, "--stop: a stop text must not be empty");
  }
  Talker talker(options, settings);
  CatchInterrupt();
  return has_prompt ? AnswerOnce(options, talker) : Chat(options, talker);
}

}  // namespace

std::function<int()> SetUpRun(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  CLI::Option* prompt = app.add_option(
      "-p,--prompt", options->prompt,
      "answer this and end; without it: an interactive chat. The model's chat template is "
      "applied if it has one, unless --raw is given");
  app.add_option("-n,--max-tokens", options->max_new_tokens,
                 "most tokens of an answer [what fits into the context]")
      ->check(kCount);
  app.add_option("--temp", options->temperature,
                 "temperature, 0 = greedy [generation_config.json, else 0]");
  app.add_option("--top-k", options->top_k, "keep the k most likely tokens, 0 = all")
      ->check(kCount);
  app.add_option("--top-p", options->top_p,
                 "keep the most likely tokens up to this sum of probabilities");
  app.add_option("--min-p", options->min_p,
                 "drop tokens below this part of the most likely one's probability");
  app.add_option("--repeat-penalty", options->repeat_penalty,
                 "penalty on tokens that occurred, 1 = none");
  app.add_option("--seed", options->seed, "seed of the random draw [random]")->check(kCount);
  app.add_option("--stop", options->stops,
                 "text that ends an answer, not printed; may be given several times");
  app.add_option("--system", options->system, "system message of the chat");
  app.add_flag("--raw", options->raw,
               "continue the text as it is: no chat template, control tokens written in it count");
  AddSettingOptions(app, settings);
  return [options, &settings, prompt] { return Run(*options, settings, prompt->count() > 0); };
}

}  // namespace switchyard::cli
