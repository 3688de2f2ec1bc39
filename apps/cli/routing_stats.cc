#include "routing_stats.h"

#include <fmt/format.h>

#include <algorithm>

namespace switchyard::cli {

std::vector<ExpertPlace> HottestExperts(const RoutingStats& stats, size_t count) {
  std::vector<ExpertPlace> places;
  for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
    for (size_t expert = 0; expert < stats.num_experts; ++expert) places.push_back({layer, expert});
  }
  std::stable_sort(places.begin(), places.end(), [&](const ExpertPlace& a, const ExpertPlace& b) {
    return stats.layers[a.layer].tokens[a.expert] > stats.layers[b.layer].tokens[b.expert];
  });
  places.resize(std::min(places.size(), count));
  return places;
}

std::vector<ExpertPlace> IdleExperts(const RoutingStats& stats) {
  std::vector<ExpertPlace> places;
  for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
    for (size_t expert : stats.layers[layer].idle) places.push_back({layer, expert});
  }
  return places;
}

std::string ListOf(const std::vector<size_t>& numbers, size_t shown) {
  std::string list;
  for (size_t i = 0; i < std::min(shown, numbers.size()); ++i)
    list += fmt::format("{}{}", i == 0 ? "" : ", ", numbers[i]);
  if (numbers.size() > shown) list += fmt::format(" and {} more", numbers.size() - shown);
  return list;
}

}  // namespace switchyard::cli
