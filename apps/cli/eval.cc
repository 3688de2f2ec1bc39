// Verb eval: perplexity of a text.
#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "common.h"
#include "switchyard/engine/evaluate.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct Options {
  std::string model, text;
  size_t window = 0, stride = 0;
  bool json = false;
};

int Run(const Options& options, const Settings& settings) {
  const std::string text = ReadFile(options.text);
  RequireUtf8(text, options.text);
  const LoadedModel loaded = LoadModel({.model = options.model, .act_dtype = "f32"}, settings);
  const std::shared_ptr<const Tokenizer> tokenizer = OpenTokenizer(loaded.files);
  // The text as one string, nothing added and nothing in it a control token.
  const std::vector<int32_t> ids =
      tokenizer->Encode(text, {.add_special_tokens = false, .parse_special = false});
  const bool show_progress = isatty(STDERR_FILENO) != 0;
  const double start = SecondsSinceStart();
  const PerplexityResult result = Perplexity(
      *loaded.executor, ids,
      {.window = options.window, .stride = options.stride, .chunk = PassTokens(loaded, settings)},
      [&](size_t done, size_t all) {
        if (show_progress)
          fmt::print(stderr, "\r{} of {} tokens{}", done, all, done == all ? "\n" : "");
      });
  const double seconds = SecondsSinceStart() - start;
  if (options.json) {
    const nlohmann::ordered_json line = {
        {"perplexity", result.perplexity}, {"mean_nll", result.mean_nll},
        {"tokens", result.num_tokens},     {"scored_tokens", result.num_scored},
        {"windows", result.num_windows},   {"window", result.window},
        {"stride", result.stride},         {"seconds", seconds}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("perplexity {:.2f} per token ({:.4f} nats)\n", result.perplexity, result.mean_nll);
  fmt::print("{} tokens, {} scored, {} windows of {} tokens, stride {}, {:.1f} s\n",
             result.num_tokens, result.num_scored, result.num_windows, result.window, result.stride,
             seconds);
  return 0;
}

}  // namespace

std::function<int()> SetUpEval(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  app.add_option("--text", options->text, "text file (UTF-8)")->required();
  app.add_option("--window", options->window, "tokens seen at once [the context, at most 2048]")
      ->check(kCount);
  app.add_option("--stride", options->stride, "distance between windows [the window]")
      ->check(kCount);
  app.add_flag("--json", options->json, "machine-readable");
  AddSettingOptions(app, settings);
  return [options, &settings] { return Run(*options, settings); };
}

}  // namespace switchyard::cli
