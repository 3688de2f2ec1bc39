#include "common.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "default_model.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/model/gguf.h"
#include "switchyard/text/gguf_vocabulary.h"

namespace switchyard::cli {
namespace {

const std::chrono::steady_clock::time_point g_start = std::chrono::steady_clock::now();

}  // namespace

void AddModelArgument(CLI::App& app, std::string& model) {
  app.add_option(
      "MODEL", model,
      "a checkpoint folder in Hugging Face layout; nothing = the embedded default model");
}

void AddSettingOptions(CLI::App& app, Settings& settings) {
  for (const SettingSpec& spec : AllSettings()) {
    const std::string flag = "--" + std::string(spec.name);
    const std::string help =
        fmt::format("{} [{}] (${})", spec.help, settings.Get(spec.name), SettingEnvName(spec.name));
    if (spec.values == "flag") {
      app.add_flag_callback(
             flag, [&settings, &spec, flag] { settings.Set(spec.name, "1", flag); }, help)
          ->group("Settings");
      continue;
    }
    app.add_option_function<std::string>(
           flag,
           [&settings, &spec, flag](const std::string& value) {
             settings.Set(spec.name, value, flag);
           },
           help)
        ->type_name(spec.values.starts_with("auto|count") || spec.values == "count"
                        ? "N"
                        : std::string(spec.values))
        ->group("Settings");
  }
}

std::shared_ptr<const ModelFiles> OpenModelFiles(const std::string& model) {
  if (model.empty()) {
    std::vector<ModelFiles::Embedded> files;
    for (const EmbeddedFile& file : DefaultModelFiles()) files.push_back({file.name, file.bytes});
    return ModelFiles::FromMemory("embedded default model", files);
  }
  if (std::filesystem::path(model).extension() == ".gguf") return OpenGgufFiles(model);
  return ModelFiles::OpenFolder(model);
}

namespace {

// tokenizer.ggml.* and tokenizer.chat_template* of a GGUF file.
GgufVocabulary ReadVocabulary(const GgufFile& file) {
  const std::string prefix = "tokenizer.ggml.";
  GgufVocabulary vocabulary;
  const auto text = [&](const std::string& key) {
    return std::string(file.OptionalText(key).value_or(""));
  };
  const auto texts = [&](const std::string& key) {
    return file.FindEntry(key) == nullptr ? std::vector<std::string_view>{} : file.Texts(key);
  };
  const auto id = [&](const std::string& name) -> std::optional<uint32_t> {
    const auto value = file.OptionalCount(prefix + name + "_token_id", 0, UINT32_MAX);
    if (!value) return {};
    return static_cast<uint32_t>(*value);
  };
  vocabulary.model = text(prefix + "model");
  vocabulary.pre = text(prefix + "pre");
  vocabulary.tokens = texts(prefix + "tokens");
  vocabulary.merges = texts(prefix + "merges");
  if (file.FindEntry(prefix + "scores") != nullptr) {
    for (double score : file.Numbers(prefix + "scores", -1e30, 1e30))
      vocabulary.scores.push_back(static_cast<float>(score));
  }
  if (file.FindEntry(prefix + "token_type") != nullptr) {
    for (size_t type : file.Counts(prefix + "token_type", 0, 100))
      vocabulary.token_type.push_back(static_cast<int32_t>(type));
  }
  vocabulary.bos_token_id = id("bos");
  vocabulary.eos_token_id = id("eos");
  vocabulary.eot_token_id = id("eot");
  vocabulary.unknown_token_id = id("unknown");
  vocabulary.seperator_token_id = id("seperator");
  vocabulary.padding_token_id = id("padding");
  vocabulary.mask_token_id = id("mask");
  vocabulary.add_bos_token = file.OptionalFlag(prefix + "add_bos_token");
  vocabulary.add_eos_token = file.OptionalFlag(prefix + "add_eos_token");
  vocabulary.add_space_prefix = file.OptionalFlag(prefix + "add_space_prefix");
  vocabulary.remove_extra_whitespaces = file.OptionalFlag(prefix + "remove_extra_whitespaces");
  const std::string chat = "tokenizer.chat_template";
  vocabulary.chat_template = text(chat);
  for (const GgufEntry& entry : file.entries()) {
    if (entry.key.starts_with(chat + "."))
      vocabulary.named_chat_templates.emplace(entry.key.substr(chat.size() + 1),
                                              file.Text(entry.key));
  }
  return vocabulary;
}

}  // namespace

TokenizerFiles ReadTokenizerFiles(const std::shared_ptr<const ModelFiles>& shared) {
  const ModelFiles& files = *shared;
  if (!files.Has("tokenizer.json") && IsGgufModel(files)) {
    const GgufModel gguf = GgufModel::Open(shared);
    try {
      return MakeTokenizerFiles(ReadVocabulary(gguf.metadata()));
    } catch (const Error& error) {
      if (error.message().starts_with(gguf.metadata().file_name())) throw;
      throw Error(error.code(),
                  fmt::format("{}: {}", gguf.metadata().file_name(), error.message()));
    }
  }
  if (!files.Has("tokenizer.json")) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: there is no tokenizer.json, so text cannot be encoded; copy it "
                            "from the model's page, or use "
                            "token ids (`switchyard logits --ids`)",
                            files.description()));
  }
  TokenizerFiles contents;
  contents.tokenizer_json = files.ReadText("tokenizer.json");
  if (files.Has("tokenizer_config.json"))
    contents.tokenizer_config_json = files.ReadText("tokenizer_config.json");
  if (files.Has("chat_template.jinja"))
    contents.chat_template_jinja = files.ReadText("chat_template.jinja");
  return contents;
}

