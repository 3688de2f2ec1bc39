// Verb simulate: predicts step time, traffic and balance of expert-parallel layouts that do not fit
// here.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "common.h"
#include "simulation_page.h"
#include "switchyard/core/error.h"
#include "switchyard/simulate/predict.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;
using simulate::ExchangeCost;
using simulate::Prediction;
using simulate::SimulationRequest;
using simulate::StepPrediction;

struct Options {
  std::vector<std::string> shapes;
  std::string link, mode = "normal", routing = "uniform", wire = "fp8", attention = "dp";
  size_t ranks = 8, nodes = 1, tokens = 128, context = 1024;
  std::optional<size_t> redundant;
  bool sweep = false, json = false;
  std::optional<std::string> html, svg;
};

template <typename Number>
Number ParseNumber(const std::string& text, std::string_view what) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--routing: expected {}, found \"{}\"", what, text));
  }
  return value;
}

// "uniform", "zipf:EXPONENT", "zipf:EXPONENT:SEED" or the name of a file.
simulate::ExpertShares MakeRouting(const std::string& routing, const simulate::ModelShape& shape) {
  constexpr std::string_view kZipf = "zipf:";
  if (routing == "uniform") return simulate::UniformShares(shape.num_experts, shape.top_k);
  if (!routing.starts_with(kZipf)) {
    return simulate::ReadShares(routing, ReadFile(routing), shape.num_experts, shape.top_k);
  }
  const std::string numbers = routing.substr(kZipf.size());
  const size_t colon = numbers.find(':');
  const double exponent =
      ParseNumber<double>(numbers.substr(0, colon), "zipf:EXPONENT with a number");
  const uint64_t seed = colon == std::string::npos
                            ? 0
                            : ParseNumber<uint64_t>(numbers.substr(colon + 1),
                                                    "zipf:EXPONENT:SEED with a whole number");
  return simulate::ZipfShares(shape.num_experts, shape.top_k, shape.moe_layers, exponent, seed);
}

simulate::WireType ParseWire(const std::string& name) {
  using enum simulate::WireType;
  for (const simulate::WireType type : {kBf16, kFp8, kInt8})
    if (name == simulate::WireTypeName(type)) return type;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--dispatch-dtype {}: expected bf16, fp8 or int8", name));
}

SimulationRequest MakeRequest(const Options& options, const std::string& shape) {
  SimulationRequest request;
  request.shape = simulate::FindShape(shape);
  request.link = options.link.empty() ? simulate::DefaultLink()
                                      : simulate::ReadLink(options.link, ReadFile(options.link));
  request.routing = MakeRouting(options.routing, request.shape);
  request.num_ranks = options.ranks;
  request.num_nodes = options.nodes;
  request.tokens = options.tokens;
  request.context = options.context;
  request.redundant = options.redundant;
  request.wire = ParseWire(options.wire);
  request.low_latency = options.mode == "low_latency";
  if (options.attention == "replicated") request.attention = simulate::AttentionMode::kReplicated;
  return request;
}

// The layout as asked for. A sweep needs only its ranks per node, and adds the replicas that it
// takes to divide the experts.
Prediction PredictLayout(SimulationRequest request, bool is_sweep) {
  const size_t redundant =
      simulate::FittingRedundancy(request.shape.num_experts, std::max<size_t>(1, request.num_ranks),
                                  request.redundant.value_or(0));
  if (is_sweep && redundant > 0) request.redundant = redundant;
  return simulate::Predict(request);
}

SimulatedModel Simulate(const Options& options, const std::string& shape) {
  SimulatedModel model;
  model.request = MakeRequest(options, shape);
  model.layout = PredictLayout(model.request, options.sweep);
  if (options.sweep || options.html || options.svg)
    model.sweep = simulate::Sweep(model.request, simulate::kMaxRanks);
  return model;
}

ordered_json ToJson(const ExchangeCost& cost) {
  return {{"counts_us", cost.counts_us},
          {"latency_us", cost.latency_us},
          {"network_us", cost.network_us},
          {"memory_us", cost.memory_us},
          {"fixed_us", cost.fixed_us},
          {"total_us", cost.total_us()},
          {"off_rank_bytes", cost.off_rank_bytes},
          {"off_node_bytes", cost.off_node_bytes},
          {"busiest_nic_bytes", cost.busiest_nic_bytes}};
}

ordered_json ToJson(const Prediction& layout) {
  ordered_json exchanges = ordered_json::array();
  for (const StepPrediction& step : layout.steps) {
    exchanges.push_back({{"exchange", simulate::SchemeName(step.scheme)},
                         {"dispatch", ToJson(step.dispatch)},
                         {"experts_us", step.experts_us},
                         {"combine", ToJson(step.combine)},
                         {"moe_layer_us", step.moe_layer_us()},
                         {"step_us", step.step_us},
                         {"exchange_share", step.exchange_share()},
                         {"tokens_per_s", step.tokens_per_s}});
  }
  return {{"ranks", layout.num_ranks},
          {"nodes", layout.num_nodes},
          {"redundant_experts", layout.redundant},
          {"experts_per_rank", layout.experts_per_rank},
          {"dispatch_row_bytes", layout.dispatch_row_bytes},
          {"combine_row_bytes", layout.combine_row_bytes},
          {"weight_bytes_per_rank", layout.weight_bytes},
          {"rows_per_rank", layout.balance.rows},
          {"busiest_over_mean", layout.balance.mean},
          {"busiest_over_mean_worst_layer", layout.balance.worst},
          {"other_us", layout.other_us},
          {"gather_us", layout.gather_us},
          {"exchanges", exchanges}};
}

