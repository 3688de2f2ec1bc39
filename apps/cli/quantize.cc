// Verb quantize: writes a checkpoint again in another scheme.
#include "switchyard/model/quantize.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common.h"
#include "gguf_tokenizer.h"
#include "switchyard/engine/evaluate.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

constexpr size_t kWorst = 10;

struct Options {
  std::string in, out, scheme, text;
  size_t window = 0;
  bool force = false;
  bool json = false;
};

std::string SchemeList() {
  std::string list;
  for (const QuantizeScheme& scheme : QuantizeSchemes())
    list += fmt::format("{}{}", list.empty() ? "" : ", ", scheme.name);
  return list;
}

// One line on a terminal, redrawn.
class ProgressBar {
 public:
  explicit ProgressBar(bool show) : show_(show) {}
  ~ProgressBar() {
    if (shown_) fmt::print(stderr, "\n");
  }
  void Show(size_t done, size_t all) {
    if (!show_) return;
    constexpr size_t kWidth = 40;
    const size_t filled = all == 0 ? kWidth : std::min(kWidth, done * kWidth / all);
    fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {} of {}", "", filled, "", kWidth - filled,
               FormatBytes(static_cast<double>(done)), FormatBytes(static_cast<double>(all)));
    shown_ = true;
  }

 private:
  bool show_;
  bool shown_ = false;
};

PerplexityResult Evaluate(const std::string& model, const std::string& text, size_t window,
                          const Settings& settings) {
  const LoadedModel loaded = LoadModel({.model = model, .act_dtype = "f32"}, settings);
  const std::vector<int32_t> ids =
      OpenTokenizer(loaded.files)
          ->Encode(text, {.add_special_tokens = false, .parse_special = false});
  return Perplexity(*loaded.executor, ids,
                    {.window = window, .chunk = PassTokens(loaded, settings)});
}

struct Perplexities {
  PerplexityResult before, after;
};

nlohmann::ordered_json ToJson(const TensorReport& tensor) {
  return {{"name", tensor.name},
          {"from", tensor.from},
          {"to", tensor.to},
          {"note", tensor.note},
          {"elements", tensor.elements},
          {"bytes_before", tensor.bytes_before},
          {"bytes_after", tensor.bytes_after},
          {"bits_per_weight", tensor.bits_per_weight()},
          {"rms_error", tensor.rms_error},
          {"max_error", tensor.max_error}};
}

void PrintJson(const QuantizeReport& report, const Perplexities* perplexities) {
  nlohmann::ordered_json json = {{"scheme", report.scheme},
                                 {"bytes_before", report.bytes_before},
                                 {"bytes_after", report.bytes_after},
                                 {"bits_per_weight", report.bits_per_weight()},
                                 {"resumed_bytes", report.resumed_bytes},
                                 {"warnings", report.warnings},
                                 {"tensors", nlohmann::ordered_json::array()}};
  for (const TensorReport& tensor : report.tensors) json["tensors"].push_back(ToJson(tensor));
  if (perplexities != nullptr) {
    json["perplexity_before"] = perplexities->before.perplexity;
    json["perplexity_after"] = perplexities->after.perplexity;
  }
  fmt::print("{}\n", json.dump());
}

// Tensors whose type is not that of the scheme, by the reason.
void PrintNotes(const QuantizeReport& report) {
  struct Reason {
    std::string note, to, first;
    size_t count = 0;
  };
  std::vector<Reason> reasons;
  for (const TensorReport& tensor : report.tensors) {
    if (tensor.note.empty()) continue;
    auto reason = std::ranges::find_if(reasons, [&](const Reason& known) {
      return known.note == tensor.note && known.to == tensor.to;
    });
    if (reason == reasons.end())
      reason = reasons.insert(reasons.end(), {tensor.note, tensor.to, tensor.name, 0});
    ++reason->count;
  }
  for (const Reason& reason : reasons)
    fmt::print("{} tensors ({}, ...) are {}: {}\n", reason.count, reason.first, reason.to,
               reason.note);
}

