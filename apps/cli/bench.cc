// Verb bench: tokens per second of prefill and decode, each beside what this machine could do at
// most, measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "bench_ep.h"
#include "common.h"
#include "kernels/limits/limits.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/memory.h"
#include "switchyard/model/shapes.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

struct Options {
  std::string model, shape;
  size_t prompt = 512, decode = 128, batch = 1;
  std::optional<size_t> repeats;
  std::optional<size_t> layers;
  bool json = false;
  bool ep = false;
  std::string tokens = "1,16,128,1024";
};

// Tokens per second of each repeat.
struct Rates {
  std::vector<double> values;

  double Median() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  // Half the distance between the slowest and the fastest.
  double Spread() const {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return (*high - *low) / 2;
  }
};

ModelRequest RequestOf(const Options& options) {
  ModelRequest request;
  request.model = options.model;
  request.act_dtype = "auto";
  request.max_sequences = options.batch;
  if (options.shape.empty()) return request;
  const size_t colon = options.shape.find(':');
  const std::string name = options.shape.substr(0, colon);
  const std::string scheme = colon == std::string::npos ? "bf16" : options.shape.substr(colon + 1);
  request.random_scheme = scheme;
  request.random = KnownShape(name, options.layers.value_or(0));
  return request;
}

std::vector<int32_t> RandomIds(size_t count, size_t vocab_size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % vocab_size);
  return ids;
}

// One prompt of `count` tokens, its last logits included.
double PrefillRate(Executor& executor, size_t count, size_t chunk, uint64_t seed) {
  const std::vector<int32_t> ids = RandomIds(count, executor.model().config().vocab_size, seed);
  const SequenceId sequence = executor.Start(count);
  const double start = SecondsSinceStart();
  for (size_t at = 0; at < count; at += chunk) {
    const size_t n = std::min(chunk, count - at);
    const ExecutorChunk piece{sequence, std::span(ids).subspan(at, n),
                              at + n == count ? LogitsWanted::kLast : LogitsWanted::kNone};
    executor.Forward({&piece, 1});
  }
  const double seconds = SecondsSinceStart() - start;
  executor.End(sequence);
  return static_cast<double>(count) / seconds;
}

// `count` steps of `batch` sequences, each from one token; the next token is the most likely one.
double DecodeRate(Executor& executor, size_t count, size_t batch, uint64_t seed) {
  std::vector<int32_t> tokens = RandomIds(batch, executor.model().config().vocab_size, seed);
  std::vector<ExecutorChunk> chunks(batch);
  for (size_t b = 0; b < batch; ++b)
    chunks[b] = {executor.Start(count), std::span(tokens).subspan(b, 1), LogitsWanted::kLast};
  const double start = SecondsSinceStart();
  for (size_t step = 0; step < count; ++step) {
    const Rows logits = executor.Forward(chunks);
    for (size_t b = 0; b < batch; ++b) {
      const std::span<const float> row = logits.RowSpan(b);
      tokens[b] = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    }
  }
  const double seconds = SecondsSinceStart() - start;
  for (const ExecutorChunk& chunk : chunks) executor.End(chunk.sequence);
  return static_cast<double>(count * batch) / seconds;
}

// Weight bytes that a step of `batch` tokens reads: experts that several tokens want are read once,
// and with uniform routing E (1 - (1 - k/E)^B) of them are wanted.
double StepBytes(const Model& model, size_t batch) {
  const ModelConfig& config = model.config();
  const auto all = static_cast<double>(model.active_bytes_per_token());
  if (config.num_moe_layers() == 0) return all;
  const moe::ExpertWeights& experts = model.experts(0);
  const double bits = 2 * BitsPerWeight(experts.w1) + BitsPerWeight(experts.w2);
  const double expert =
      static_cast<double>(config.hidden_size * config.moe_intermediate_size) * bits / 8;
  const double layers = static_cast<double>(config.num_moe_layers());
  const double k = static_cast<double>(config.top_k);
  const double e = static_cast<double>(std::max<size_t>(config.num_experts, 1));
  const double wanted = e * (1.0 - std::pow(1.0 - k / e, static_cast<double>(batch)));
  return all + layers * expert * (wanted - k);
}

kernels::MachineLimits Best(const kernels::MachineLimits& a, const kernels::MachineLimits& b) {
  return {std::max(a.read_gbps, b.read_gbps), std::max(a.f32_gops, b.f32_gops),
          std::max(a.bf16_gops, b.bf16_gops)};
}

int RunExchange(const Options& options, const Settings& settings) {
  if (!options.model.empty() || options.layers) {
    throw Error(ErrorCode::kInvalidArgument,
                "--ep measures the exchange of one layer: give it a --shape, no MODEL or --layers");
  }
  EpBenchOptions ep;
  ep.shape = options.shape;
  ep.tokens = options.tokens;
  ep.repeats = options.repeats.value_or(ep.repeats);
  ep.json = options.json;
  return RunEpBench(ep, settings);
}