std::unique_ptr<ThreadPool> MakeThreadPool(const Settings& settings, NumaPlacement* numa) {
  const std::string& isa = settings.Get("isa");
  for (Isa level : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (isa == IsaName(level)) CapIsa(level);
  }
  size_t threads = AvailableCpus();
  NumaTopology topology;
  if (numa != nullptr) {
    const auto [local_rank, local_size] = PlaceOnHost();
    topology = ReadNumaTopology();
    *numa = ChooseNumaPlacement(topology, local_rank, local_size);
    // Threads inherit the binding of the one that makes them.
    if (!numa->is_only_node) BindThisThread(numa->cpus);
    if (local_size > 1)
      threads = std::max<size_t>(1, std::min(threads, numa->cpus.size()) / numa->ranks_on_nodes);
  }
  threads = settings.GetCount("threads", threads);
  Log(LogLevel::kInfo, "threads",
      {{"count", std::to_string(threads)}, {"source", settings.Source("threads")}});
  if (numa == nullptr) return std::make_unique<ThreadPool>(threads);
  return MakeNumaPool(topology, *numa, threads);
}

ModelOptions MakeModelOptions(const Settings& settings, std::string_view act_dtype) {
  ModelOptions options;
  options.moe.runner = settings.Get("moe-runner");
  options.moe.a2a = settings.Get("moe-a2a");
  options.moe.dispatch_dtype = settings.Get("moe-dispatch-dtype");
  options.moe.combine_dtype = settings.Get("moe-combine-dtype");
  options.num_redundant_experts = settings.GetCount("ep-num-redundant-experts");
  options.init_expert_location = settings.Get("init-expert-location");
  if (settings.GetFlag("enable-eplb")) options.rebalance = moe::RebalancerOptionsOf(settings);
  const std::string& algorithm = settings.Get("ep-dispatch-algorithm");
  if (algorithm == "static") options.dispatch = moe::DispatchAlgorithm::kStatic;
  if (algorithm == "dynamic") options.dispatch = moe::DispatchAlgorithm::kDynamic;
  if (algorithm == "fake") options.dispatch = moe::DispatchAlgorithm::kFake;
  options.moe.act_dtype =
      settings.IsDefault("act-dtype") ? std::string(act_dtype) : settings.Get("act-dtype");
  options.moe.fast_activations = settings.Get("fast-activations");
  options.moe.disable_fused = settings.GetFlag("disable-fused-moe");
  options.moe.activation_quant = !settings.GetFlag("no-activation-quant");
  options.repack = !settings.GetFlag("no-repack");
  options.w4a4_new_packing = settings.GetFlag("moe-w4a4-new-packing");
  if (!settings.IsDefault("quantize")) options.quantize = settings.Get("quantize");
  return options;
}

DType KvDType(const Settings& settings, DType activation_dtype) {
  const std::string& name = settings.Get("kv-dtype");
  for (const auto& [known, dtype] : kKvDTypes) {
    if (known == name) return dtype;
  }
  return activation_dtype == DType::kF32 ? DType::kF32 : DType::kBF16;
}

