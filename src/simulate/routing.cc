#include "switchyard/simulate/routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/eplb/algorithms.h"

namespace switchyard::simulate {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void CheckTopK(size_t num_experts, size_t top_k) {
  if (top_k == 0 || top_k > num_experts) {
    Invalid(fmt::format("top_k must be 1 to {} (the experts), found {}", num_experts, top_k));
  }
}

void RequireDivides(std::string_view what, size_t value, std::string_view of, size_t divisor) {
  if (divisor == 0 || value == 0 || value % divisor != 0) {
    Invalid(fmt::format("{} {} cannot be divided evenly among {} {}", value, what, divisor, of));
  }
}

// Scales `weights`, sorted from the largest, to a sum of `sum`, with none above 1: those that would
// be above are 1, and the others share the rest.
void ScaleToShares(std::vector<double>& weights, double sum) {
  double rest = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) {
    const double share = rest > 0 ? std::min(1.0, sum * weight / rest) : 0.0;
    rest -= weight;
    sum -= share;
    weight = share;
  }
}

// log of the probability that none of a token's k experts is among `group` of E equal ones.
double LogNone(size_t group, size_t num_experts, size_t top_k) {
  double log_none = 0;
  for (size_t i = 0; i < top_k; ++i) {
    const double left = static_cast<double>(num_experts - i);
    const double outside = left - static_cast<double>(group);
    if (outside <= 0) return -INFINITY;
    log_none += std::log(outside / left);
  }
  return log_none;
}

// Probability that a token reaches a group of slots.
//
// If slots were chosen independently it would be 1 - prod(1 - share). A token chooses exactly k, so
// the exponent is corrected by what the correction is for equal shares, where it is known exactly.
class GroupReach {
 public:
  GroupReach(size_t group, size_t num_slots, size_t top_k)
      : is_certain_(group == num_slots || top_k == num_slots) {
    if (is_certain_) return;
    const double share = static_cast<double>(top_k) / static_cast<double>(num_slots);
    exponent_ =
        LogNone(group, num_slots, top_k) / (static_cast<double>(group) * std::log1p(-share));
  }

  double operator()(std::span<const double> shares) const {
    if (is_certain_) return 1;
    double log_none = 0;
    for (const double share : shares) log_none += std::log1p(-std::min(share, 1.0));
    // More than its rows would allow cannot be: exponent_ is infinite for groups that every token
    // of equal shares must reach.
    const double rows = std::accumulate(shares.begin(), shares.end(), 0.0);
    return rows == 0 ? 0.0 : std::min({1.0, rows, -std::expm1(exponent_ * log_none)});
  }

 private:
  bool is_certain_;
  double exponent_ = 1;
};

std::vector<double> ReachGroups(std::span<const double> shares, size_t groups, size_t top_k) {
  const size_t size = shares.size() / groups;
  const GroupReach reach(size, shares.size(), top_k);
  std::vector<double> result(groups);
  for (size_t g = 0; g < groups; ++g) result[g] = reach(shares.subspan(g * size, size));
  return result;
}

// One recorded-routing file, with errors that name it.
class RoutingFile {
 public:
  RoutingFile(const std::string& name, std::string_view text) : name_(name) {
    try {
      document_ = nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& e) {
      Corrupt(CleanJsonError(e.what()));
    }
  }

  [[noreturn]] void Corrupt(const std::string& what) const {
    throw Error(ErrorCode::kCorruptData, fmt::format("{}: {}", name_, what));
  }

  const nlohmann::json& document() const { return document_; }

  const nlohmann::json& Field(const nlohmann::json& object, const char* name) const {
    if (!object.is_object() || !object.contains(name)) {
      Corrupt(
          fmt::format("there is no field \"{}\"; expected what `switchyard inspect --routing "
                      "--json` writes",
                      name));
    }
    return object.at(name);
  }

  size_t Count(const nlohmann::json& value, const std::string& what) const {
    constexpr uint64_t kMax = uint64_t{1} << 53;  // exact as a double
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMax) {
      Corrupt(fmt::format("{}: expected a whole number from 0 to 2^53", what));
    }
    return value.get<size_t>();
  }

 private:
  std::string name_;
  nlohmann::json document_;
};

// Shares of the experts of one entry of "layers".
std::vector<double> ReadLayer(const RoutingFile& file, const nlohmann::json& layer, size_t index,
                              size_t num_experts, size_t num_tokens) {
  const std::string where = fmt::format("routing.layers[{}].tokens", index);
  const nlohmann::json& counts = file.Field(layer, "tokens");
  if (!counts.is_array() || counts.size() != num_experts) {
    file.Corrupt(
        fmt::format("{}: expected an array of {} counts, one an expert", where, num_experts));
  }
  std::vector<double> shares;
  for (const nlohmann::json& value : counts) {
    const size_t count = file.Count(value, where);
    if (count > num_tokens) {
      file.Corrupt(fmt::format("{}: expert {} has {} tokens, but there were only {}", where,
                               shares.size(), count, num_tokens));
    }
    shares.push_back(static_cast<double>(count) / static_cast<double>(num_tokens));
  }
  return shares;
}

