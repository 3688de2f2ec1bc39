// Verb info: this machine and this build.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "common.h"
#include "kernels/matmul/matmul.h"
#include "model/architectures/architecture.h"
#include "model/quantization/online.h"
#include "model/quantization/quantization.h"
#include "ranks.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/memory.h"
#include "switchyard/core/numa.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "verb.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

// Of a model's pool on each NUMA node that has some.
std::vector<size_t> WorkersPerNode(const Settings& settings) {
  const NumaTopology topology = ReadNumaTopology();
  const NumaWorkers workers = SpreadWorkers(topology, ChooseNumaPlacement(topology, 0, 1),
                                            settings.GetCount("threads", AvailableCpus()));
  std::vector<size_t> counts(workers.cpus_of_node.size(), 0);
  for (size_t node : workers.node_of_worker) ++counts[node];
  return counts;
}

ordered_json Machine(const Settings& settings) {
  const CpuInfo cpu = GetCpuInfo();
  std::vector<std::string_view> isas;
  for (Isa isa : SupportedIsas()) isas.push_back(IsaName(isa));
  return {{"cpu", cpu.model},
          {"online_cpus", cpu.online_cpus},
          {"affinity_cpus", cpu.affinity_cpus},
          {"cgroup_quota_cpus", cpu.cgroup_quota},
          {"default_threads", AvailableCpus()},
          {"l1d_bytes", cpu.l1d_bytes},
          {"l2_bytes", cpu.l2_bytes},
          {"l3_bytes", cpu.l3_bytes},
          {"numa_nodes", cpu.numa_nodes},
          {"workers_per_numa_node", WorkersPerNode(settings)},
          {"available_memory_bytes", AvailableBytes()},
          {"isa_supported", isas},
          {"isa_chosen", IsaName(CurrentIsa())},
          {"targets_compiled", cpu.targets_compiled},
          {"targets_supported", cpu.targets_supported},
          {"target_chosen", cpu.target_chosen},
          {"native_bf16", HasNativeBF16()}};
}

template <typename Entries>
ordered_json Named(const Entries& entries) {
  ordered_json rows = ordered_json::array();
  for (const auto& entry : entries)
    rows.push_back({{"name", entry.name}, {"summary", entry.summary}});
  return rows;
}

ordered_json Build() {
  const moe::Registry& registry = moe::BuiltinRegistry();
  ordered_json permutes = ordered_json::array();
  for (const moe::PrePermuteEntry& entry : registry.pre_permutes()) {
    permutes.push_back(
        {{"format", moe::DispatchFormatName(entry.format)}, {"runner", entry.runner}});
  }
  ordered_json schemes = ordered_json::array();
  for (const moe::SchemeEntry& entry : registry.schemes()) {
    schemes.push_back(
        {{"name", entry.name}, {"summary", entry.summary}, {"runners", entry.runners}});
  }
  ordered_json kernels = ordered_json::array();
  for (const kernels::MatmulKernel& kernel : kernels::AllMatmulKernels())
    kernels.push_back(kernel.name);
  ordered_json architectures = ordered_json::array();
  for (const ArchitectureEntry* entry : AllArchitectures()) {
    architectures.push_back({{"name", entry->name}, {"summary", entry->summary}});
  }
  ordered_json producers = ordered_json::array();
  for (const QuantizationProducer* producer : AllQuantizationProducers())
    producers.push_back({{"name", producer->quant_method}, {"summary", producer->summary}});
  ordered_json online = ordered_json::array();
  for (const OnlineScheme& scheme : OnlineSchemes()) {
    online.push_back(
        {{"name", scheme.name}, {"summary", scheme.summary}, {"scheme", scheme.moe_scheme}});
  }
  ordered_json ggml_types = ordered_json::array();
  for (auto i = static_cast<int>(kFirstGgmlBlock); i <= static_cast<int>(kLastGgmlBlock); ++i)
    ggml_types.push_back(DTypeName(static_cast<DType>(i)));
  ordered_json kv_dtypes = ordered_json::array();
  for (const auto& [name, dtype] : kKvDTypes) kv_dtypes.push_back(name);
  return {{"version", SWITCHYARD_VERSION},
          {"compiler", __VERSION__},
#ifdef NDEBUG
          {"build_type", "release"},
#else
          {"build_type", "debug"},
#endif
          {"mpi", DescribeMpi()},
          {"dispatchers", Named(registry.dispatchers())},
          {"runners", Named(registry.runners())},
          {"permutes", permutes},
          {"schemes", schemes},
          {"activations", Named(registry.activations())},
          {"matmul_kernels", kernels},
          {"architectures", architectures},
          {"quant_methods", producers},
          {"quantize_schemes", online},
          {"ggml_types", ggml_types},
          {"kv_dtypes", kv_dtypes},
          {"absent", ordered_json::array()}};
}

