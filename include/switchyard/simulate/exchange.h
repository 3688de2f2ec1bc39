// Time and traffic of one dispatch or combine: a formula of the LogGP kind.
#pragma once

#include <cstddef>
#include <string_view>

#include "switchyard/simulate/link.h"
#include "switchyard/simulate/routing.h"

namespace switchyard::simulate {

// How rows travel.
enum class ExchangeScheme {
  kFlat,          // all-to-all among all ranks; a token goes once to every rank that it needs
  kHierarchical,  // once to every node, there to the rank of the same place, then inside the node
  kSlots,         // low latency: fixed slots, one row per chosen expert, no counts
};

// "flat", "hierarchical", "slots".
std::string_view SchemeName(ExchangeScheme scheme);

// One exchange among all ranks.
struct ExchangeRequest {
  ExchangeScheme scheme = ExchangeScheme::kFlat;
  size_t tokens = 0;             // of each rank
  double row_bytes = 0;          // on the wire
  bool exchanges_counts = true;  // a combine knows them from its dispatch
  double fixed_us = 0;           // added once
};

// What it costs, and what it moves. A combine's directions are those of its dispatch turned round,
// which changes none of these figures.
struct ExchangeCost {
  double counts_us = 0;   // all-to-all of the counts
  double latency_us = 0;  // first row, between nodes
  double network_us = 0;  // posting messages, or the busiest card, whichever takes longer
  double memory_us = 0;   // rows into the busiest rank's memory
  double fixed_us = 0;

  // Traffic of the dispatch; a combine sends the other way. Means are over all ranks.
  double off_rank_bytes = 0;     // that a rank sends to others, those of its node included
  double off_node_bytes = 0;     // of these, between nodes
  double busiest_nic_bytes = 0;  // in the busier direction of the busiest card

  double total_us() const { return counts_us + latency_us + network_us + memory_us + fixed_us; }
};

// 0 of everything on one rank. Rows that stay on their rank cost memory time, as in the formula.
// Source: docs/simulation.md.
ExchangeCost PredictExchange(const Reach& reach, const LinkProfile& link,
                             const ExchangeRequest& request);

// Bytes of a row that carries `hidden` values in one of the wire types.
enum class WireType { kBf16, kFp8, kInt8 };

// "bf16", "fp8", "int8".
std::string_view WireTypeName(WireType type);

// A dispatched row: 64-byte aligned header (token, top_k times expert and weight), then the values
// and their scales, aligned likewise. fp8 has a scale for 128 values, int8 one for the row.
size_t DispatchRowBytes(size_t hidden, size_t top_k, WireType type);
// A combined row: bf16 values.
size_t CombineRowBytes(size_t hidden);

}  // namespace switchyard::simulate