// Shares of the physical experts of an EPLB plan for just this load.
std::vector<double> PlannedShares(std::span<const double> experts, size_t num_ranks,
                                  size_t num_slots) {
  const std::vector<float> loads(experts.begin(), experts.end());
  moe::EplbRequest request;
  request.num_layers = 1;
  request.num_logical = experts.size();
  request.num_physical = num_slots;
  request.num_devices = num_ranks;
  request.tokens_per_expert = loads;
  const moe::ExpertPlan plan = moe::PlanExperts(request);
  std::vector<double> shares;
  for (const int32_t expert : plan.physical_to_logical) {
    const auto e = static_cast<size_t>(expert);
    shares.push_back(experts[e] / plan.logical_count[e]);
  }
  return shares;
}

}  // namespace

ExpertShares UniformShares(size_t num_experts, size_t top_k) {
  CheckTopK(num_experts, top_k);
  const double share = static_cast<double>(top_k) / static_cast<double>(num_experts);
  return {"uniform", {std::vector<double>(num_experts, share)}};
}

ExpertShares ZipfShares(size_t num_experts, size_t top_k, size_t num_layers, double exponent,
                        uint64_t seed) {
  CheckTopK(num_experts, top_k);
  if (!(exponent >= 0 && exponent <= 8)) {
    Invalid(fmt::format("the exponent of zipf must be 0 to 8, found {}", exponent));
  }
  std::vector<double> sorted(num_experts);
  for (size_t i = 0; i < num_experts; ++i)
    sorted[i] = std::pow(static_cast<double>(i + 1), -exponent);
  ScaleToShares(sorted, static_cast<double>(top_k));
  ExpertShares result{fmt::format("zipf, exponent {}, seed {}", exponent, seed), {}};
  std::mt19937_64 random(seed);
  for (size_t layer = 0; layer < num_layers; ++layer) {
    std::vector<double> shares = sorted;
    // Not std::shuffle, which is another one in every standard library.
    for (size_t i = num_experts - 1; i > 0; --i) std::swap(shares[i], shares[random() % (i + 1)]);
    result.layers.push_back(std::move(shares));
  }
  return result;
}

ExpertShares ReadShares(const std::string& file_name, std::string_view text, size_t num_experts,
                        size_t top_k) {
  CheckTopK(num_experts, top_k);
  const RoutingFile file(file_name, text);
  const nlohmann::json& routing = file.Field(file.document(), "routing");
  const size_t tokens = file.Count(file.Field(routing, "tokens"), "routing.tokens");
  const size_t experts = file.Count(file.Field(routing, "experts"), "routing.experts");
  const size_t per_token =
      file.Count(file.Field(routing, "experts_per_token"), "routing.experts_per_token");
  if (experts != num_experts || per_token != top_k) {
    Invalid(
        fmt::format("{}: recorded from a model with {} of {} experts per token, the shape has "
                    "{} of {}",
                    file_name, per_token, experts, top_k, num_experts));
  }
  const nlohmann::json& layers = file.Field(routing, "layers");
  if (!layers.is_array() || layers.empty() || tokens == 0) {
    file.Corrupt("expected at least one token and one entry in routing.layers");
  }
  ExpertShares result{file_name, {}};
  for (const nlohmann::json& layer : layers)
    result.layers.push_back(ReadLayer(file, layer, result.layers.size(), num_experts, tokens));
  return result;
}

size_t FittingRedundancy(size_t num_experts, size_t num_ranks, size_t at_least) {
  const size_t slots = num_experts + at_least;
  return (slots + num_ranks - 1) / num_ranks * num_ranks - num_experts;
}

std::vector<double> PlaceExperts(std::span<const double> experts, size_t num_ranks,
                                 std::optional<size_t> redundant) {
  const size_t num_slots = experts.size() + redundant.value_or(0);
  if (num_ranks == 0 || num_slots % num_ranks != 0) {
    const std::string remedy =
        num_ranks == 0
            ? ""
            : fmt::format("; --redundant {} would do",
                          FittingRedundancy(experts.size(), num_ranks, redundant.value_or(0)));
    Invalid(
        fmt::format("{} experts and {} redundant ones cannot be divided evenly among {} ranks{}",
                    experts.size(), redundant.value_or(0), num_ranks, remedy));
  }
  if (redundant) return PlannedShares(experts, num_ranks, num_slots);
  return {experts.begin(), experts.end()};
}

Reach ComputeReach(std::span<const double> shares, size_t num_ranks, size_t num_nodes,
                   size_t top_k) {
  RequireDivides("physical experts", shares.size(), "ranks", num_ranks);
  RequireDivides("ranks", num_ranks, "nodes", num_nodes);
  CheckTopK(shares.size(), top_k);
  Reach reach;
  reach.ranks_per_node = num_ranks / num_nodes;
  reach.rank = ReachGroups(shares, num_ranks, top_k);
  reach.node = ReachGroups(shares, num_nodes, top_k);
  const size_t per_rank = shares.size() / num_ranks;
  for (size_t r = 0; r < num_ranks; ++r) {
    const auto own = shares.subspan(r * per_rank, per_rank);
    reach.rows.push_back(std::accumulate(own.begin(), own.end(), 0.0));
  }
  return reach;
}

double DistinctGroups(size_t groups, size_t num_experts, size_t top_k) {
  RequireDivides("experts", num_experts, "groups", groups);
  CheckTopK(num_experts, top_k);
  const double log_none = LogNone(num_experts / groups, num_experts, top_k);
  return static_cast<double>(groups) * -std::expm1(log_none);
}

double MaxOverMean(std::span<const double> loads) {
  const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
  if (sum == 0) return 1;
  return *std::max_element(loads.begin(), loads.end()) * static_cast<double>(loads.size()) / sum;
}

}  // namespace switchyard::simulate