LoadedModel LoadModel(const ModelRequest& request, const Settings& settings) {
  const double start = SecondsSinceStart();
  LoadedModel loaded;
  loaded.pool = MakeThreadPool(settings, &loaded.numa);
  const std::string name = request.random ? request.random->architecture : request.model;
  loaded.ranks = ModelRanks::Make(settings, request.max_sequences);
  ExecutorOptions executor;
  ModelOptions options = MakeModelOptions(settings, request.act_dtype);
  if (loaded.ranks != nullptr) options.moe.ep = &loaded.ranks->ep();
  if (request.random) {
    loaded.model = Model::Random(*request.random, request.random_scheme, options, *loaded.pool);
  } else {
    OnAllRanks([&] { loaded.files = OpenModelFiles(request.model); });
    loaded.model = Model::Load(loaded.files, options, *loaded.pool);
  }
  executor.context_length = settings.GetCount("ctx");
  executor.max_sequences = request.max_sequences;
  executor.kv_dtype = KvDType(settings, loaded.model->activation_dtype());
  if (loaded.ranks != nullptr) {
    executor.ep = &loaded.ranks->ep();
    executor.max_pass_tokens = loaded.ranks->max_pass_tokens();
    executor.is_dead = [ranks = loaded.ranks.get()](size_t rank) { return ranks->IsDead(rank); };
  }
  loaded.executor = std::make_unique<Executor>(*loaded.model, *loaded.pool, executor);
  loaded.load_seconds = SecondsSinceStart() - start;
  Log(LogLevel::kInfo, "model loaded",
      {{"model", loaded.files == nullptr ? name : loaded.files->description()},
       {"architecture", loaded.model->config().architecture},
       {"context", std::to_string(loaded.executor->context_length())},
       {"seconds", fmt::format("{:.3f}", loaded.load_seconds)}});
  if (request.on_every_rank) request.on_every_rank(loaded);
  if (IsFirstRank()) return loaded;
  loaded.executor->Follow();
  // All ranks free in the same order, and before an exception is under way.
  loaded.executor.reset();
  loaded.model.reset();
  loaded.ranks.reset();
  throw FollowerDone();
}

size_t PassTokens(const LoadedModel& loaded, const Settings& settings, size_t others) {
  const size_t most = loaded.executor->ClampPass(settings.GetCount("chunk") + others);
  return most > others ? most - others : 1;
}

namespace {

// Standard input is rank 0's; the others get what it read.
std::string ShareText(const std::function<std::string()>& read) {
  ProcessGroup* world = World();
  if (world == nullptr || world->size() == 1) return read();
  std::string text;
  OnAllRanks([&] {
    if (world->rank() == 0) text = read();
  });
  return AllGatherText(*world, text, Deadline::Never("standard input"))[0];
}

std::string ReadWhole(const std::string& path) {
  const std::string what = path == "-" ? "standard input" : path;
  std::FILE* file = path == "-" ? stdin : std::fopen(path.c_str(), "rb");
  const auto refuse = [&] {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: cannot be read: {}", what,
                                                  std::generic_category().message(errno)));
  };
  if (file == nullptr) refuse();
  std::string content;
  char buffer[65536];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, file))
    content.append(buffer, count);
  const bool failed = std::ferror(file) != 0;
  const int error = errno;
  if (file != stdin) std::fclose(file);
  errno = error;
  if (failed) refuse();
  return content;
}

}  // namespace

std::string ReadFile(const std::string& path) {
  if (path == "-") return ShareText([&] { return ReadWhole(path); });
  return ReadWhole(path);
}

std::string Printable(std::string_view text) {
  std::string printable;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n') || byte == 0x7f) {
      printable += fmt::format("\\x{:02x}", byte);
    } else {
      printable += c;
    }
  }
  return printable;
}

void RequireWritable(std::string_view option, const std::string& path) {
  if (path.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: the name is empty", option));
  }
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  if (!std::filesystem::is_directory(folder) || access(folder.c_str(), W_OK) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} {}: the folder {} does not exist or cannot be written to", option,
                            path, folder));
  }
}

void WriteFile(std::string_view option, const std::string& path, std::string_view content) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool good =
      file != nullptr && std::fwrite(content.data(), 1, content.size(), file) == content.size();
  if (file != nullptr && std::fclose(file) != 0) good = false;
  if (!good) {
    throw Error(ErrorCode::kUnavailable, fmt::format("{} {}: cannot be written", option, path));
  }
}

std::vector<int32_t> ParseIds(std::string_view text) {
  std::vector<int32_t> ids;
  std::string word;
  std::string spaced(text);
  std::replace(spaced.begin(), spaced.end(), ',', ' ');
  std::istringstream words(spaced);
  while (words >> word) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size() || id < 0) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("\"{}\" is no token id", word));
    }
    ids.push_back(id);
  }
  return ids;
}

void RequireUtf8(std::string_view text, std::string_view what) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) {
      return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u;
    };
    const unsigned lead = byte(i);
    const size_t length = lead < 0x80       ? 1
                          : lead >> 5 == 6  ? 2
                          : lead >> 4 == 14 ? 3
                          : lead >> 3 == 30 ? 4
                                            : 0;
    unsigned point = length == 1 ? lead : lead & (0x7fu >> length);
    bool good = length != 0;
    for (size_t j = 1; good && j < length; ++j) {
      good = byte(i + j) >> 6 == 2;
      point = point << 6 | (byte(i + j) & 0x3f);
    }
    constexpr unsigned kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    good = good && point >= kSmallest[length] && point <= 0x10ffff &&
           (point < 0xd800 || point > 0xdfff);
    if (!good) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is not valid UTF-8: byte {:#04x} at offset {}", what, lead, i));
    }
    i += length;
  }
}

std::string FormatBytes(double bytes) {
  constexpr std::string_view kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, kUnits[unit]);
}

double SecondsSinceStart() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - g_start).count();
}

}  // namespace switchyard::cli
