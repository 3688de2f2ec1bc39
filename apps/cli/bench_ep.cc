#include "bench_ep.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "bench_allocations.h"
#include "bench_exchange.h"
#include "bench_fused.h"
#include "bench_raw.h"
#include "bench_timing.h"
#include "common.h"
#include "moe/ep/wire.h"
#include "quant/act_quant.h"
#include "quant/linear.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/model/shapes.h"
#include "switchyard/parallel/run_ranks.h"

namespace switchyard::cli {
namespace {

using namespace std::chrono_literals;
using nlohmann::ordered_json;
using Step = std::function<void()>;

// What the figures are held to.
constexpr double kWindowTarget = 1.25, kCarrierTarget = 1.2, kEmptyTarget = 1.5, kFusedTarget = 0.9;
constexpr std::string_view kDefaultShape = "qwen3-30b-a3b";
constexpr size_t kCountedSteps = 20;

Deadline Limit() { return Deadline::After(2min, "bench"); }

// --- What is asked for --------------------------------------------------------------------------

struct Request {
  std::string shape;
  std::string scheme;
  std::vector<size_t> tokens;
  moe::MoeRunnerConfig config;
};

std::vector<size_t> ParseTokens(const std::string& text) {
  std::vector<size_t> tokens;
  for (int32_t count : ParseIds(text)) {
    if (count < 1 || count > 1 << 20)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--tokens: each is 1 to {}, found {}", 1 << 20, count));
    tokens.push_back(static_cast<size_t>(count));
  }
  return tokens;
}

Request ParseRequest(const EpBenchOptions& options, size_t ranks) {
  const std::string text = options.shape.empty() ? std::string(kDefaultShape) : options.shape;
  const size_t colon = text.find(':');
  Request request;
  request.shape = text.substr(0, colon);
  request.scheme = colon == std::string::npos ? "bf16" : text.substr(colon + 1);
  request.tokens = ParseTokens(options.tokens);
  if (request.scheme != "bf16" && request.scheme != "f32" && request.scheme != "w8a8_int8")
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--shape {}: --ep measures bf16, f32 and w8a8_int8", text));
  if (options.repeats == 0)
    throw Error(ErrorCode::kInvalidArgument, "-r must be at least 1, found 0");
  const ModelConfig model = KnownShape(request.shape, 1);
  if (model.num_experts % ranks != 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--shape {}: {} experts cannot be divided evenly among {} ranks", text,
                            model.num_experts, ranks));
  request.config.num_experts = model.num_experts;
  request.config.num_local_experts = model.num_experts / ranks;
  request.config.hidden_size = model.hidden_size;
  request.config.intermediate_size_per_partition = model.moe_intermediate_size;
  request.config.top_k = model.top_k;
  return request;
}

// How rows of the scheme travel, and how long that makes them.
BenchLayer MakeLayer(ExecContext& context, const Request& request) {
  BenchLayer layer;
  layer.config = request.config;
  if (request.scheme == "w8a8_int8") layer.wire.output.kind = ActQuantKind::kInt8Token;
  if (request.scheme == "bf16")
    layer.wire.plain = quant::ResolveActDType("auto", "off", {.dtype = DType::kBF16}, 0);
  const Rows one = context.arena.AllocateRows(1, layer.config.hidden_size);
  std::fill_n(one.data, one.cols, 0.0f);
  QuantRows row = QuantRows::Plain(one);
  layer.home_row_bytes = moe::ValueLayout::Of(row).bytes();
  row.dtype = layer.wire.plain;
  if (layer.wire.output.kind != ActQuantKind::kNone)
    row = quant::QuantizeRows(context, one, layer.wire.output);
  layer.dispatch_row_bytes =
      moe::WireLayout(moe::ValueLayout::Of(row), layer.config.top_k).row_bytes();
  return layer;
}

// --- What is found ------------------------------------------------------------------------------

// One protocol, one number of tokens. No figure: there is nothing to compare with.
struct ExchangeRow {
  std::string backend;
  size_t tokens = 0;
  size_t bytes_sent = 0;  // to other ranks, by this one
  Times step, floor, carrier;
  std::optional<Times> window;
  double arena_allocations = 0, allocations = 0;  // of a warm step
  std::array<double, 4> stages_us = {};           // of this rank, waits for others included

