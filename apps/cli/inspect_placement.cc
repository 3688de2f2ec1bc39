#include "inspect_placement.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "common.h"
#include "switchyard/core/numa.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

// "0-3, 7".
std::string Ranges(std::span<const int32_t> numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", numbers[i]);
    if (end - i > 1) text += fmt::format("-{}", numbers[end - 1]);
    i = end;
  }
  return text;
}

// The bytes of every matrix of a rank's experts.
void AddRanges(const moe::ExpertBank& bank, std::vector<std::span<const std::byte>>& ranges) {
  const size_t stride = bank.stride == 0 ? bank.cols : bank.stride;
  for (const std::byte* data : bank.data) {
    if (bank.rows == 0) continue;
    ranges.emplace_back(data, BytesOf(bank.format.dtype, (bank.rows - 1) * stride + bank.cols));
  }
}

ordered_json Describe(const LoadedModel& loaded) {
  const Model& model = *loaded.model;
  const size_t layers = model.config().num_moe_layers();
  std::vector<std::span<const std::byte>> ranges;
  std::string experts;
  size_t moved = 0;  // layers whose experts are not those of the first
  const size_t rank = loaded.ranks == nullptr ? 0 : loaded.ranks->ep().ep_rank();
  for (size_t layer = 0; layer < layers; ++layer) {
    const moe::ExpertWeights& weights = model.experts(layer);
    for (const moe::ExpertBank* bank : {&weights.w1, &weights.w3, &weights.w2})
      AddRanges(*bank, ranges);
    const size_t local = weights.w1.data.size();
    const std::string here = Ranges(model.ExpertMap(layer).subspan(rank * local, local));
    if (layer == 0) experts = here;
    if (here != experts) ++moved;
  }
  const PagePlacement pages = FindPages(ranges);
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  ordered_json line;
  line["rank"] = World() == nullptr ? 0 : World()->rank();
  line["host"] = host.data();
  line["nodes"] = loaded.numa.nodes;
  line["cpus"] = loaded.numa.cpus.size();
  line["threads"] = loaded.pool->num_threads();
  line["was_bound"] = loaded.numa.was_bound;
  line["moe_layers"] = layers;
  line["experts"] = experts;
  line["layers_with_other_experts"] = moved;
  line["expert_bytes"] = pages.bytes;
  line["local_share"] = pages.ShareOn(loaded.numa.nodes);
  line["absent_pages_share"] = pages.num_pages == 0 ? 0.0
                                                    : static_cast<double>(pages.num_absent) /
                                                          static_cast<double>(pages.num_pages);
  line["unknown"] = pages.why_unknown;
  line["text"] =
      DescribePages(fmt::format("experts {} of {} layers{}", experts, layers,
                                moved == 0 ? "" : fmt::format(" (others in {} layers)", moved)),
                    pages, loaded.numa);
  return line;
}

}  // namespace

int InspectPlacement(const std::string& model, bool json, const Settings& settings) {
  std::vector<std::string> lines;
  ModelRequest request{.model = model, .act_dtype = "auto"};
  request.on_every_rank = [&](const LoadedModel& loaded) {
    const std::string mine = Describe(loaded).dump();
    lines = {mine};
    if (World() != nullptr && World()->size() > 1)
      lines = AllGatherText(*World(), mine, Deadline::Never("placement"));
  };
  const LoadedModel loaded = LoadModel(request, settings);
  ordered_json all = ordered_json::array();
  for (const std::string& line : lines) all.push_back(ordered_json::parse(line));
  if (json) {
    fmt::print("{}\n", all.dump());
    return 0;
  }
  fmt::print("{}\n", DescribeNuma(ReadNumaTopology()));
  for (const ordered_json& line : all) {
    fmt::print("rank {} on {}: {} CPUs, {}{}; {}\n", line["rank"].get<size_t>(),
               line["host"].get<std::string>(), line["cpus"].get<size_t>(),
               line["threads"].get<size_t>() == 1
                   ? "1 thread"
                   : fmt::format("{} threads", line["threads"].get<size_t>()),
               line["was_bound"].get<bool>() ? " (bound by the launcher)" : "",
               line["text"].get<std::string>());
  }
  return 0;
}

}  // namespace switchyard::cli
