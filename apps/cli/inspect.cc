// Verb inspect: what is in a checkpoint, what memory it needs, and how it would be computed.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common.h"
#include "inspect_gguf.h"
#include "inspect_placement.h"
#include "inspect_routing.h"
#include "inspect_weights.h"
#include "model/architectures/architecture.h"
#include "switchyard/core/error.h"
#include "switchyard/core/memory.h"
#include "switchyard/engine/kv_cache.h"
#include "switchyard/model/model.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string model;
  bool json = false, placement = false, routing = false, tensors = false, verify = false;
};

// The window of every layer, runs of equal ones joined: "0-23: all keys, 24-31: 4096".
std::string WindowPlan(const ModelConfig& config) {
  std::string plan;
  for (size_t i = 0; i < config.layers.size();) {
    size_t end = i;
    while (end < config.layers.size() && config.layers[end].window == config.layers[i].window)
      ++end;
    const std::string keys = config.layers[i].window == 0
                                 ? "all keys"
                                 : fmt::format("last {} keys", config.layers[i].window);
    plan += fmt::format("{}{}-{}: {}", plan.empty() ? "" : ", ", i, end - 1, keys);
    i = end;
  }
  return plan;
}

ordered_json DescribeConfig(const ModelConfig& config) {
  constexpr std::string_view kQkNorms[] = {"none", "per head", "over all heads"};
  return {{"architecture", config.architecture},
          {"layers", config.layers.size()},
          {"moe_layers", config.num_moe_layers()},
          {"hidden_size", config.hidden_size},
          {"vocab_size", config.vocab_size},
          {"attention_heads", config.num_heads},
          {"kv_heads", config.num_kv_heads},
          {"head_dim", config.head_dim},
          {"kv_values_per_token", config.kv_shape().elements()},
          {"qk_norm", kQkNorms[static_cast<size_t>(config.qk_norm)]},
          {"attention_bias", config.attention_bias},
          {"clip_qkv", config.clip_qkv ? ordered_json(*config.clip_qkv) : ordered_json(nullptr)},
          {"rope", RopeKindName(config.rope.kind)},
          {"rope_theta", config.rope.theta},
          {"context", config.max_positions},
          {"attention_windows", WindowPlan(config)},
          {"experts", config.num_experts},
          {"experts_per_token", config.top_k},
          {"expert_intermediate_size", config.moe_intermediate_size},
          {"dense_intermediate_size", config.dense_intermediate_size},
          {"router",
           fmt::format("{}, {}", moe::ScoringFuncName(config.scoring_func),
                       config.renormalize ? "weights renormalised" : "weights not renormalised")},
          {"tied_embeddings", config.tie_word_embeddings}};
}

ordered_json DescribeMemory(const Model& model, const Settings& settings) {
  const DType kv_dtype = KvDType(settings, model.activation_dtype());
  const KvCache one_block(model.config(), kv_dtype, 1);
  const size_t context = settings.GetCount("ctx", model.config().max_positions);
  if (context > model.config().max_positions) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--ctx {}: the model's context is {} tokens", context,
                            model.config().max_positions));
  }
  const double kv = static_cast<double>(one_block.bytes_per_token()) * static_cast<double>(context);
  // Of what is repacked nobody reads the file again.
  const size_t mapped =
      model.weight_bytes() - std::min(model.weight_bytes(), model.released_bytes());
  return {{"weights_bytes", model.weight_bytes()},
          {"mapped_bytes", mapped},
          {"copied_bytes", model.copied_bytes()},
          {"kv_dtype", DTypeName(kv_dtype)},
          {"kv_bytes_per_token", one_block.bytes_per_token()},
          {"kv_bytes_at_context", kv},
          {"active_bytes_per_token", model.active_bytes_per_token()},
          {"needed_bytes", static_cast<double>(mapped + model.copied_bytes()) + kv},
          {"available_bytes", AvailableBytes()}};
}

void PrintObject(std::string_view title, const ordered_json& object) {
  fmt::print("{}\n", title);
  for (const auto& [key, value] : object.items()) {
    const bool is_bytes = key.find("bytes") != std::string::npos && value.is_number();
    fmt::print("  {:<26} {}\n", key,
               is_bytes            ? FormatBytes(value.get<double>())
               : value.is_string() ? value.get<std::string>()
                                   : value.dump());
  }
}