ordered_json ToJson(const simulate::LinkProfile& link) {
  ordered_json json = {{"name", link.name}};
  for (const simulate::LinkField& field : simulate::LinkFields())
    json[std::string(field.name)] = link.*field.value;
  json["nic_per"] = simulate::NicOwnerName(link.nic_per);
  return json;
}

void PrintJson(const Options& options, const SimulatedModel& model) {
  const SimulationRequest& request = model.request;
  ordered_json line = {{"shape", request.shape.name},
                       {"scheme", request.shape.scheme},
                       {"mode", options.mode},
                       {"tokens_per_rank", request.tokens},
                       {"context", request.context},
                       {"attention", options.attention},
                       {"routing", request.routing.description},
                       {"dispatch_dtype", options.wire},
                       {"top_k", request.shape.top_k},
                       {"moe_layers", request.shape.moe_layers},
                       {"link", ToJson(request.link)}};
  if (options.sweep) {
    line["sweep"] = ordered_json::array();
    for (const Prediction& point : model.sweep) line["sweep"].push_back(ToJson(point));
  } else {
    line.update(ToJson(model.layout));
  }
  line["assumptions"] = options.sweep ? SweepAssumptions(request) : simulate::Assumptions(request);
  fmt::print("{}\n", line.dump());
}

void PrintAssumptions(const std::vector<std::string>& assumptions) {
  fmt::print("assumptions:\n");
  for (const std::string& line : assumptions) fmt::print("  {}\n", line);
}

// One line of the table: a label and a figure per scheme.
template <typename Value>
void PrintRow(const Prediction& layout, std::string_view label, std::string_view unit,
              const Value& value) {
  fmt::print("{:<34}", label);
  for (const StepPrediction& step : layout.steps) fmt::print(" {:>14.1f}", value(step));
  fmt::print(" {}\n", unit);
}

void PrintExchange(const Prediction& layout, std::string_view name,
                   ExchangeCost StepPrediction::*cost) {
  const auto row = [&](std::string_view label, std::string_view unit, auto value) {
    PrintRow(layout, label, unit, [&](const StepPrediction& step) { return value(step.*cost); });
  };
  row(name, "us", [](const ExchangeCost& c) { return c.total_us(); });
  row("  counts", "us", [](const ExchangeCost& c) { return c.counts_us; });
  row("  latency and fixed", "us", [](const ExchangeCost& c) { return c.latency_us + c.fixed_us; });
  row("  network", "us", [](const ExchangeCost& c) { return c.network_us; });
  row("  memory", "us", [](const ExchangeCost& c) { return c.memory_us; });
  row("  a rank sends to others", "kB",
      [](const ExchangeCost& c) { return c.off_rank_bytes / 1e3; });
  row("    of it off its node", "kB", [](const ExchangeCost& c) { return c.off_node_bytes / 1e3; });
  row("  busiest card, one direction", "kB",
      [](const ExchangeCost& c) { return c.busiest_nic_bytes / 1e3; });
}

void PrintLayout(const Options& options, const SimulatedModel& model) {
  const SimulationRequest& request = model.request;
  const Prediction& layout = model.layout;
  fmt::print("{}: {} ranks on {} nodes, {} tokens a rank, mode {}\n", ShapeLabel(request.shape),
             layout.num_ranks, layout.num_nodes, request.tokens, options.mode);
  fmt::print("{} experts and {} redundant ones, {} a rank; {} of weights a rank\n",
             request.shape.num_experts, layout.redundant, layout.experts_per_rank,
             FormatBytes(layout.weight_bytes));
  fmt::print(
      "routing {}: busiest rank {:.2f}x the mean of {:.1f} rows, {:.2f}x in the worst of {} MoE "
      "layers\n",
      request.routing.description, layout.balance.mean, layout.balance.rows, layout.balance.worst,
      request.shape.moe_layers);
  fmt::print("rows on the wire: dispatch {} B ({}), combine {} B (bf16)\n\n",
             layout.dispatch_row_bytes, options.wire, layout.combine_row_bytes);
  fmt::print("{:<34}", "one MoE layer");
  for (const StepPrediction& step : layout.steps)
    fmt::print(" {:>14}", simulate::SchemeName(step.scheme));
  fmt::print("\n");
  PrintExchange(layout, "dispatch", &StepPrediction::dispatch);
  PrintRow(layout, "experts of the busiest rank", "us",
           [](const StepPrediction& step) { return step.experts_us; });
  PrintExchange(layout, "combine", &StepPrediction::combine);
  PrintRow(layout, "MoE layer", "us",
           [](const StepPrediction& step) { return step.moe_layer_us(); });
  fmt::print("whole step\n");
  PrintRow(layout, "  attention, dense parts, head", "ms",
           [&](const StepPrediction&) { return layout.other_us / 1e3; });
  if (layout.gather_us > 0) {
    PrintRow(layout, "  gather after each layer", "ms",
             [&](const StepPrediction&) { return layout.gather_us / 1e3; });
  }
  PrintRow(layout, "  step", "ms", [](const StepPrediction& step) { return step.step_us / 1e3; });
  PrintRow(layout, "  exchanges in it", "%",
           [](const StepPrediction& step) { return 100 * step.exchange_share(); });
  PrintRow(layout, "  all ranks together", "tokens/s",
           [](const StepPrediction& step) { return step.tokens_per_s; });
  PrintAssumptions(simulate::Assumptions(request));
}

