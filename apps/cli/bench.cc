// Verb bench: tokens per second of prefill and decode, each beside what this machine could do at
// most, measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "bench_ep.h"
#include "bench_profile.h"
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
  size_t prompt = 512, decode = 128, batch = 1, depth = 0;
  std::optional<size_t> repeats;
  std::optional<size_t> layers;
  bool json = false;
  bool ep = false;
  bool profile = false;
  std::string html;
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

// What is timed, and how.
struct Subject {
  Executor& executor;
  size_t chunk;                // most prompt tokens of one pass
  size_t depth = 0;            // tokens that sequences hold before
  Profile* profile = nullptr;  // of the timed part
};

// Times its life.
class Timed {
 public:
  explicit Timed(const Subject& subject) : subject_(subject), start_(SecondsSinceStart()) {
    if (subject_.profile == nullptr) return;
    subject_.executor.set_profile(subject_.profile);
    subject_.profile->Begin();
  }
  ~Timed() { subject_.executor.set_profile(nullptr); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

  double Seconds() const {
    if (subject_.profile != nullptr) subject_.profile->End();
    return SecondsSinceStart() - start_;
  }

 private:
  const Subject& subject_;
  double start_;
};

// Appends random tokens, the logits of the last one if they are wanted.
void Append(const Subject& subject, SequenceId sequence, std::span<const int32_t> ids,
            LogitsWanted last) {
  for (size_t at = 0; at < ids.size(); at += subject.chunk) {
    const size_t n = std::min(subject.chunk, ids.size() - at);
    const ExecutorChunk piece{sequence, ids.subspan(at, n),
                              at + n == ids.size() ? last : LogitsWanted::kNone};
    subject.executor.Forward({&piece, 1});
  }
}

// A sequence that holds subject.depth tokens.
SequenceId StartAtDepth(const Subject& subject, size_t more, uint64_t seed) {
  const SequenceId sequence = subject.executor.Start(subject.depth + more);
  const size_t vocab_size = subject.executor.model().config().vocab_size;
  Append(subject, sequence, RandomIds(subject.depth, vocab_size, ~seed), LogitsWanted::kNone);
  return sequence;
}

// One prompt of `count` tokens, its last logits included.
double PrefillRate(const Subject& subject, size_t count, uint64_t seed) {
  Executor& executor = subject.executor;
  const std::vector<int32_t> ids = RandomIds(count, executor.model().config().vocab_size, seed);
  const SequenceId sequence = StartAtDepth(subject, count, seed);
  double seconds = 0;
  {
    const Timed timed(subject);
    Append(subject, sequence, ids, LogitsWanted::kLast);
    seconds = timed.Seconds();
  }
  executor.End(sequence);
  return static_cast<double>(count) / seconds;
}

// `count` steps of `batch` sequences, each from one token; the next token is the most likely one.
double DecodeRate(const Subject& subject, size_t count, size_t batch, uint64_t seed) {
  Executor& executor = subject.executor;
  std::vector<int32_t> tokens = RandomIds(batch, executor.model().config().vocab_size, seed);
  std::vector<ExecutorChunk> chunks(batch);
  for (size_t b = 0; b < batch; ++b) {
    chunks[b] = {StartAtDepth(subject, count, seed + b), std::span(tokens).subspan(b, 1),
                 LogitsWanted::kLast};
  }
  double seconds = 0;
  {
    const Timed timed(subject);
    for (size_t step = 0; step < count; ++step) {
      const Rows logits = executor.Forward(chunks);
      for (size_t b = 0; b < batch; ++b) {
        const std::span<const float> row = logits.RowSpan(b);
        tokens[b] = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
      }
    }
    seconds = timed.Seconds();
  }
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

// Billions of operations with weights in a pass of `tokens` tokens, of which `heads` need the head.
double PassGop(const Model& model, size_t tokens, size_t heads) {
  const double macs = static_cast<double>(tokens) * static_cast<double>(model.active_params()) +
                      static_cast<double>(heads) * static_cast<double>(model.head_params());
  return 2 * macs / 1e9;
}

// Bytes of the KV cache that a step of `batch` sequences reads, on average over `count` steps.
double StepKvBytes(const Executor& executor, const ModelConfig& config, const Options& options) {
  const double layer_bytes = static_cast<double>(executor.cache().bytes_per_token()) /
                             static_cast<double>(config.layers.size());
  double bytes = 0;
  for (const LayerConfig& layer : config.layers) {
    for (size_t step = 0; step < options.decode; ++step) {
      const size_t keys = options.depth + step + 1;
      const size_t seen = layer.window == 0 ? keys : std::min(keys, layer.window);
      bytes += layer_bytes * static_cast<double>(seen);
    }
  }
  return bytes * static_cast<double>(options.batch) / static_cast<double>(options.decode);
}

kernels::MachineLimits Best(const kernels::MachineLimits& a, const kernels::MachineLimits& b) {
  return {std::max(a.read_gbps, b.read_gbps), std::max(a.f32_gops, b.f32_gops),
          std::max(a.bf16_gops, b.bf16_gops), std::max(a.int8_gops, b.int8_gops)};
}

int RunExchange(const Options& options, const Settings& settings) {
  if (!options.model.empty() || options.layers) {
    throw Error(ErrorCode::kInvalidArgument,
                "--ep measures the exchange of one layer: give it a --shape, no MODEL or --layers");
  }
  if (options.profile || options.depth != 0) {
    throw Error(ErrorCode::kInvalidArgument, "--profile and --depth do not go with --ep");
  }
  EpBenchOptions ep;
  ep.shape = options.shape;
  ep.tokens = options.tokens;
  ep.repeats = options.repeats.value_or(ep.repeats);
  ep.json = options.json;
  return RunEpBench(ep, settings);
}

void CheckOptions(const Options& options) {
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
}

// One more of each, so that taking times by stage slows nothing that is reported beside them.
std::vector<PhaseReport> TakeProfile(const Subject& subject, const Options& options,
                                     const kernels::MachineLimits& limits) {
  const std::string behind =
      options.depth == 0 ? std::string() : fmt::format(" behind {} others", options.depth);
  Profile prefill;
  Profile decode;
  Subject profiled = subject;
  profiled.profile = &prefill;
  PrefillRate(profiled, options.prompt, 1);
  profiled.profile = &decode;
  DecodeRate(profiled, options.decode, options.batch, 1);
  return {
      MakeReport("prefill", fmt::format("prefill of {} tokens{}", options.prompt, behind), prefill,
                 limits),
      MakeReport("decode",
                 fmt::format("decode of {} x {} tokens{}", options.decode, options.batch, behind),
                 decode, limits)};
}

int Run(const Options& options, const Settings& settings) {
  if (!options.html.empty() && !options.profile)
    throw Error(ErrorCode::kInvalidArgument, "--html is the picture of --profile: give both");
  if (options.ep) return RunExchange(options, settings);
  CheckOptions(options);
  const size_t repeats = options.repeats.value_or(3);
  if (!options.html.empty()) RequireWritable("--html", options.html);
  const LoadedModel loaded = LoadModel(RequestOf(options), settings);
  const Model& model = *loaded.model;
  Executor& executor = *loaded.executor;
  const size_t chunk = PassTokens(loaded, settings);
  for (size_t length : {options.prompt, options.decode}) {
    if (length > executor.context_length() || options.depth > executor.context_length() - length) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} tokens behind {} do not fit into the context of {}", length,
                              options.depth, executor.context_length()));
    }
  }
  // Memory of the model alone: the measurement of bandwidth takes a gigabyte for a moment.
  const Subject shallow{executor, chunk};
  const Subject subject{executor, chunk, options.depth};
  PrefillRate(shallow, options.prompt, 0);  // scratch memory gets its size
  DecodeRate(shallow, std::min<size_t>(options.decode, 4), options.batch, 0);
  kernels::MachineLimits limits = kernels::MeasureLimits(*loaded.pool);
  Rates prefill;
  Rates decode;
  for (size_t r = 0; r < repeats; ++r) {
    prefill.values.push_back(PrefillRate(subject, options.prompt, r + 1));
    decode.values.push_back(DecodeRate(subject, options.decode, options.batch, r + 1));
  }
  const double resident = static_cast<double>(ResidentBytes()) / 1e9;
  limits = Best(limits, kernels::MeasureLimits(*loaded.pool));

  std::vector<PhaseReport> phases;
  if (options.profile) phases = TakeProfile(subject, options, limits);
  const auto [arithmetic, peak] =
      PeakOf(limits, ArithmeticOf(model.weight_dtype(), model.activation_dtype()));
  const double step_gb = StepBytes(model, options.batch) / 1e9;
  const double kv_gb = StepKvBytes(executor, model.config(), options) / 1e9;
  const double tg_share =
      decode.Median() / static_cast<double>(options.batch) * step_gb / limits.read_gbps;
  const double pp_share =
      2.0 * static_cast<double>(model.active_params()) * prefill.Median() / 1e9 / peak;
  const std::string machine = fmt::format(
      "{} threads, {}, {} weights {}, activations {}", loaded.pool->num_threads(),
      GetCpuInfo().target_chosen, DTypeName(model.weight_dtype()),
      FormatBytes(static_cast<double>(model.weight_bytes())), DTypeName(model.activation_dtype()));
  if (!options.html.empty()) {
    const std::string facts[] = {
        machine,
        fmt::format("read bandwidth {:.1f} GB/s; peaks f32 {:.0f}, bf16 {:.0f}, int8 "
                    "{:.0f} Gop/s",
                    limits.read_gbps, limits.f32_gops, limits.bf16_gops, limits.int8_gops)};
    const std::string& name = options.shape.empty() ? options.model : options.shape;
    WriteFile("--html", options.html, ProfilePage("Profile of " + name, facts, phases));
  }
  if (options.json) {
    const size_t pass = std::min(options.prompt, chunk);  // tokens of a prompt that go together
    nlohmann::ordered_json line = {{"pp_tps", prefill.Median()},
                                   {"pp_tps_spread", prefill.Spread()},
                                   {"tg_tps", decode.Median()},
                                   {"tg_tps_spread", decode.Spread()},
                                   {"load_s", loaded.load_seconds},
                                   {"rss_gb", resident},
                                   {"peak_rss_gb", static_cast<double>(PeakResidentBytes()) / 1e9},
                                   {"weights_gb", static_cast<double>(model.weight_bytes()) / 1e9},
                                   {"read_gbps", limits.read_gbps},
                                   {"peak_gops", peak},
                                   {"peak_type", ArithmeticName(arithmetic)},
                                   {"f32_gops", limits.f32_gops},
                                   {"bf16_gops", limits.bf16_gops},
                                   {"int8_gops", limits.int8_gops},
                                   {"step_gb", step_gb},
                                   {"step_kv_gb", kv_gb},
                                   {"step_gop", PassGop(model, options.batch, options.batch)},
                                   {"pass_gb", StepBytes(model, pass) / 1e9},
                                   {"pass_gop", PassGop(model, pass, 1)},
                                   {"tg_share_of_limit", tg_share},
                                   {"pp_share_of_limit", pp_share},
                                   {"threads", loaded.pool->num_threads()},
                                   {"prompt", options.prompt},
                                   {"decode", options.decode},
                                   {"batch", options.batch},
                                   {"depth", options.depth},
                                   {"weights", DTypeName(model.weight_dtype())},
                                   {"activations", DTypeName(model.activation_dtype())},
                                   {"target", GetCpuInfo().target_chosen}};
    for (const PhaseReport& phase : phases) line["profile"][phase.name] = ProfileJson(phase);
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("{}\n", machine);
  fmt::print(
      "prefill {:>5} tokens      {:>9.1f} +- {:.1f} tokens/s, {:.0f} % of the {} peak ({:.0f} "
      "Gop/s)\n",
      options.prompt, prefill.Median(), prefill.Spread(), 100 * pp_share,
      ArithmeticName(arithmetic), peak);
  fmt::print(
      "decode  {:>5} x {} tokens  {:>9.1f} +- {:.1f} tokens/s, {:.0f} % of the read bandwidth "
      "({:.1f} GB/s; {} a step, and {} of KV cache)\n",
      options.decode, options.batch, decode.Median(), decode.Spread(), 100 * tg_share,
      limits.read_gbps, FormatBytes(step_gb * 1e9), FormatBytes(kv_gb * 1e9));
  if (options.depth != 0) fmt::print("each behind {} tokens of context\n", options.depth);
  fmt::print("load {:.2f} s, resident {:.2f} GB, of which weights {:.2f} GB\n", loaded.load_seconds,
             resident, static_cast<double>(model.weight_bytes()) / 1e9);
  for (const PhaseReport& phase : phases) fmt::print("\n{}", ProfileTable(phase));
  return 0;
}

}  // namespace

std::function<int()> SetUpBench(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  app.add_option("-p", options->prompt, "prompt tokens [512]")->check(kCount);
  app.add_option("-n", options->decode, "decoded tokens [128]")->check(kCount);
  app.add_option("-d,--depth", options->depth,
                 "tokens that are in the context already when prompt and decoding begin [0]")
      ->check(kCount);
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
  app.add_flag(
      "--profile", options->profile,
      "time, bytes and share of this machine's limit of each stage, taken in one more run");
  app.add_option("--html", options->html, "with --profile: a page with a picture of it");
  app.add_flag("--json", options->json, "machine-readable, one line");
  AddSettingOptions(app, settings);
  return [options, &settings] { return Run(*options, settings); };
}

}  // namespace switchyard::cli
