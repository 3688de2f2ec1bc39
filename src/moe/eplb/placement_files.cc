#include "switchyard/moe/eplb/placement_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

using Json = nlohmann::json;

constexpr const char* kPlacementField = "physical_to_logical";
constexpr const char* kLoadsField = "logical_count";
constexpr double kMostTokens = 1e30;  // of one expert; well inside f32

[[noreturn]] void Corrupt(std::string_view name, const std::string& message) {
  throw Error(ErrorCode::kCorruptData, fmt::format("{}: {}", name, message));
}

Json ParseObject(std::string_view text, std::string_view name) {
  Json document;
  try {
    document = Json::parse(text);
  } catch (const Json::parse_error& error) {
    Corrupt(name, fmt::format("not JSON, found at byte {}", error.byte));
  } catch (const Json::exception&) {
    Corrupt(name, "a number in it is too large");
  }
  if (!document.is_object()) Corrupt(name, "a JSON object was expected");
  return document;
}

// The list under a name of `where`, not empty and, if `size` is not 0, of that size.
const Json& List(const Json& value, size_t size, std::string_view name, const std::string& where) {
  if (!value.is_array() || value.empty() || (size != 0 && value.size() != size)) {
    const std::string found =
        value.is_array() ? fmt::format("{} entries", value.size()) : value.type_name();
    const std::string expected = size != 0 ? fmt::format("a list of {}", size) : "a list";
    Corrupt(name, fmt::format("{}: {} was expected, found {}", where, expected, found));
  }
  return value;
}

ExpertLocation LocationOfLoads(const LoadTable& loads, std::string_view name,
                               const ExpertLocationSizes& sizes, const EplbPolicy& policy,
                               size_t num_groups) {
  if (loads.num_layers != sizes.num_layers || loads.num_logical != sizes.num_logical) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: loads of {} layers with {} experts, the model has {} with {}", name,
                    loads.num_layers, loads.num_logical, sizes.num_layers, sizes.num_logical));
  }
  EplbRequest request;
  request.policy = policy;
  request.num_steps = loads.num_steps;
  request.num_layers = sizes.num_layers;
  request.num_logical = sizes.num_logical;
  request.num_physical = sizes.num_physical;
  request.num_devices = sizes.ep_size;
  request.num_nodes = sizes.num_nodes;
  request.num_groups = num_groups;
  request.tokens_per_expert = loads.tokens_per_expert;
  return ExpertLocation::FromPlan(PlanExperts(request), sizes.ep_size, sizes.num_nodes);
}

std::string ReadTextFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || text.empty()) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: the file of the initial expert placement cannot be read", path));
  }
  return text;
}

}  // namespace

std::vector<int32_t> ParsePlacement(std::string_view json, std::string_view name,
                                    const ExpertLocationSizes& sizes) {
  const Json document = ParseObject(json, name);
  if (!document.contains(kPlacementField))
    Corrupt(name, fmt::format("there is no field {}", kPlacementField));
  std::vector<int32_t> map;
  const Json& layers = List(document[kPlacementField], sizes.num_layers, name, kPlacementField);
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const std::string where = fmt::format("{}, layer {}", kPlacementField, layer);
    for (const Json& expert : List(layers[layer], sizes.num_physical, name, where)) {
      if (!expert.is_number_unsigned() || expert.get<uint64_t>() >= sizes.num_logical) {
        Corrupt(name, fmt::format("{}: experts are 0 to {}", where, sizes.num_logical - 1));
      }
      map.push_back(expert.get<int32_t>());
    }
  }
  return map;
}

LoadTable ParseLoads(std::string_view json, std::string_view name) {
  const Json document = ParseObject(json, name);
  if (!document.contains(kLoadsField))
    Corrupt(name, fmt::format("there is no field {}", kLoadsField));
  const Json& top = List(document[kLoadsField], 0, name, kLoadsField);
  const Json& row = List(top[0], 0, name, kLoadsField);
  const bool has_steps = row[0].is_array();
  LoadTable loads;
  loads.num_steps = has_steps ? top.size() : 1;
  loads.num_layers = has_steps ? row.size() : top.size();
  loads.num_logical = List(has_steps ? row[0] : row, 0, name, kLoadsField).size();
  for (size_t step = 0; step < loads.num_steps; ++step) {
    const std::string in_step = fmt::format("{}, step {}", kLoadsField, step);
    const Json& layers = has_steps ? List(top[step], loads.num_layers, name, in_step) : top;
    for (size_t layer = 0; layer < loads.num_layers; ++layer) {
      const std::string where = fmt::format("{}, layer {}", in_step, layer);
      for (const Json& count : List(layers[layer], loads.num_logical, name, where)) {
        if (!count.is_number() || count.get<double>() < 0 || count.get<double>() > kMostTokens)
          Corrupt(name, fmt::format("{}: counts are numbers of 0 to {}", where, kMostTokens));
        loads.tokens_per_expert.push_back(count.get<float>());
      }
    }
  }
  return loads;
}

std::string FormatPlacement(const ExpertLocationSizes& sizes,
                            std::span<const int32_t> physical_to_logical) {
  if (physical_to_logical.size() != sizes.num_layers * sizes.num_physical) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a placement of {} layers and {} experts cannot be {} numbers",
                            sizes.num_layers, sizes.num_physical, physical_to_logical.size()));
  }
  Json layers = Json::array();
  for (size_t layer = 0; layer < sizes.num_layers; ++layer) {
    const auto row = physical_to_logical.subspan(layer * sizes.num_physical, sizes.num_physical);
    layers.push_back(std::vector<int32_t>(row.begin(), row.end()));
  }
  return Json{{kPlacementField, std::move(layers)}}.dump();
}

std::string FormatLoads(const LoadTable& loads) {
  if (loads.tokens_per_expert.size() != loads.num_steps * loads.num_layers * loads.num_logical) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("loads of {} steps, {} layers and {} experts cannot be {} numbers",
                            loads.num_steps, loads.num_layers, loads.num_logical,
                            loads.tokens_per_expert.size()));
  }
  Json steps = Json::array();
  const float* next = loads.tokens_per_expert.data();
  for (size_t step = 0; step < loads.num_steps; ++step) {
    Json layers = Json::array();
    for (size_t layer = 0; layer < loads.num_layers; ++layer, next += loads.num_logical)
      layers.push_back(std::vector<float>(next, next + loads.num_logical));
    steps.push_back(std::move(layers));
  }
  return Json{{kLoadsField, std::move(steps)}}.dump();
}

void WriteTextFile(const std::string& path, std::string_view text) {
  const std::string unfinished = path + ".part";
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    std::remove(unfinished.c_str());
    throw Error(ErrorCode::kUnavailable, fmt::format("{}: the file cannot be written", path));
  }
}

ExpertLocation InitialLocation(std::string_view spec, const ExpertLocationSizes& sizes,
                               const EplbPolicy& policy, size_t num_groups) {
  if (spec == "trivial") return ExpertLocation::Trivial(sizes);
  const bool is_text = spec.starts_with('{');
  const std::string name(is_text ? "init-expert-location" : spec);
  const std::string text = is_text ? std::string(spec) : ReadTextFile(name);
  if (ParseObject(text, name).contains(kPlacementField))
    return ExpertLocation::FromMap(sizes, ParsePlacement(text, name, sizes));
  return LocationOfLoads(ParseLoads(text, name), name, sizes, policy, num_groups);
}

}  // namespace switchyard::moe