// Why the choices are what they are, for the runner of unquantised experts.
std::vector<std::string> Explain(const Settings& settings) {
  std::vector<std::string> lines;
  lines.push_back(
      fmt::format("isa: {} ({}): the highest level that the CPU supports and the build contains, "
                  "capped by --isa",
                  IsaName(CurrentIsa()), settings.Source("isa")));
  lines.push_back(fmt::format(
      "act-dtype: {} ({}): auto takes bf16 for bf16 weights {}, else f32",
      settings.Get("act-dtype"), settings.Source("act-dtype"),
      HasNativeBF16() ? "here, because the CPU multiplies bf16 pairs"
                      : "nowhere here, because the CPU (or --isa) has no bf16 products"));
  for (const moe::SchemeEntry& scheme : moe::BuiltinRegistry().schemes()) {
    lines.push_back(fmt::format("moe-runner: {} ({}): for scheme {} auto takes {}, the first of {}",
                                settings.Get("moe-runner"), settings.Source("moe-runner"),
                                scheme.name, scheme.runners.front(),
                                fmt::join(scheme.runners, ", ")));
  }
  const std::string& a2a = settings.Get("moe-a2a");
  const std::string& source = settings.Source("moe-a2a");
  if (a2a == "ascend_fuseep") {
    lines.push_back(
        fmt::format("moe-a2a: {} ({}): FuseEP in place of dispatcher and runner, for "
                    "un-quantised and W8A8 weights",
                    a2a, source));
    return lines;
  }
  for (const moe::RunnerEntry& runner : moe::BuiltinRegistry().runners()) {
    std::vector<std::string_view> names;
    try {
      for (const auto* entry : moe::BuiltinRegistry().DispatchersFor(a2a, runner.name))
        names.push_back(entry->name);
    } catch (const Error&) {  // a pair that there is not
    }
    lines.push_back(fmt::format(
        "moe-a2a: {} ({}): for runner {} {}", a2a, source, runner.name,
        names.empty() ? "no dispatcher" : fmt::format("dispatcher {}", fmt::join(names, ", "))));
  }
  return lines;
}

void PrintTable(const std::string& title, const ordered_json& object) {
  fmt::print("{}\n", title);
  for (const auto& [key, value] : object.items()) {
    if (value.is_array() && value.empty()) continue;
    if (!value.is_array()) {
      fmt::print("  {:<24} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
      continue;
    }
    std::vector<std::string> items;
    for (const ordered_json& item : value) {
      if (item.is_string()) {
        items.push_back(item.get<std::string>());
      } else if (item.is_number()) {
        items.push_back(item.dump());
      } else if (item.contains("format")) {
        items.push_back(fmt::format("{} <-> {}", item["format"].get<std::string>(),
                                    item["runner"].get<std::string>()));
      } else {
        const std::string note = item.contains("summary") ? item["summary"].get<std::string>()
                                                          : item["reason"].get<std::string>();
        items.push_back(fmt::format("{} ({})", item["name"].get<std::string>(), note));
      }
    }
    fmt::print("  {:<24} {}\n", key, fmt::join(items, ", "));
  }
}

}  // namespace

std::function<int()> SetUpInfo(CLI::App& app, Settings& settings) {
  struct Flags {
    bool json = false;
    bool explain = false;
  };
  auto flags = std::make_shared<Flags>();
  app.add_flag("--json", flags->json, "machine-readable");
  app.add_flag("--explain", flags->explain, "say why each choice is what it is");
  AddSettingOptions(app, settings);
  return [flags, &settings] {
    MakeThreadPool(settings);  // applies --isa, and refuses what cannot be
    ordered_json all = {{"machine", Machine(settings)}, {"build", Build()}};
    if (flags->explain) all["explain"] = Explain(settings);
    if (flags->json) {
      fmt::print("{}\n", all.dump());
      return 0;
    }
    PrintTable("machine", all["machine"]);
    PrintTable("build", all["build"]);
    if (flags->explain) {
      fmt::print("explain\n");
      for (const std::string& line : Explain(settings)) fmt::print("  {}\n", line);
    }
    return 0;
  };
}

}  // namespace switchyard::cli
