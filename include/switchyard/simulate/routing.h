// Which experts tokens choose, on which ranks these live, and so how evenly ranks are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::simulate {

// The share of the tokens that choose each expert, the same for the tokens of every rank.
//
// Shapes: layers[i] [E], each in [0, 1], their sum at most top_k. A model of more layers goes
//   through them again from the first.
struct ExpertShares {
  std::string description;  // "uniform", "zipf, exponent 1, seed 0", "routing.json"
  std::vector<std::vector<double>> layers;
};

// Every expert is chosen by k of E tokens.
// Errors (all three): kInvalidArgument if top_k is not 1 to num_experts.
ExpertShares UniformShares(size_t num_experts, size_t top_k);

// The i-th most wanted expert is chosen in proportion to 1 / i^exponent, but by no more than all
// tokens; which expert that is, is drawn anew for every layer. Deterministic.
// Errors: kInvalidArgument if exponent is not 0 to 8.
ExpertShares ZipfShares(size_t num_experts, size_t top_k, size_t num_layers, double exponent,
                        uint64_t seed);

// What `switchyard inspect --routing --json` wrote.
// Errors: kCorruptData naming file, field and layer; kInvalidArgument if the file is of a model
//   with other experts.
ExpertShares ReadShares(const std::string& file_name, std::string_view text, size_t num_experts,
                        size_t top_k);

// Where one layer's experts are: without `redundant` in the order of their ids, with it (0 too) as
// PlanExperts (moe/eplb) places them and the replicas for this very load, which replicas share
// evenly.
// Shapes: experts [E]; returns [E + redundant], the share of the tokens that come to each physical
//   expert, in the order of the ranks, all of which hold equally many.
// Errors: kInvalidArgument if the physical experts do not divide by the ranks; names a number of
//   redundant experts that would do.
std::vector<double> PlaceExperts(std::span<const double> experts, size_t num_ranks,
                                 std::optional<size_t> redundant);

// The least number of redundant experts, `at_least` or more, with which they divide by the ranks.
size_t FittingRedundancy(size_t num_experts, size_t num_ranks, size_t at_least);

// How likely a token is to go where, in one layer.
//
// Shapes: N ranks, N / ranks_per_node nodes.
struct Reach {
  size_t ranks_per_node = 1;
  std::vector<double> rank;  // [N] at least one of its experts is on the rank
  std::vector<double> node;  // [nodes] likewise
  std::vector<double> rows;  // [N] how many of its experts are on the rank, on average

  size_t num_ranks() const { return rank.size(); }
  size_t num_nodes() const { return node.size(); }
};

// Exact for equal shares, and for groups of one expert; see docs/simulation.md for the others.
// Shapes: shares [physical experts], as PlaceExperts gives them.
// Errors: kInvalidArgument if shares do not divide by ranks, ranks by nodes, or top_k is not 1 to
//   the number of slots.
Reach ComputeReach(std::span<const double> shares, size_t num_ranks, size_t num_nodes,
                   size_t top_k);

// Ranks (or other equal groups) that a token reaches on average if it chooses k of E experts
// uniformly: x (1 - C(E - E/x, k) / C(E, k)).
// Errors: kInvalidArgument if E is not a multiple of x, or k is not 1 to E.
double DistinctGroups(size_t groups, size_t num_experts, size_t top_k);

// Largest over mean; 1 = all alike, also if all are 0.
double MaxOverMean(std::span<const double> loads);

}  // namespace switchyard::simulate
