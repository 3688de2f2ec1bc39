#include "inspect_routing.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "common.h"
#include "routing_stats.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/eplb/algorithms.h"
#include "switchyard/moe/eplb/recorder.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxWindow = 2048;  // tokens that are seen at once, as in the verb eval

// A recorder for which every expert is a rank of its own, so that its tokens per rank are those per
// expert.
moe::ExpertRecorder MakeRecorder(const ModelConfig& config) {
  const size_t num_layers = config.layers.size(), num_experts = config.num_experts;
  moe::RecorderOptions options;
  options.num_layers = num_layers;
  options.num_logical = options.num_physical = options.ep_size = num_experts;
  options.buffer_size = 1;
  std::vector<int32_t> same(num_layers * num_experts);
  for (size_t i = 0; i < same.size(); ++i) same[i] = static_cast<int32_t>(i % num_experts);
  return moe::ExpertRecorder(options, same);
}

class Observer : public ForwardObserver {
 public:
  explicit Observer(moe::ExpertRecorder& recorder) : recorder_(recorder) {}
  void OnRouting(size_t layer, const moe::TopKOutput& topk) override {
    recorder_.OnPhysicalExperts({layer, topk.num_tokens, topk.top_k, topk.ids});
  }

 private:
  moe::ExpertRecorder& recorder_;
};

// Runs the ids in windows of the context; the whole text is one pass of the recorder.
void RunText(Executor& executor, std::span<const int32_t> ids, size_t max_chunk,
             moe::ExpertRecorder& recorder) {
  const bool show_progress = isatty(STDERR_FILENO) != 0;
  Observer observer(recorder);
  recorder.Start();
  recorder.BeginPass(0);
  const size_t max_window = std::min(executor.context_length(), kMaxWindow);
  for (size_t begin = 0; begin < ids.size(); begin += max_window) {
    const auto window = ids.subspan(begin, std::min(max_window, ids.size() - begin));
    const SequenceId sequence = executor.Start(window.size());
    for (size_t at = 0; at < window.size(); at += max_chunk) {
      const ExecutorChunk piece{sequence,
                                window.subspan(at, std::min(max_chunk, window.size() - at)),
                                LogitsWanted::kNone};
      executor.Forward({&piece, 1}, &observer);
    }
    executor.End(sequence);
    const size_t done = begin + window.size();
    if (show_progress)
      fmt::print(stderr, "\r{} of {} tokens{}", done, ids.size(), done == ids.size() ? "\n" : "");
  }
  recorder.EndPass();
}

LayerRouting SummarizeLayer(size_t layer, std::vector<double> tokens) {
  LayerRouting routing;
  routing.layer = layer;
  const auto [coldest, hottest] = std::minmax_element(tokens.begin(), tokens.end());
  routing.coldest = static_cast<size_t>(coldest - tokens.begin());
  // minmax_element gives the last of equal ones; the first is what people expect.
  routing.hottest =
      static_cast<size_t>(std::find(tokens.begin(), tokens.end(), *hottest) - tokens.begin());
  for (size_t e = 0; e < tokens.size(); ++e) {
    if (tokens[e] == 0) routing.idle.push_back(e);
  }
  routing.balancedness = moe::Utilization(tokens);
  routing.tokens = std::move(tokens);
  return routing;
}

RoutingStats Summarize(const ModelConfig& config, const moe::ExpertRecorder& recorder,
                       size_t num_tokens) {
  RoutingStats stats;
  stats.num_tokens = num_tokens;
  stats.num_experts = config.num_experts;
  stats.top_k = config.top_k;
  double sum = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if (!config.layers[layer].is_moe) continue;
    stats.layers.push_back(SummarizeLayer(layer, recorder.RankTokens(layer)));
    sum += stats.layers.back().balancedness;
  }
  stats.balancedness = sum / static_cast<double>(stats.layers.size());
  return stats;
}