void PrintAll(const ordered_json& all) {
  fmt::print("{}\n", all["model"].get<std::string>());
  PrintObject("config", all["config"]);
  if (all.contains("gguf")) PrintObject("gguf", all["gguf"]);
  PrintObject("weights", all["weights"]);
  PrintParts(all["schemes"]);
  PrintObject("memory", all["memory"]);
  fmt::print("computed with\n");
  for (const ordered_json& plan : all["plan"]) {
    const std::string runner = plan["runner"].get<std::string>();
    fmt::print("  {:<26} {}{} on {} weights: {}\n", plan["part"].get<std::string>(),
               plan["kernel"].get<std::string>(), runner.empty() ? "" : ", runner " + runner,
               plan["weights"].get<std::string>(), plan["reason"].get<std::string>());
  }
  if (all.contains("tensors")) {
    fmt::print("tensors\n");
    PrintTensors(all["tensors"]);
  }
  if (all.contains("verify")) {
    fmt::print("verify\n");
    for (const ordered_json& line : all["verify"]["problems"])
      fmt::print("  {}\n", Printable(line.get<std::string>()));
    for (const ordered_json& line : all["verify"]["remarks"])
      fmt::print("  remark: {}\n", Printable(line.get<std::string>()));
    fmt::print("  {}\n", all["verify"]["result"].get<std::string>());
  }
}

// Binding has proven that every tensor is used once and that every byte of every file belongs to
// one.
ordered_json DescribeVerification(const Model& model) {
  const Verification& found = model.verification();
  return {
      {"problems", found.problems},
      {"remarks", found.remarks},
      {"result",
       fmt::format("{} tensors, {}: every tensor used once, every byte accounted for, {}",
                   model.tensors().size(), FormatBytes(static_cast<double>(model.weight_bytes())),
                   found.problems.empty() ? std::string("no NaN or infinity, all scales valid")
                                          : fmt::format("{} problems", found.problems.size()))}};
}

ordered_json DescribePlan(const Model& model) {
  ordered_json plans = ordered_json::array();
  for (const ComputePlan& plan : model.Explain()) {
    plans.push_back({{"part", plan.part},
                     {"weights", plan.weights},
                     {"kernel", plan.kernel},
                     {"runner", plan.runner},
                     {"reason", plan.reason}});
  }
  return plans;
}

int Run(const Options& options, const Settings& settings) {
  const std::shared_ptr<const ModelFiles> files = OpenModelFiles(options.model);
  const auto pool = MakeThreadPool(settings);
  ModelOptions model_options = MakeModelOptions(settings, "auto");
  model_options.look_only = true;
  model_options.verify = options.verify;
  const std::unique_ptr<Model> model = Model::Load(files, model_options, *pool);
  ordered_json all;
  all["model"] = files->description();
  all["config"] = DescribeConfig(model->config());
  if (model->gguf() != nullptr) all["gguf"] = DescribeGguf(*model->gguf());
  all["weights"] = DescribeWeights(*model);
  all["schemes"] = DescribeParts(*model);
  all["memory"] = DescribeMemory(*model, settings);
  all["plan"] = DescribePlan(*model);
  if (options.tensors) all["tensors"] = DescribeTensors(*model);
  if (options.verify) all["verify"] = DescribeVerification(*model);
  if (options.json) {
    // Names in a file need not be UTF-8.
    fmt::print("{}\n", all.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    PrintAll(all);
  }
  return model->verification().problems.empty() ? 0 : 1;
}

}  // namespace

std::function<int()> SetUpInspect(CLI::App& app, Settings& settings) {
  auto options = std::make_shared<Options>();
  AddModelArgument(app, options->model);
  app.add_flag("--json", options->json, "machine-readable");
  CLI::Option* tensors = app.add_flag("--tensors", options->tensors, "list every tensor");
  CLI::Option* verify =
      app.add_flag("--verify", options->verify,
                   "read everything: NaN, infinity, bad scales and codes; exit 1 if there is any");
  auto picture = std::make_shared<RoutingOptions>();
  CLI::Option* routing =
      app.add_flag("--routing", options->routing,
                   "run the model over --text and show which experts fire where, nothing else");
  CLI::Option* text =
      app.add_option("--text", picture->text, "text file (UTF-8), - = standard input")
          ->needs(routing);
  routing->needs(text)->excludes(tensors)->excludes(verify);
  CLI::Option* html =
      app.add_option("--html", picture->html, "with --routing: write a heat map to this file")
          ->needs(routing);
  app.add_flag("--placement", options->placement,
               "load the model and show which rank, NUMA node and memory holds what; under mpirun "
               "for all ranks")
      ->excludes(tensors)
      ->excludes(verify)
      ->excludes(routing);
  AddSettingOptions(app, settings);
  return [options, picture, html, &settings] {
    if (options->placement) return InspectPlacement(options->model, options->json, settings);
    // What is in a file needs no ranks.
    if (!options->routing) return IsFirstRank() ? Run(*options, settings) : 0;
    picture->model = options->model;
    picture->json = options->json;
    picture->has_html = html->count() > 0;
    return InspectRouting(*picture, settings);
  };
}

}  // namespace switchyard::cli