void PrintReport(const Options& options, const QuantizeReport& report,
                 const Perplexities* perplexities) {
  std::vector<const TensorReport*> worst;
  for (const TensorReport& tensor : report.tensors) {
    if (tensor.rms_error > 0) worst.push_back(&tensor);
  }
  std::ranges::stable_sort(worst, [](const TensorReport* a, const TensorReport* b) {
    return a->rms_error > b->rms_error;
  });
  if (worst.size() > kWorst) worst.resize(kWorst);
  if (!worst.empty()) {
    fmt::print("{:>10} {:>10} {:>6}  tensors with the largest relative error\n", "rms error",
               "max error", "bits");
  }
  for (const TensorReport* tensor : worst) {
    fmt::print("{:>9.3f}% {:>10.3g} {:>6.2f}  {}\n", 100 * tensor->rms_error, tensor->max_error,
               tensor->bits_per_weight(), tensor->name);
  }
  PrintNotes(report);
  fmt::print("{}: {} to {}, {:.2f} bits per weight\n", options.out,
             FormatBytes(static_cast<double>(report.bytes_before)),
             FormatBytes(static_cast<double>(report.bytes_after)), report.bits_per_weight());
  if (perplexities == nullptr) return;
  fmt::print("perplexity {:.2f} of IN, {:.2f} of OUT ({} tokens scored)\n",
             perplexities->before.perplexity, perplexities->after.perplexity,
             perplexities->after.num_scored);
}

// Where the input has text files of a tokenizer and the output is a GGUF file, or the other way
// round, one is made from the other.
void SetTokenizer(const Options& options, const QuantizeScheme& scheme, QuantizeOptions& quantize) {
  const auto files = OpenModelFiles(options.in);
  const bool from_gguf = IsGgufModel(*files);
  if (from_gguf == scheme.is_gguf) return;
  if (from_gguf) {
    if (HasGgufTokenizer(files)) quantize.texts = TokenizerTexts(ReadTokenizerFiles(files));
  } else if (files->Has("tokenizer.json")) {
    quantize.add_tokenizer = GgufTokenizerSetter(files);
  }
}

int Run(const Options& options, const Settings& settings) {
  const QuantizeScheme& scheme = FindQuantizeScheme(options.scheme);
  std::string text;
  if (!options.text.empty()) {
    text = ReadFile(options.text);
    RequireUtf8(text, options.text);
  }
  QuantizeOptions quantize;
  quantize.scheme = options.scheme;
  quantize.force = options.force;
  SetTokenizer(options, scheme, quantize);
  QuantizeReport report;
  {
    ProgressBar bar(isatty(STDERR_FILENO) != 0);
    quantize.on_progress = [&](size_t done, size_t all) {
      bar.Show(done, all);
      return true;
    };
    const std::unique_ptr<ThreadPool> pool = MakeThreadPool(settings);
    report = QuantizeCheckpoint(options.in, options.out, quantize, *pool);
  }
  for (const std::string& warning : report.warnings)
    fmt::print(stderr, "switchyard: warning: {}\n", Printable(warning));
  Perplexities perplexities;
  if (!options.text.empty()) {
    perplexities.before = Evaluate(options.in, text, options.window, settings);
    perplexities.after = Evaluate(options.out, text, options.window, settings);
  }
  const Perplexities* shown = options.text.empty() ? nullptr : &perplexities;
  if (options.json) {
    PrintJson(report, shown);
  } else {
    PrintReport(options, report, shown);
  }
  return 0;
}

}  // namespace

std::function<int()> SetUpQuantize(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  app.add_option("IN", options->in, "a checkpoint folder in Hugging Face layout, or a GGUF file")
      ->required();
  app.add_option("OUT", options->out, "the folder or GGUF file to write")->required();
  app.add_option("--scheme", options->scheme, SchemeList())->required();
  app.add_flag("--force", options->force,
               "replace what is at OUT, and start anew where an unfinished run does not fit");
  app.add_option("--text", options->text, "text file (UTF-8): the perplexity of IN and OUT");
  app.add_option("--window", options->window,
                 "tokens of the text seen at once [the context, at most 2048]")
      ->check(kCount);
  app.add_flag("--json", options->json, "machine-readable, with every tensor");
  AddSettingOptions(app, settings);
  return [options, &settings] { return Run(*options, settings); };
}

}  // namespace switchyard::cli
