// The figures of a cluster that a simulation computes with.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace switchyard::simulate {

// Who owns a network card.
enum class NicOwner { kNode, kRank };

// What one rank, its node and the network between nodes can do; a link file in memory. The values
// here are those of DefaultLink().
struct LinkProfile {
  std::string name = "built-in";
  double o_us = 0.4;                   // time of the CPU to post one message
  double latency_us = 1.2;             // one way, between nodes
  double gap_us = 0.2;                 // between two messages of one rank
  double nic_gbytes_per_s = 25;        // of one card, each direction
  NicOwner nic_per = NicOwner::kNode;  // the card is shared by the node's ranks, or each has one
  double memory_gbytes_per_s = 13;     // rows brought into one rank's memory, all ranks at once
  double compute_gflop_per_s = 300;    // matrix products of one rank
  double read_gbytes_per_s = 48;       // one rank reading weights
  double dispatch_fixed_us = 0;        // added to each dispatch
  double combine_fixed_us = 0;         // added to each combine
};

// One number of a link file.
struct LinkField {
  std::string_view name;  // as in the file, with its unit
  double LinkProfile::*value;
  double min, max;
  std::string_view meaning;
};

// All of them, in the order in which people should read them.
std::span<const LinkField> LinkFields();

// "node" or "rank", as a link file has it.
std::string_view NicOwnerName(NicOwner owner);

// A 200 Gb/s card per node between hosts that wait for messages by polling, and ranks of two Zen 4
// cores: assumptions, to be replaced by measurements of the real cluster (docs/simulation.md).
LinkProfile DefaultLink();

// A link file: one JSON object of LinkFields(), "name" and "nic_per" ("node" or "rank"). What the
// file does not have is as in DefaultLink().
// Errors: kCorruptData naming file, field, expected range and value found; kUnsupported naming the
//   file and every field that there is not.
LinkProfile ReadLink(const std::string& file_name, std::string_view text);

}  // namespace switchyard::simulate
