// What several verbs share: the options of running a model, and opening one.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ranks.h"
#include "switchyard/core/numa.h"
#include "switchyard/core/settings.h"
#include "switchyard/core/thread_pool.h"
#include "switchyard/engine/executor.h"
#include "switchyard/model/files.h"
#include "switchyard/model/model.h"
#include "switchyard/text/tokenizer.h"

namespace switchyard::cli {

// Refuses negative and absurd counts, which the parser would wrap around.
inline const CLI::Range kCount(0.0, 1e15, "a whole number");

// Adds the MODEL argument. Empty afterwards = the embedded model.
void AddModelArgument(CLI::App& app, std::string& model);

// Adds an option for every setting that has one on the command line of verbs that run a model.
void AddSettingOptions(CLI::App& app, Settings& settings);

// The files of MODEL: a folder in Hugging Face layout, a GGUF file, or the embedded model if empty.
// Errors: kNotFound, kUnsupported, naming the path and what would do.
std::shared_ptr<const ModelFiles> OpenModelFiles(const std::string& model);

// What describes the tokenizer of a model: its files, or the vocabulary of GGUF files.
// Errors: kNotFound naming the file that is missing; kCorruptData, kUnsupported naming the field.
TokenizerFiles ReadTokenizerFiles(const std::shared_ptr<const ModelFiles>& files);

// Errors: as ReadTokenizerFiles; kCorruptData from the tokenizer.
inline std::shared_ptr<const Tokenizer> OpenTokenizer(
    const std::shared_ptr<const ModelFiles>& files) {
  return Tokenizer::Create(ReadTokenizerFiles(files));
}

// Applies --isa and --threads. Ranks that share a host divide its NUMA nodes and CPUs among them:
// `numa`, if given, receives this rank's share, to which its threads are bound where there are
// several nodes.
std::unique_ptr<ThreadPool> MakeThreadPool(const Settings& settings, NumaPlacement* numa = nullptr);

// The model options that the settings ask for; `act_dtype` is what the verb takes if nobody set it.
ModelOptions MakeModelOptions(const Settings& settings, std::string_view act_dtype);

// Types that --kv-dtype names.
inline constexpr std::array<std::pair<std::string_view, DType>, 5> kKvDTypes = {
    {{"f32", DType::kF32},
     {"bf16", DType::kBF16},
     {"f16", DType::kF16},
     {"fp8", DType::kF8E4M3},
     {"int8", DType::kI8}}};

// The type of the KV cache: f32 with f32 activations, else bf16, unless the settings say otherwise.
DType KvDType(const Settings& settings, DType activation_dtype);

// A model ready to compute.
struct LoadedModel {
  std::shared_ptr<const ModelFiles> files;  // null for random weights
  NumaPlacement numa;                       // of this rank
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<ModelRanks> ranks;  // null on one rank
  std::unique_ptr<Model> model;
  std::unique_ptr<Executor> executor;
  double load_seconds = 0;
};
// What LoadModel loads.
struct ModelRequest {
  std::string model;           // a folder, or empty
  std::string_view act_dtype;  // the verb's default
  size_t max_sequences = 1;
  // Instead of the model: random weights in this shape.
  std::optional<ModelConfig> random = {};
  std::string random_scheme = "bf16";
  // Called on every rank once the model is ready; collective calls are possible.
  std::function<void(const LoadedModel& loaded)> on_every_rank = {};
};
// Under mpirun only rank 0 returns: the others compute what it asks for until its executor is
// destroyed, and end by FollowerDone.
// Errors: all those of loading, on any rank.
LoadedModel LoadModel(const ModelRequest& request, const Settings& settings);

// Prompt tokens of one pass: the setting, or what the exchange between ranks takes beside
// `others` sequences that decode.
size_t PassTokens(const LoadedModel& loaded, const Settings& settings, size_t others = 0);

// The whole content of a file, "-" = standard input. Errors: kNotFound naming it.
std::string ReadFile(const std::string& path);

// `text` without control characters: it may quote a file's contents, which a terminal would obey.
std::string Printable(std::string_view text);

// Refuses, before anything is computed, the output `path` of `option` if it cannot be written.
// Errors: kInvalidArgument naming both.
void RequireWritable(std::string_view option, const std::string& path);

// Writes the output of `option`. Errors: kUnavailable naming both.
void WriteFile(std::string_view option, const std::string& path, std::string_view content);

// "1,2,3" or "1 2 3". Errors: kInvalidArgument naming the first piece that is no id.
std::vector<int32_t> ParseIds(std::string_view text);

// Errors: kInvalidArgument with the byte offset if `text` is no valid UTF-8; `what` names it.
void RequireUtf8(std::string_view text, std::string_view what);

// "12.3 MB" (powers of 10).
std::string FormatBytes(double bytes);

double SecondsSinceStart();

}  // namespace switchyard::cli