int Run(const Options& options, const Settings& settings) {
  if (options.ep) return RunExchange(options, settings);
  const size_t repeats = options.repeats.value_or(3);
  if (repeats == 0 || options.batch == 0 || options.prompt == 0 || options.decode == 0) {
    throw Error(ErrorCode::kInvalidArgument, "-p, -n, -b and -r must be at least 1");
  }
  if (options.layers == size_t{0}) {
    throw Error(ErrorCode::kInvalidArgument, "--layers must be at least 1, found 0");
  }
  if (!options.shape.empty() && !options.model.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "MODEL and --shape exclude each other");
  }
  if (options.layers && options.shape.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--layers cuts a --shape; a checkpoint is measured whole");
  }
  const LoadedModel loaded = LoadModel(RequestOf(options), settings);
  const Model& model = *loaded.model;
  Executor& executor = *loaded.executor;
  const size_t chunk = PassTokens(loaded, settings);
  for (size_t length : {options.prompt, options.decode}) {
    if (length > executor.context_length()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} tokens do not fit into the context of {}", length,
                              executor.context_length()));
    }
  }
  // Memory of the model alone: the measurement of bandwidth takes a gigabyte for a moment.
  PrefillRate(executor, std::min<size_t>(options.prompt, 64), chunk, 0);
  DecodeRate(executor, std::min<size_t>(options.decode, 4), options.batch, 0);
  kernels::MachineLimits limits = kernels::MeasureLimits(*loaded.pool);
  Rates prefill;
  Rates decode;
  for (size_t r = 0; r < repeats; ++r) {
    prefill.values.push_back(PrefillRate(executor, options.prompt, chunk, r + 1));
    decode.values.push_back(DecodeRate(executor, options.decode, options.batch, r + 1));
  }
  const double resident = static_cast<double>(ResidentBytes()) / 1e9;
  limits = Best(limits, kernels::MeasureLimits(*loaded.pool));

  const bool bf16 = model.activation_dtype() == DType::kBF16;
  const double peak = bf16 ? limits.bf16_gops : limits.f32_gops;
  const double step_gb = StepBytes(model, options.batch) / 1e9;
  const double tg_share =
      decode.Median() / static_cast<double>(options.batch) * step_gb / limits.read_gbps;
  const double pp_share =
      2.0 * static_cast<double>(model.active_params()) * prefill.Median() / 1e9 / peak;
  if (options.json) {
    const nlohmann::ordered_json line = {
        {"pp_tps", prefill.Median()},
        {"pp_tps_spread", prefill.Spread()},
        {"tg_tps", decode.Median()},
        {"tg_tps_spread", decode.Spread()},
        {"load_s", loaded.load_seconds},
        {"rss_gb", resident},
        {"peak_rss_gb", static_cast<double>(PeakResidentBytes()) / 1e9},
        {"weights_gb", static_cast<double>(model.weight_bytes()) / 1e9},
        {"read_gbps", limits.read_gbps},
        {"peak_gops", peak},
        {"f32_gops", limits.f32_gops},
        {"bf16_gops", limits.bf16_gops},
        {"tg_share_of_limit", tg_share},
        {"pp_share_of_limit", pp_share},
        {"threads", loaded.pool->num_threads()},
        {"prompt", options.prompt},
        {"decode", options.decode},
        {"batch", options.batch},
        {"activations", DTypeName(model.activation_dtype())},
        {"target", GetCpuInfo().target_chosen}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("{} threads, {}, {} weights {}, activations {}\n", loaded.pool->num_threads(),
             GetCpuInfo().target_chosen, DTypeName(model.weight_dtype()),
             FormatBytes(static_cast<double>(model.weight_bytes())),
             DTypeName(model.activation_dtype()));
  fmt::print(
      "prefill {:>5} tokens      {:>9.1f} +- {:.1f} tokens/s, {:.0f} % of the {} peak ({:.0f} "
      "Gop/s)\n",
      options.prompt, prefill.Median(), prefill.Spread(), 100 * pp_share, bf16 ? "bf16" : "f32",
      peak);
  fmt::print(
      "decode  {:>5} x {} tokens  {:>9.1f} +- {:.1f} tokens/s, {:.0f} % of the read bandwidth "
      "({:.1f} GB/s; {} a step)\n",
      options.decode, options.batch, decode.Median(), decode.Spread(), 100 * tg_share,
      limits.read_gbps, FormatBytes(step_gb * 1e9));
  fmt::print("load {:.2f} s, resident {:.2f} GB, of which weights {:.2f} GB\n", loaded.load_seconds,
             resident, static_cast<double>(model.weight_bytes()) / 1e9);
  return 0;
}

}  // namespace

std::function<int()> SetUpBench(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  app.add_option("-p", options->prompt, "prompt tokens [512]")->check(kCount);
  app.add_option("-n", options->decode, "decoded tokens [128]")->check(kCount);
  app.add_option("-b", options->batch, "sequences decoded at once [1]")->check(kCount);
  app.add_option("-r", options->repeats, "repeats; median and spread are shown [3; 20 with --ep]")
      ->check(kCount);
  app.add_option("--shape", options->shape,
                 "random weights in a known model's shape, NAME[:SCHEME], instead of a file; an "
                 "unknown SCHEME lists all [bf16]");
  app.add_option("--layers", options->layers, "layers of --shape [all]")->check(kCount);
  app.add_flag(
      "--ep", options->ep,
      "instead: what exchanging rows between the ranks of mpirun costs, beside a bare copy "
      "of the same bytes, and FuseEP; --shape NAME[:bf16|f32|w8a8_int8]");
  app.add_option("--tokens", options->tokens,
                 "with --ep: tokens of each rank, a list [1,16,128,1024]");
  app.add_flag("--json", options->json, "machine-readable, one line");
  AddSettingOptions(app, settings);
  return [options, &settings] { return Run(*options, settings); };
}

}  // namespace switchyard::cli
