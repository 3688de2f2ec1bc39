// Verb logits: logits, hidden states and routing of every position, to a safetensors file.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "common.h"
#include "switchyard/core/error.h"
#include "switchyard/model/safetensors.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct Options {
  std::string model, ids, ids_file, tensor, output;
  std::vector<size_t> hidden;
  bool routing = false;
};

std::vector<int32_t> ReadIdsFile(const Options& options) {
  const std::filesystem::path path(options.ids_file);
  const auto files = ModelFiles::OpenFolder(path.has_parent_path() ? path.parent_path() : ".");
  const SafetensorsFile file =
      SafetensorsFile::Parse(options.ids_file, files->Map(path.filename().string()));
  const TensorInfo* info = file.Find(options.tensor);
  if (info == nullptr) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: there is no tensor \"{}\"", options.ids_file, options.tensor));
  }
  if (info->dtype != DType::kI64 && info->dtype != DType::kI32) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: tensor \"{}\": expected I64 or I32, found {}", options.ids_file,
                            options.tensor, DTypeName(info->dtype)));
  }
  const TensorView view = file.View(*info);
  std::vector<int32_t> ids(view.NumElements());
  for (size_t i = 0; i < ids.size(); ++i) {
    int64_t id = 0;
    if (info->dtype == DType::kI64) {
      std::memcpy(&id, view.data + i * 8, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, view.data + i * 4, 4);
      id = narrow;
    }
    if (id < 0 || id > INT32_MAX)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is no token id", options.ids_file, id));
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

// Refuses an output that is a file of the model.
void RequireOutsideModel(const std::string& output, const std::string& model) {
  std::error_code ignored;
  for (const auto& file :
       std::filesystem::directory_iterator(model.empty() ? "/dev/null" : model, ignored)) {
    if (std::filesystem::equivalent(file.path(), output, ignored)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--output {}: that is a file of the model itself", output));
    }
  }
}

// Room for `count` floats. Errors: kResourceExhausted naming the bytes.
void ReserveLogits(std::vector<float>& logits, size_t count) {
  try {
    logits.reserve(count);
  } catch (const std::exception&) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("out of memory: {} bytes of logits could not be allocated",
                            count * sizeof(float)));
  }
}

// Collects what --hidden and --routing ask for.
class Recorder : public ForwardObserver {
 public:
  Recorder(const std::vector<size_t>& hidden, bool routing) : routing_(routing) {
    for (size_t layer : hidden) hidden_[layer];
  }
  void OnLayer(size_t layer, ConstRows rows) override {
    const auto found = hidden_.find(layer);
    if (found == hidden_.end()) return;
    for (size_t t = 0; t < rows.rows; ++t)
      found->second.insert(found->second.end(), rows.Row(t), rows.Row(t) + rows.cols);
  }
  void OnRouting(size_t layer, const moe::TopKOutput& topk) override {
    if (!routing_) return;
    ids_[layer].insert(ids_[layer].end(), topk.ids.begin(), topk.ids.end());
    weights_[layer].insert(weights_[layer].end(), topk.weights.begin(), topk.weights.end());
  }
  // Views of what was collected, valid as long as *this.
  std::vector<NamedTensor> Tensors(size_t num_tokens, const ModelConfig& config) const {
    std::vector<NamedTensor> tensors;
    for (const auto& [layer, values] : hidden_) {
      tensors.push_back({fmt::format("hidden.{}", layer),
                         {reinterpret_cast<const std::byte*>(values.data()),
                          DType::kF32,
                          {num_tokens, config.hidden_size}}});
    }
    for (const auto& [layer, ids] : ids_) {
      tensors.push_back({fmt::format("routing.{}.ids", layer),
                         {reinterpret_cast<const std::byte*>(ids.data()),
                          DType::kI32,
                          {num_tokens, config.top_k}}});
      tensors.push_back({fmt::format("routing.{}.weights", layer),
                         {reinterpret_cast<const std::byte*>(weights_.at(layer).data()),
                          DType::kF32,
                          {num_tokens, config.top_k}}});
    }
    return tensors;
  }

 private:
  bool routing_;
  std::map<size_t, std::vector<float>> hidden_;
  std::map<size_t, std::vector<int32_t>> ids_;
  std::map<size_t, std::vector<float>> weights_;
};

int Run(const Options& options, const Settings& settings) {
  const std::vector<int32_t> ids =
      options.ids_file.empty() ? ParseIds(options.ids) : ReadIdsFile(options);
  if (ids.empty())
    throw Error(ErrorCode::kInvalidArgument, "there are no token ids to compute logits for");
  RequireWritable("--output", options.output);
  RequireOutsideModel(options.output, options.model);
  const LoadedModel loaded = LoadModel({.model = options.model, .act_dtype = "f32"}, settings);
  const ModelConfig& config = loaded.model->config();
  for (size_t layer : options.hidden) {
    if (layer >= config.layers.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--hidden {}: the model has layers 0 to {}", layer,
                              config.layers.size() - 1));
    }
  }
  Recorder recorder(options.hidden, options.routing);
  std::vector<float> logits;
  ReserveLogits(logits, ids.size() * config.vocab_size);
  const SequenceId sequence = loaded.executor->Start(ids.size());
  const size_t chunk = PassTokens(loaded, settings);
  for (size_t at = 0; at < ids.size(); at += chunk) {
    const ExecutorChunk piece{
        sequence, std::span(ids).subspan(at, std::min(chunk, ids.size() - at)), LogitsWanted::kAll};
    const Rows rows = loaded.executor->Forward({&piece, 1}, &recorder);
    for (size_t r = 0; r < rows.rows; ++r)
      logits.insert(logits.end(), rows.Row(r), rows.Row(r) + rows.cols);
  }
  std::vector<NamedTensor> tensors = recorder.Tensors(ids.size(), config);
  tensors.push_back({"logits",
                     {reinterpret_cast<const std::byte*>(logits.data()),
                      DType::kF32,
                      {ids.size(), config.vocab_size}}});
  WriteSafetensors(options.output, tensors);
  return 0;
}

}  // namespace

std::function<int()> SetUpLogits(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  CLI::Option* ids = app.add_option("--ids", options->ids, "token ids: 1,2,3");
  CLI::Option* file =
      app.add_option("--ids-file", options->ids_file, "safetensors file with the ids")
          ->excludes(ids);
  app.add_option("--tensor", options->tensor, "the tensor of --ids-file, I64 or I32")->needs(file);
  app.add_option("--output", options->output, "safetensors file to write: logits [n, vocab] f32")
      ->required();
  app.add_option("--hidden", options->hidden,
                 "also write hidden.LAYER [n, hidden]: the residual stream after that layer")
      ->delimiter(',')
      ->check(kCount);
  app.add_flag("--routing", options->routing,
               "also write routing.LAYER.ids and routing.LAYER.weights [n, k]");
  AddSettingOptions(app, settings);
  return [options, &settings, ids, file] {
    if (ids->count() == 0 && file->count() == 0) {
      fmt::print(stderr, "switchyard logits: one of --ids and --ids-file is needed\n");
      return 2;
    }
    return Run(*options, settings);
  };
}

}  // namespace switchyard::cli