  bool holds() const {
    if (window) return MedianRatio(step, *window) <= (tokens == 0 ? kEmptyTarget : kWindowTarget);
    return MedianRatio(step, carrier) <= (tokens == 0 ? kEmptyTarget : kCarrierTarget);
  }
};

struct FusedRow {
  std::string scheme;
  size_t tokens = 0;
  Times layer, mode1, mode2;
};

struct Memory {
  double read_gbps = 0;
  std::optional<Times> c2c;
  double c2c_gbps = 0;
};

// --- Measuring ----------------------------------------------------------------------------------

class EpBench {
 public:
  EpBench(ProcessGroup& world, const EpBenchOptions& options, const Settings& settings)
      : world_(world),
        settings_(settings),
        request_(ParseRequest(options, world.size())),
        pool_(MakePool()),
        context_{*pool_, arena_},
        layer_(MakeLayer(context_, request_)),
        groups_(MakeGroups(world, GroupConfig(), "bench --ep", Limit())),
        stopwatch_(world, options.repeats) {}

  void Run() {
    memory_ = MeasureMemory();
    std::vector<size_t> counts = request_.tokens;
    counts.push_back(0);
    for (size_t tokens : counts) {
      for (const Backend& backend : kBackends) {
        if (Fits(backend, tokens)) exchange_.push_back(MeasureExchange(backend, tokens));
      }
    }
    if (!in_node()) return;
    for (const char* scheme : {"unquant", "w8a8_int8"}) MeasureFused(scheme);
  }

  void PrintTable() const;
  ordered_json ToJson() const;

 private:
  bool in_node() const { return world_.node_peers().size() == world_.size(); }
  std::unique_ptr<ThreadPool> MakePool() const {
    Settings settings = settings_;
    const size_t threads = std::max<size_t>(1, AvailableCpus() / world_.node_peers().size());
    if (settings.IsDefault("threads")) settings.Set("threads", std::to_string(threads), "bench");
    return MakeThreadPool(settings);
  }
  ParallelConfig GroupConfig() const {
    ParallelConfig config;
    config.tp_size = config.moe_ep_size = world_.size();
    config.dp_attention = true;
    return config;
  }
  // Low-latency protocols have fixed buffers.
  static bool Fits(const Backend& backend, size_t tokens) {
    return !backend.is_low_latency || tokens <= 1024;
  }
  bool summed() const { return settings_.GetFlag("ep-summed-combine"); }

  Memory MeasureMemory();
  Times MeasureCoreToCore(size_t bytes);
  std::vector<BenchTokens> AllTokens(size_t count) const;
  moe::ExpertParallelOptions OptionsOf(const Backend& backend, size_t tokens) const;
  ExchangeRow MeasureExchange(const Backend& backend, size_t tokens);
  void CountSteps(DispatchStep& step, ExchangeRow& row);
  void MeasureFused(const char* scheme);
  std::string Header() const;

