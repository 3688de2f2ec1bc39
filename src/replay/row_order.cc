#include "replay/row_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace switchyard::replay {
namespace {

constexpr std::string_view kRouteToRow = "out.route_to_row";

struct FamilyNames {
  std::string_view order;     // the text of a check begins so
  std::string_view segments;  // the tensor that gives the segments
  bool are_offsets;           // it holds [begin, ..., end], not the lengths
  std::vector<std::string> keys;
};

const FamilyNames& NamesOf(RowFamily family) {
  static const FamilyNames kNames[] = {
      {"rows of one receiving rank in any order",
       "out.recv_offsets",
       true,
       {"out.recv_src_rank", "out.recv_src_token"}},
      {"rows of one (rank, local expert) segment in any order",
       "out.masked_m",
       false,
       {"out.packed_src_rank", "out.packed_src_token"}},
      {"rows of one expert in any order", "out.counts", false, {"out.sorted_route"}},
  };
  return kNames[static_cast<size_t>(family)];
}

// Computed tensors by name, or the expected ones of the file.
class Source {
 public:
  Source(const CaseFile& file, const Outputs& outputs) : file_(file), outputs_(outputs) {}

  std::optional<std::vector<double>> Find(const std::string& tensor) const {
    if (outputs_.empty()) return file_.Values(tensor);
    const auto found = outputs_.find(tensor);
    if (found == outputs_.end()) return std::nullopt;
    return found->second.values;
  }

 private:
  const CaseFile& file_;
  const Outputs& outputs_;
};

// Begin of each segment and the end of the last; empty if they are no partition of [0, num_rows).
std::vector<size_t> SegmentOffsets(const std::vector<double>& values, bool are_offsets,
                                   size_t num_rows) {
  std::vector<size_t> offsets;
  if (!are_offsets) offsets.push_back(0);
  for (double value : values) {
    const double end = are_offsets ? value : static_cast<double>(offsets.back()) + value;
    const double least = offsets.empty() ? 0 : static_cast<double>(offsets.back());
    if (!(end >= least && end <= static_cast<double>(num_rows))) return {};
    offsets.push_back(static_cast<size_t>(end));
  }
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != num_rows) return {};
  return offsets;
}

// Whether equal values stand together in values[order[begin, end)] as the rows were delivered.
bool AreTogether(const std::vector<double>& values, size_t begin, size_t end) {
  std::set<double> seen;
  for (size_t i = begin; i < end; ++i) {
    if ((i == begin || values[i] != values[i - 1]) && !seen.insert(values[i]).second) return false;
  }
  return true;
}

// values[i] = old values[order[i]], for rows.
void PermuteRows(const std::vector<size_t>& order, std::vector<double>& values) {
  const size_t width = order.empty() ? 0 : values.size() / order.size();
  const std::vector<double> old = values;
  for (size_t row = 0; row < order.size(); ++row) {
    std::copy_n(old.begin() + static_cast<std::ptrdiff_t>(order[row] * width), width,
                values.begin() + static_cast<std::ptrdiff_t>(row * width));
  }
}

// Each row number becomes the new number of that row; -1 stays. False if there is no such row.
bool RenumberRows(const std::vector<size_t>& order, std::vector<double>& values) {
  std::vector<double> new_row(order.size());
  for (size_t row = 0; row < order.size(); ++row) new_row[order[row]] = static_cast<double>(row);
  for (double& value : values) {
    if (value == -1) continue;
    if (!(value >= 0 && value < static_cast<double>(order.size()))) return false;
    value = new_row[static_cast<size_t>(value)];
  }
  return true;
}

std::string TryPutInOrder(RowFamily family, const Source& source, const std::string& tensor,
                          std::vector<double>& values) {
  const FamilyNames& names = NamesOf(family);
  std::vector<std::vector<double>> keys;
  for (const std::string& name : names.keys) {
    auto key = source.Find(name);
    if (!key) return name + " was not computed";
    if (!keys.empty() && key->size() != keys[0].size()) return "the keys differ in length";
    keys.push_back(*std::move(key));
  }
  const size_t num_rows = keys[0].size();
  const auto lengths = source.Find(std::string(names.segments));
  if (!lengths) return fmt::format("{} was not computed", names.segments);
  const std::vector<size_t> offsets = SegmentOffsets(*lengths, names.are_offsets, num_rows);
  if (offsets.empty())
    return fmt::format("{} does not add up to {} rows", names.segments, num_rows);

  std::vector<size_t> order(num_rows);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    if (family == RowFamily::kPacked && !AreTogether(keys[0], offsets[s], offsets[s + 1])) {
      return fmt::format("rows of one source rank are not together in segment {}", s);
    }
    std::sort(order.begin() + static_cast<std::ptrdiff_t>(offsets[s]),
              order.begin() + static_cast<std::ptrdiff_t>(offsets[s + 1]), [&](size_t a, size_t b) {
                for (const auto& key : keys) {
                  if (key[a] != key[b]) return key[a] < key[b];
                }
                return a < b;
              });
  }
  if (tensor == kRouteToRow) {
    return RenumberRows(order, values) ? "" : "names a row that is not there";
  }
  if (num_rows == 0 ? !values.empty() : values.size() % num_rows != 0) {
    return fmt::format("has {} elements for {} rows", values.size(), num_rows);
  }
  PermuteRows(order, values);
  return "";
}

}  // namespace

std::optional<RowFamily> FamilyOf(std::string_view order) {
  for (RowFamily family : {RowFamily::kReceived, RowFamily::kPacked, RowFamily::kSorted}) {
    if (order.starts_with(NamesOf(family).order)) return family;
  }
  return std::nullopt;
}

std::string PutInOrder(RowFamily family, const CaseFile& file, const Outputs& outputs,
                       const std::string& tensor, std::vector<double>& values) {
  std::string fault = TryPutInOrder(family, Source(file, outputs), tensor, values);
  if (!fault.empty() && outputs.empty()) {
    file.Corrupt(fmt::format("tensor {} cannot be ordered: {}", tensor, fault));
  }
  return fault;
}

}  // namespace switchyard::replay
