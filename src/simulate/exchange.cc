#include "switchyard/simulate/exchange.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

namespace switchyard::simulate {
namespace {

double Sum(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Time of `bytes` at a rate in GB/s.
double TransferUs(double bytes, double gbytes_per_s) { return bytes / gbytes_per_s * 1e-3; }

// All-to-all of two 4-byte counts per pair in ceil(log2 n) rounds (Bruck), each of which sends half
// of them.
double CountsUs(size_t num_ranks, const LinkProfile& link) {
  const double rounds = static_cast<double>(std::bit_width(num_ranks - 1));
  return rounds * (link.o_us + link.latency_us) +
         TransferUs(2 * static_cast<double>(num_ranks) * rounds, link.nic_gbytes_per_s);
}

// What one rank exchanges off its node, in rows and messages; the largest over the ranks.
struct Load {
  double messages = 0;
  double nic_rows = 0;       // through the busiest card, busier direction
  double mean_off_node = 0;  // rows that a rank sends off its node
};

// Rows per token that each rank (flat, slots) or node (hierarchical) gets.
//
// Every rank sends targets[g] rows a token to group g, unless that is, or is on, its own node.
// Groups are ranks or nodes; a row to a node goes to one rank there.
Load LoadOffNode(const Reach& reach, std::span<const double> targets, const LinkProfile& link,
                 size_t tokens) {
  const double t = static_cast<double>(tokens), p = static_cast<double>(reach.ranks_per_node);
  const size_t num_nodes = reach.num_nodes(), per_node = targets.size() / num_nodes;
  // A rank of another node gets the whole of a flat target's rows, and 1 / p of a node's.
  const double senders = static_cast<double>(reach.num_ranks()) - p;
  const bool shared_card = link.nic_per == NicOwner::kNode;
  const double receivers = static_cast<double>(per_node);  // ranks of a node among its targets
  const auto chance_of_message = [&](double rows_per_token) {
    return 1 - std::pow(1 - std::min(rows_per_token, 1.0), t);
  };
  const double all_rows = Sum(targets);
  double all_messages = 0;
  for (const double target : targets) all_messages += chance_of_message(target);
  Load load;
  for (size_t node = 0; node < num_nodes; ++node) {
    const auto own = targets.subspan(node * per_node, per_node);
    double own_messages = 0;
    for (const double target : own) own_messages += chance_of_message(target);
    const double sent = t * std::max(0.0, all_rows - Sum(own));  // by one rank
    const double busiest = *std::max_element(own.begin(), own.end());
    const double received = senders * t * (shared_card ? Sum(own) : busiest * receivers / p);
    load.messages = std::max(load.messages, all_messages - own_messages);
    load.nic_rows = std::max({load.nic_rows, sent * (shared_card ? p : 1), received});
    load.mean_off_node += sent / static_cast<double>(num_nodes);
  }
  return load;
}

}  // namespace

std::string_view SchemeName(ExchangeScheme scheme) {
  switch (scheme) {
    case ExchangeScheme::kFlat: return "flat";
    case ExchangeScheme::kHierarchical: return "hierarchical";
    case ExchangeScheme::kSlots: break;
  }
  return "slots";
}

ExchangeCost PredictExchange(const Reach& reach, const LinkProfile& link,
                             const ExchangeRequest& request) {
  ExchangeCost cost;
  const size_t num_ranks = reach.num_ranks(), num_nodes = reach.num_nodes();
  if (num_ranks == 1) return cost;
  const bool is_slots = request.scheme == ExchangeScheme::kSlots;
  const bool is_hierarchical = request.scheme == ExchangeScheme::kHierarchical;
  const std::span<const double> targets = is_slots          ? reach.rows
                                          : is_hierarchical ? reach.node
                                                            : reach.rank;
  const std::span<const double> arriving = is_slots ? reach.rows : reach.rank;
  const Load load = LoadOffNode(reach, targets, link, request.tokens);
  const double n = static_cast<double>(num_ranks), t = static_cast<double>(request.tokens);
  // Slots announce themselves to everyone, rows or not.
  const double messages = is_slots ? n - static_cast<double>(reach.ranks_per_node) : load.messages;

  const size_t counted = is_hierarchical ? num_nodes : num_ranks;
  if (request.exchanges_counts && !is_slots && counted > 1)
    cost.counts_us = CountsUs(counted, link);
  if (num_nodes > 1) cost.latency_us = link.latency_us;
  cost.busiest_nic_bytes = load.nic_rows * request.row_bytes;
  cost.network_us = std::max(messages * std::max(link.o_us, link.gap_us),
                             TransferUs(cost.busiest_nic_bytes, link.nic_gbytes_per_s));
  const double most_rows = *std::max_element(arriving.begin(), arriving.end());
  cost.memory_us = TransferUs(n * t * most_rows * request.row_bytes, link.memory_gbytes_per_s);
  cost.fixed_us = request.fixed_us;
  // A rank's tokens reach it as they reach any other: 1 / N of all rows stays.
  cost.off_rank_bytes = t * Sum(arriving) * (1 - 1 / n) * request.row_bytes;
  cost.off_node_bytes = load.mean_off_node * request.row_bytes;
  return cost;
}

std::string_view WireTypeName(WireType type) {
  switch (type) {
    case WireType::kBf16: return "bf16";
    case WireType::kFp8: return "fp8";
    case WireType::kInt8: break;
  }
  return "int8";
}

namespace {

size_t Align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t PayloadBytes(size_t hidden, WireType type) {
  switch (type) {
    case WireType::kBf16: return 2 * hidden;
    case WireType::kFp8: return hidden + 4 * ((hidden + 127) / 128);
    case WireType::kInt8: break;
  }
  return hidden + 4;
}

}  // namespace

size_t DispatchRowBytes(size_t hidden, size_t top_k, WireType type) {
  return Align64(4 + 6 * top_k) + Align64(PayloadBytes(hidden, type));
}

size_t CombineRowBytes(size_t hidden) { return Align64(2 * hidden); }

}  // namespace switchyard::simulate