void PrintSweep(const Options& options, const SimulatedModel& model) {
  fmt::print("{}: {} tokens a rank, mode {}\n", ShapeLabel(model.request.shape),
             model.request.tokens, options.mode);
  fmt::print("{:>5} {:>5} {:>9} {:>8}  {:<12} {:>11} {:>11} {:>11} {:>9} {:>9} {:>11}\n", "ranks",
             "nodes", "redundant", "busiest", "exchange", "dispatch us", "experts us", "combine us",
             "step ms", "exchange", "tokens/s");
  for (const Prediction& point : model.sweep) {
    for (const StepPrediction& step : point.steps) {
      fmt::print(
          "{:>5} {:>5} {:>9} {:>7.2f}x  {:<12} {:>11.0f} {:>11.0f} {:>11.0f} {:>9.1f} {:>7.0f} % "
          "{:>11.0f}\n",
          point.num_ranks, point.num_nodes, point.redundant, point.balance.mean,
          simulate::SchemeName(step.scheme), step.dispatch.total_us(), step.experts_us,
          step.combine.total_us(), step.step_us / 1e3, 100 * step.exchange_share(),
          step.tokens_per_s);
    }
  }
  PrintAssumptions(SweepAssumptions(model.request));
}

void Print(const Options& options, const SimulatedModel& model) {
  if (options.json) {
    PrintJson(options, model);
  } else if (options.sweep) {
    PrintSweep(options, model);
  } else {
    PrintLayout(options, model);
  }
}

int Run(const Options& options) {
  if (options.html) RequireWritable("--html", *options.html);
  if (options.svg) RequireWritable("--svg", *options.svg);
  std::vector<SimulatedModel> models;
  for (const std::string& shape : options.shapes) models.push_back(Simulate(options, shape));
  if (options.html) WriteFile("--html", *options.html, SimulationPage(models));
  if (options.svg) WriteFile("--svg", *options.svg, SimulationPlot(models));
  for (const SimulatedModel& model : models) Print(options, model);
  return 0;
}

}  // namespace

std::function<int()> SetUpSimulate(CLI::App& app, Settings&) {
  auto options = std::make_shared<Options>();
  app.add_option("--shape", options->shapes,
                 "a known model's shape, NAME[:SCHEME]; several with commas")
      ->required()
      ->delimiter(',');
  app.add_option("--ep", options->ranks, "expert-parallel ranks [8]")->check(kCount);
  app.add_option("--nodes", options->nodes, "nodes that they are on [1]")->check(kCount);
  app.add_option("--tokens", options->tokens, "tokens of each rank in one step [128]")
      ->check(kCount);
  app.add_option("--context", options->context, "keys that a token's attention reads [1024]")
      ->check(kCount);
  app.add_option("--link", options->link,
                 "JSON file of the cluster's figures (docs/simulation.md) [built in]");
  app.add_option("--mode", options->mode, "normal or low_latency [normal]")
      ->check(CLI::IsMember({"normal", "low_latency"}));
  app.add_option(
      "--routing", options->routing,
      "uniform, zipf:EXPONENT[:SEED], or a file of `inspect --routing --json` [uniform]");
  app.add_option("--redundant", options->redundant,
                 "redundant experts; all are then placed by load [none, placed by number]")
      ->check(kCount);
  app.add_option("--attention", options->attention,
                 "dp: a rank has its own tokens; replicated: all tokens on every rank [dp]")
      ->check(CLI::IsMember({"dp", "replicated"}));
  app.add_option("--dispatch-dtype", options->wire, "rows on the wire: bf16, fp8 or int8 [fp8]");
  app.add_flag("--sweep", options->sweep,
               "2 to 4096 ranks, as many on a node as --ep and --nodes say");
  app.add_flag("--json", options->json, "machine-readable, one line a shape");
  app.add_option("--html", options->html, "write a page with plot, assumptions and tables");
  app.add_option("--svg", options->svg, "write the plot alone");
  return [options] { return Run(*options); };
}

}  // namespace switchyard::cli
