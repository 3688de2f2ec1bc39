// How often each expert of each layer was chosen.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace switchyard::cli {

// One MoE layer.
struct LayerRouting {
  size_t layer = 0;
  std::vector<double> tokens;  // [E], tokens that chose the expert
  size_t hottest = 0, coldest = 0;
  std::vector<size_t> idle;  // experts that no token chose
  double balancedness = 1;   // mean over the experts / largest; 1 = all get the same
};

// A whole run.
struct RoutingStats {
  std::string model;
  std::string text;  // name of the file
  size_t num_tokens = 0, num_experts = 0, top_k = 0;
  std::vector<LayerRouting> layers;  // MoE layers only
  double balancedness = 1;           // mean over the layers

  // Tokens of an expert if all got the same.
  double EvenShare() const {
    return static_cast<double>(num_tokens * top_k) / static_cast<double>(num_experts);
  }
  // Tokens of an expert relative to that: 1 = its even share.
  double Load(const LayerRouting& layer, size_t expert) const {
    return layer.tokens[expert] / EvenShare();
  }
};

// One expert of one layer. `layer` counts the entries of RoutingStats::layers.
struct ExpertPlace {
  size_t layer = 0, expert = 0;
};

// The `count` experts of all layers that were chosen most, the first of them most.
std::vector<ExpertPlace> HottestExperts(const RoutingStats& stats, size_t count);

// Experts of all layers that no token chose, in order.
std::vector<ExpertPlace> IdleExperts(const RoutingStats& stats);

// "0, 3, 7 and 12 more": at most `shown` of the numbers.
std::string ListOf(const std::vector<size_t>& numbers, size_t shown);

// A page of HTML that needs nothing but itself: a heat map (layers down, experts across) with a
// legend, the figures of every layer, light and dark.
std::string RoutingPage(const RoutingStats& stats);

}  // namespace switchyard::cli
