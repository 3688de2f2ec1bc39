#include "switchyard/simulate/link.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "model/config_reader.h"
#include "switchyard/core/error.h"

namespace switchyard::simulate {
namespace {

constexpr double kMaxUs = 1e6;
constexpr double kMinRate = 1e-3, kMaxRate = 1e9;

constexpr LinkField kFields[] = {
    {"o_us", &LinkProfile::o_us, 0, kMaxUs, "CPU time to post one message"},
    {"latency_us", &LinkProfile::latency_us, 0, kMaxUs, "one way between nodes"},
    {"gap_us", &LinkProfile::gap_us, 0, kMaxUs, "between two messages of a rank"},
    {"nic_gbytes_per_s", &LinkProfile::nic_gbytes_per_s, kMinRate, kMaxRate,
     "a network card, each direction"},
    {"memory_gbytes_per_s", &LinkProfile::memory_gbytes_per_s, kMinRate, kMaxRate,
     "rows brought into a rank's memory"},
    {"compute_gflop_per_s", &LinkProfile::compute_gflop_per_s, kMinRate, kMaxRate,
     "matrix products of a rank"},
    {"read_gbytes_per_s", &LinkProfile::read_gbytes_per_s, kMinRate, kMaxRate,
     "a rank reading weights"},
    {"dispatch_fixed_us", &LinkProfile::dispatch_fixed_us, 0, kMaxUs, "added to each dispatch"},
    {"combine_fixed_us", &LinkProfile::combine_fixed_us, 0, kMaxUs, "added to each combine"},
};

NicOwner ReadNicOwner(ConfigReader& file, NicOwner fallback) {
  const std::string text = file.Text("nic_per", NicOwnerName(fallback));
  for (const NicOwner owner : {NicOwner::kNode, NicOwner::kRank}) {
    if (text == NicOwnerName(owner)) return owner;
  }
  throw Error(ErrorCode::kCorruptData,
              fmt::format("{}: \"nic_per\": expected \"node\" or \"rank\", found {}",
                          file.file_name(), QuoteForMessage(text)));
}

// Refuses names that no field has: a misspelt one would leave its default in force.
void RefuseUnknownFields(const ConfigReader& file) {
  std::vector<std::string_view> known = {"name", "nic_per"};
  for (const LinkField& field : kFields) known.push_back(field.name);
  std::vector<std::string> unknown;
  for (const std::string& name : file.Names()) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      unknown.push_back(QuoteForMessage(name));
  }
  if (unknown.empty()) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: a link file has no {}; its fields are: {}", file.file_name(),
                          fmt::join(unknown, ", "), fmt::join(known, ", ")));
}

}  // namespace

std::span<const LinkField> LinkFields() { return kFields; }

std::string_view NicOwnerName(NicOwner owner) { return owner == NicOwner::kNode ? "node" : "rank"; }

LinkProfile DefaultLink() { return {}; }

LinkProfile ReadLink(const std::string& file_name, std::string_view text) {
  ConfigReader file = ConfigReader::Parse(file_name, text);
  RefuseUnknownFields(file);
  LinkProfile link = DefaultLink();
  link.name = file.Text("name", file_name);
  link.nic_per = ReadNicOwner(file, link.nic_per);
  for (const LinkField& field : kFields) {
    double& value = link.*field.value;
    value = file.Number(field.name, field.min, field.max, value);
  }
  return link;
}

}  // namespace switchyard::simulate