ordered_json ToJson(const RoutingStats& stats) {
  ordered_json layers = ordered_json::array();
  const auto expert = [&](const LayerRouting& layer, size_t e) {
    return ordered_json{{"expert", e},
                        {"tokens", static_cast<size_t>(layer.tokens[e])},
                        {"load", stats.Load(layer, e)}};
  };
  for (const LayerRouting& layer : stats.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"hottest", expert(layer, layer.hottest)},
                      {"coldest", expert(layer, layer.coldest)},
                      {"idle", layer.idle},
                      {"balancedness", layer.balancedness},
                      {"tokens", std::vector<size_t>(layer.tokens.begin(), layer.tokens.end())}});
  }
  ordered_json hottest = ordered_json::array();
  for (const ExpertPlace& place : HottestExperts(stats, 8)) {
    const LayerRouting& layer = stats.layers[place.layer];
    ordered_json row = expert(layer, place.expert);
    row["layer"] = layer.layer;
    hottest.push_back(row);
  }
  return {{"model", stats.model},
          {"routing",
           {{"tokens", stats.num_tokens},
            {"experts", stats.num_experts},
            {"experts_per_token", stats.top_k},
            {"even_share", stats.EvenShare()},
            {"balancedness", stats.balancedness},
            {"idle", IdleExperts(stats).size()},
            {"hottest", hottest},
            {"layers", layers}}}};
}

void PrintTable(const RoutingStats& stats) {
  fmt::print("{}: {} tokens, {} MoE layers, {} experts each, {} per token\n", stats.model,
             stats.num_tokens, stats.layers.size(), stats.num_experts, stats.top_k);
  fmt::print("{:>5}  {:<19} {:<19} {:>5}  {}\n", "layer", "hottest", "coldest", "idle",
             "balancedness");
  const auto expert = [&](const LayerRouting& layer, size_t e) {
    return fmt::format("expert {} ({:.2f}x)", e, stats.Load(layer, e));
  };
  for (const LayerRouting& layer : stats.layers) {
    fmt::print("{:>5}  {:<19} {:<19} {:>5}  {:.2f}\n", layer.layer, expert(layer, layer.hottest),
               expert(layer, layer.coldest), layer.idle.size(), layer.balancedness);
  }
  fmt::print("{:<45} {:>7}  {:.2f}\n", "all", IdleExperts(stats).size(), stats.balancedness);
  fmt::print("x: times an even share ({:.1f} tokens); balancedness: mean expert / hottest expert\n",
             stats.EvenShare());
}

// Refuses a page that could not be written, or would replace what is read.
void RequireGoodPage(const RoutingOptions& options) {
  RequireWritable("--html", options.html);
  std::error_code ignored;
  if (std::filesystem::equivalent(options.html, options.text, ignored)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--html {}: that is the text itself", options.html));
  }
  if (std::filesystem::is_directory(options.html, ignored)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--html {}: that is a folder, expected a file name", options.html));
  }
}

}  // namespace

int InspectRouting(const RoutingOptions& options, const Settings& settings) {
  const std::string text = ReadFile(options.text);
  RequireUtf8(text, options.text);
  if (options.has_html) RequireGoodPage(options);
  const LoadedModel loaded = LoadModel({.model = options.model, .act_dtype = "auto"}, settings);
  const ModelConfig& config = loaded.model->config();
  if (config.num_moe_layers() == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the model has no MoE layer", loaded.files->description()));
  }
  const std::vector<int32_t> ids =
      OpenTokenizer(loaded.files)
          ->Encode(text, {.add_special_tokens = false, .parse_special = false});
  if (ids.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--text {}: the text has no tokens", options.text));
  }
  moe::ExpertRecorder recorder = MakeRecorder(config);
  RunText(*loaded.executor, ids, settings.GetCount("chunk"), recorder);
  RoutingStats stats = Summarize(config, recorder, ids.size());
  stats.model = loaded.files->description();
  stats.text = options.text == "-" ? "standard input" : options.text;
  if (options.has_html) WriteFile("--html", options.html, RoutingPage(stats));
  if (options.json) {
    fmt::print("{}\n", ToJson(stats).dump());
  } else {
    PrintTable(stats);
  }
  return 0;
}

}  // namespace switchyard::cli