  ProcessGroup& world_;
  const Settings& settings_;
  Request request_;
  std::unique_ptr<ThreadPool> pool_;
  Arena arena_;
  ExecContext context_;
  BenchLayer layer_;
  ParallelGroups groups_;
  Stopwatch stopwatch_;
  Memory memory_;
  std::vector<ExchangeRow> exchange_;
  std::vector<FusedRow> fused_;
};

// The time of rank 1 for reading what rank 0 has just written.
Times EpBench::MeasureCoreToCore(size_t bytes) {
  const auto window = world_.MakeWindow(
      {.name = "core to core", .bytes_per_rank = bytes, .num_flags = 1, .setting = "--ep"},
      Limit());
  uint8_t round = 0;
  const Step write = [&] {
    if (world_.rank() == 0) std::memset(window->Part(0).data(), ++round, bytes);
  };
  const Step read = [&] {
    if (world_.rank() == 1) ReadAll(window->Part(0).data(), bytes);
  };
  return stopwatch_.Measure(write, read);
}

Memory EpBench::MeasureMemory() {
  constexpr size_t kRead = size_t{64} << 20, kFresh = size_t{256} << 10;
  const std::vector<std::byte> data(kRead, std::byte{1});
  Memory memory;
  const Times read = stopwatch_.Measure([] {}, [&] { ReadAll(data.data(), data.size()); });
  memory.read_gbps = static_cast<double>(kRead) / read.Median() / 1e3;
  if (world_.size() < 2 || !in_node()) return memory;
  memory.c2c = MeasureCoreToCore(kFresh);
  memory.c2c_gbps = static_cast<double>(kFresh) / memory.c2c->Median() / 1e3;
  return memory;
}

std::vector<BenchTokens> EpBench::AllTokens(size_t count) const {
  std::vector<BenchTokens> all;
  for (size_t rank = 0; rank < world_.size(); ++rank)
    all.push_back(BenchTokens::Random(request_.config, count, rank));
  return all;
}

moe::ExpertParallelOptions EpBench::OptionsOf(const Backend& backend, size_t tokens) const {
  moe::ExpertParallelOptions options;
  options.max_tokens_per_rank = std::max<size_t>(tokens, 1);
  // Room as usual, however few tokens there are.
  if (backend.is_low_latency)
    options.num_max_dispatch_tokens_per_rank =
        std::max(tokens, options.num_max_dispatch_tokens_per_rank);
  options.tokens_are_replicated = backend.traffic == Traffic::kReplicated;
  options.deterministic = !summed();
  options.push_rows = settings_.GetCount("ep-push-rows", options.push_rows);
  options.timeout = 2min;
  return options;
}

// Steps one after the other, as in a model: nobody waits for all.
void EpBench::CountSteps(DispatchStep& step, ExchangeRow& row) {
  step.TakeStages();
  const size_t blocks = arena_.num_system_allocations(), before = NumAllocations();
  for (size_t i = 0; i < kCountedSteps; ++i) step.Run();
  const auto steps = static_cast<double>(kCountedSteps);
  row.allocations = static_cast<double>(NumAllocations() - before) / steps;
  row.arena_allocations = static_cast<double>(arena_.num_system_allocations() - blocks) / steps;
  row.stages_us = step.TakeStages().us;
  for (double& us : row.stages_us) us /= steps;
}

ExchangeRow EpBench::MeasureExchange(const Backend& backend, size_t tokens) {
  const std::vector<BenchTokens> all = AllTokens(tokens);
  const size_t me = world_.rank();
  const BenchTokens mine =
      backend.traffic == Traffic::kReplicated ? BenchTokens::Join(all) : all[me];
  const std::vector<Leg> legs = LegsOf(backend, layer_, all, me, summed());
  DispatchStep step(context_, groups_, OptionsOf(backend, tokens), backend, layer_, mine);
  LocalCopy floor(world_, legs);
  CarrierExchange carrier(world_, legs);
  std::vector<Step> steps{[&] { step.Run(); }, [&] { floor.Run(); }, [&] { carrier.Run(); }};
  std::optional<WindowCopy> window;
  if (in_node()) {
    window.emplace(world_, legs);
    steps.push_back([&] { window->Run(); });
  }
  std::vector<Times> times = stopwatch_.Compare(steps);
  ExchangeRow row;
  row.backend = backend.label;
  row.tokens = tokens;
  for (const Leg& leg : legs) {
    for (size_t rank = 0; rank < world_.size(); ++rank)
      row.bytes_sent += rank == me ? 0 : leg.send[rank].size() * leg.row_bytes;
  }
  row.step = times[0];
  row.floor = times[1];
  row.carrier = times[2];
  if (window) row.window = times[3];
  stopwatch_.Barrier();
  CountSteps(step, row);
  stopwatch_.Barrier();
  return row;
}

void EpBench::MeasureFused(const char* scheme) {
  constexpr size_t kTokens[] = {16, 128};
  FusedComparison comparison(context_, groups_, request_.config, scheme, kTokens[1]);
  for (size_t tokens : kTokens) {
    const BenchTokens mine = BenchTokens::Random(request_.config, tokens, world_.rank());
    comparison.RequireSame(mine);
    const auto reset = [&] { arena_.Reset(); };
    const std::vector<Step> steps{[&] { reset(), comparison.RunLayer(mine); },
                                  [&] { reset(), comparison.RunFused(1, mine); },
                                  [&] { reset(), comparison.RunFused(2, mine); }};
    const std::vector<Times> times = stopwatch_.Compare(steps);
    fused_.push_back({scheme == std::string_view("unquant") ? "bf16" : scheme, tokens, times[0],
                      times[1], times[2]});
  }
}

// --- Showing ------------------------------------------------------------------------------------

std::string Spread(const Times& times) {
  return fmt::format("{:.1f} ({:.1f}-{:.1f})", times.Median(), times.Quantile(0.1),
                     times.Quantile(0.9));
}

std::string EpBench::Header() const {
  const moe::MoeRunnerConfig& config = request_.config;
  return fmt::format(
      "{} ranks ({}, {} on this node) with {} threads each; {}: hidden size {}, {} experts, top "
      "{}; "
      "rows of {} B out ({}), {} B home",
      world_.size(), world_.carrier(), world_.node_peers().size(), pool_->num_threads(),
      request_.shape, config.hidden_size, config.num_experts, config.top_k,
      layer_.dispatch_row_bytes, request_.scheme, layer_.home_row_bytes);
}

void EpBench::PrintTable() const {
  fmt::print("{}\n", Header());
  fmt::print("read {:.1f} GB/s by each rank at once", memory_.read_gbps);
  if (memory_.c2c)
    fmt::print(", core to core {:.1f} GB/s (256 KiB, {} us)", memory_.c2c_gbps,
               Spread(*memory_.c2c));
  fmt::print(
      "\n\nDispatch and combine, us: median (10 % - 90 %) of the slowest rank; x = the median of "
      "the ratio of the step to the column's exchange; stages = mean of dispatch a + b + combine a "
      "+ b on rank 0; arena, new = allocations of a warm step\n{:>6} {:<21} {:>9}  {:<26} {:>9} "
      "{:<33} {:<33} {:<31} "
      "{:>5} {:>5}\n",
      "tokens", "backend", "KB sent", "step", "floor", "window", world_.carrier(), "stages",
      "arena", "new");
  for (const ExchangeRow& row : exchange_) {
    const std::string window = row.window ? fmt::format("{} x {:.2f}", Spread(*row.window),
                                                        MedianRatio(row.step, *row.window))
                                          : std::string("-");
    fmt::print("{:>6} {:<21} {:>9.1f}  {:<26} {:>9.1f} {:<33} {:<33} {:<31} {:>5.1f} {:>5.1f}{}\n",
               row.tokens, row.backend, static_cast<double>(row.bytes_sent) / 1e3, Spread(row.step),
               row.floor.Median(), window,
               fmt::format("{} x {:.2f}", Spread(row.carrier), MedianRatio(row.step, row.carrier)),
               fmt::format("{:.1f} + {:.1f} + {:.1f} + {:.1f}", row.stages_us[0], row.stages_us[1],
                           row.stages_us[2], row.stages_us[3]),
               row.arena_allocations, row.allocations, row.holds() ? "" : "  above the target");
  }
  fmt::print("targets: {} of the window, {} of {} between nodes, {} without tokens\n",
             kWindowTarget, kCarrierTarget, world_.carrier(), kEmptyTarget);
  if (fused_.empty()) return;
  fmt::print("\nOne layer, us\n{:>6} {:<10} {:<30} {:<38} {:<38}\n", "tokens", "scheme",
             "deepep low latency, aiter", "FuseEP mode 1", "FuseEP mode 2");
  for (const FusedRow& row : fused_) {
    const auto against = [&](const Times& times) {
      return fmt::format("{} x {:.2f}", Spread(times), MedianRatio(times, row.layer));
    };
    fmt::print("{:>6} {:<10} {:<30} {:<38} {:<38}\n", row.tokens, row.scheme, Spread(row.layer),
               against(row.mode1), against(row.mode2));
  }
  fmt::print("target: {}\n", kFusedTarget);
}

ordered_json TimesToJson(const Times& times) {
  return {{"median_us", times.Median()},
          {"p10_us", times.Quantile(0.1)},
          {"p90_us", times.Quantile(0.9)},
          {"repeats", times.us.size()}};
}

ordered_json RowToJson(const ExchangeRow& row) {
  ordered_json json{{"backend", row.backend},
                    {"tokens", row.tokens},
                    {"bytes_sent", row.bytes_sent},
                    {"step", TimesToJson(row.step)},
                    {"floor", TimesToJson(row.floor)},
                    {"carrier", TimesToJson(row.carrier)},
                    {"ratio_to_carrier", MedianRatio(row.step, row.carrier)}};
  if (row.window) {
    json["window"] = TimesToJson(*row.window);
    json["ratio_to_window"] = MedianRatio(row.step, *row.window);
  }
  json["stages_us"] = row.stages_us;
  json["arena_allocations"] = row.arena_allocations;
  json["allocations"] = row.allocations;
  json["holds"] = row.holds();
  return json;
}

ordered_json EpBench::ToJson() const {
  ordered_json json{{"ranks", world_.size()},
                    {"carrier", world_.carrier()},
                    {"ranks_of_node", world_.node_peers().size()},
                    {"threads", pool_->num_threads()},
                    {"shape", request_.shape},
                    {"scheme", request_.scheme},
                    {"dispatch_row_bytes", layer_.dispatch_row_bytes},
                    {"home_row_bytes", layer_.home_row_bytes},
                    {"read_gbps", memory_.read_gbps}};
  if (memory_.c2c) {
    json["c2c_gbps"] = memory_.c2c_gbps;
    json["c2c"] = TimesToJson(*memory_.c2c);
  }
  json["exchange"] = ordered_json::array();
  for (const ExchangeRow& row : exchange_) json["exchange"].push_back(RowToJson(row));
  json["fused"] = ordered_json::array();
  for (const FusedRow& row : fused_) {
    json["fused"].push_back({{"scheme", row.scheme},
                             {"tokens", row.tokens},
                             {"layer", TimesToJson(row.layer)},
                             {"mode1", TimesToJson(row.mode1)},
                             {"mode2", TimesToJson(row.mode2)},
                             {"ratio_mode1", MedianRatio(row.mode1, row.layer)},
                             {"ratio_mode2", MedianRatio(row.mode2, row.layer)}});
  }
  json["targets"] = {{"window", kWindowTarget},
                     {"carrier", kCarrierTarget},
                     {"empty", kEmptyTarget},
                     {"fused", kFusedTarget}};
  json["target"] = GetCpuInfo().target_chosen;
  return json;
}

}  // namespace

int RunEpBench(const EpBenchOptions& options, const Settings& settings) {
  const auto run = [&](ProcessGroup& world) {
    EpBench bench(world, options, settings);
    bench.Run();
    if (world.rank() != 0) return;
    if (options.json) {
      fmt::print("{}\n", bench.ToJson().dump());
    } else {
      bench.PrintTable();
    }
  };
  if (World() != nullptr) {
    run(*World());
  } else {
    RunRanks(RankOptions{.num_ranks = 1}, run);
  }
  return 0;
}

}  // namespace switchyard::cli
