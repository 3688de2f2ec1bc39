#include "replay/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "model/config_reader.h"
#include "replay/row_order.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One entry of "checks" of a case.
class Check {
 public:
  Check(const CaseFile& file, const nlohmann::json& json) : file_(file), json_(json) {
    if (!json.is_object()) file.Corrupt("an entry of \"checks\" is not a JSON object");
    tensor_ = Text("tensor");
    mode_ = Text("mode");
  }

  const CaseFile& file() const { return file_; }
  const std::string& tensor() const { return tensor_; }
  const std::string& mode() const { return mode_; }
  bool Has(const char* key) const { return json_.contains(key); }

  std::string Text(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || !found->is_string()) Corrupt(key, "a text");
    return found->get<std::string>();
  }
  double Number(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || !found->is_number()) Corrupt(key, "a number");
    return found->get<double>();
  }
  // `key`, or with lowp and if it is there, the variant for bf16.
  double Tolerance(const std::string& key, bool lowp) const {
    const std::string low = key + "_lowp";
    return Number((lowp && Has(low.c_str()) ? low : key).c_str());
  }

  [[noreturn]] void Unknown(const char* key) const {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: the check of {} has the {} {}, which is not known here", file_.name(),
                    QuoteForMessage(tensor_), key, QuoteForMessage(Text(key))));
  }

 private:
  [[noreturn]] void Corrupt(const char* key, std::string_view expected) const {
    file_.Corrupt(fmt::format("the check of {} needs \"{}\": {}",
                              tensor_.empty() ? "a tensor" : QuoteForMessage(tensor_), key,
                              expected));
  }

  const CaseFile& file_;
  const nlohmann::json& json_;
  std::string tensor_;
  std::string mode_;
};

// An error and what is allowed, in one measure.
struct Measure {
  double error = 0;
  double tolerance = 0;

  bool Fits() const { return error <= tolerance; }
  // How near to failing; above 1 is a failure.
  double Ratio() const {
    if (error == 0) return 0;
    return tolerance > 0 ? error / tolerance : kInfinity;
  }
};

CheckResult Judge(const Check& check, const Measure& measure, std::string detail) {
  CheckResult result{check.tensor(), measure.Fits(), measure.error, measure.tolerance, ""};
  if (!result.passed) result.detail = std::move(detail);
  return result;
}

CheckResult Refuse(const Check& check, std::string detail) {
  return {check.tensor(), false, kInfinity, 0, std::move(detail)};
}

// |a - b|; equal infinities and two NaNs are equal, one NaN is infinitely far.
double Distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double distance = std::abs(a - b);
  return std::isnan(distance) ? kInfinity : distance;
}

// "[3, 17]": the place of an element in its tensor.
std::string Place(const Shape& shape, size_t index) {
  std::vector<size_t> place(shape.rank());
  for (size_t axis = shape.rank(); axis-- > 0;) {
    place[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return fmt::format("[{}]", fmt::join(place, ", "));
}

std::string ElementDetail(const Computed& a, std::span<const double> b, size_t i) {
  return fmt::format("element {} is {}, expected {}", Place(a.shape, i), a.values[i], b[i]);
}

// What modes have in common: the computed tensor `a`, the expected one `b`, of one shape.
struct Pair {
  const Check& check;
  const Computed& a;
  const std::vector<double>& b;
  const Outputs& outputs;
  bool lowp;
};

// The length of a row of the last axis, 1 at least.
size_t RowLength(const Shape& shape) {
  return shape.rank() == 0 ? 1 : std::max<size_t>(shape[shape.rank() - 1], 1);
}

CheckResult Equal(const Check& check, const Computed& a, std::span<const double> b) {
  Measure worst;
  size_t num_different = 0, first = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double distance = Distance(a.values[i], b[i]);
    if (distance > 0 && num_different++ == 0) first = i;
    worst.error = std::max(worst.error, distance);
  }
  if (num_different == 0) return Judge(check, worst, "");
  return Judge(check, worst,
               fmt::format("{} of {} elements differ: {}", num_different, b.size(),
                           ElementDetail(a, b, first)));
}

// Sorts each run of `length` values.
void SortRuns(std::vector<double>& values, size_t length) {
  for (size_t begin = 0; begin + length <= values.size(); begin += length) {
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
    std::sort(first, first + static_cast<std::ptrdiff_t>(length));
  }
}

// Equal after the freedom that "relaxed" grants.
CheckResult EqualRelaxed(const Pair& pair) {
  const std::string text = pair.check.Text("relaxed");
  size_t run = RowLength(pair.a.shape);
  if (text.starts_with("same multiset of logical experts per GPU")) {
    const size_t num_gpus = pair.check.file().Size("num_gpus");
    if (num_gpus == 0 || run % num_gpus != 0) {
      pair.check.file().Corrupt(
          fmt::format("{} physical experts are not divisible by num_gpus {}", run, num_gpus));
    }
    run /= num_gpus;
  } else if (!text.starts_with("same set per logical expert")) {
    pair.check.Unknown("relaxed");
  }
  Computed a = pair.a;
  std::vector<double> b = pair.b;
  SortRuns(a.values, run);
  SortRuns(b, run);
  return Equal(pair.check, a, b);
}

CheckResult CheckExact(const Pair& pair) {
  CheckResult result = Equal(pair.check, pair.a, pair.b);
  if (result.passed || !pair.check.Has("relaxed")) return result;
  return EqualRelaxed(pair);
}

CheckResult CheckClose(const Pair& pair) {
  const double atol = pair.check.Tolerance("atol", pair.lowp);
  const double rtol = pair.check.Tolerance("rtol", pair.lowp);
  Measure worst{0, atol};
  size_t where = 0;
  for (size_t i = 0; i < pair.b.size(); ++i) {
    const Measure here{Distance(pair.a.values[i], pair.b[i]), atol + rtol * std::abs(pair.b[i])};
    if (here.Ratio() > worst.Ratio()) worst = here, where = i;
  }
  return Judge(pair.check, worst, pair.b.empty() ? "" : ElementDetail(pair.a, pair.b, where));
}

// Both norms of a - b and of b.
struct Norms {
  double l2 = 0, max = 0, b_l2 = 0, b_max = 0;
};

Norms NormsOf(std::span<const double> a, std::span<const double> b) {
  Norms norms;
  for (size_t i = 0; i < b.size(); ++i) {
    const double distance = Distance(a[i], b[i]);
    norms.l2 += distance * distance;
    norms.max = std::max(norms.max, distance);
    norms.b_l2 += b[i] * b[i];
    norms.b_max = std::max(norms.b_max, std::abs(b[i]));
  }
  norms.l2 = std::sqrt(norms.l2);
  norms.b_l2 = std::sqrt(norms.b_l2);
  return norms;
}

CheckResult CheckRel(const Pair& pair) {
  const Norms norms = NormsOf(pair.a.values, pair.b);
  if (norms.b_max == 0) {
    return Judge(pair.check, {norms.max, 0}, "the expected tensor is all zero");
  }
  const Measure l2{norms.l2 / norms.b_l2, pair.check.Tolerance("l2", pair.lowp)};
  const Measure max{norms.max / norms.b_max, pair.check.Tolerance("max", pair.lowp)};
  const bool is_l2 = l2.Ratio() >= max.Ratio();
  return Judge(
      pair.check, is_l2 ? l2 : max,
      fmt::format("relative to the expected tensor: l2 {:.3g} (at most {:.3g}), max {:.3g} "
                  "(at most {:.3g})",
                  l2.error, l2.tolerance, max.error, max.tolerance));
}

CheckResult CheckCloserThanPlain(const Pair& pair) {
  const std::string other = pair.check.Text("other");
  const std::vector<double> plain = pair.check.file().Values(other);
  if (plain.size() != pair.b.size()) {
    pair.check.file().Corrupt(fmt::format("tensors {} and {} differ in size",
                                          QuoteForMessage(other),
                                          QuoteForMessage(pair.check.tensor())));
  }
  for (double value : plain) {
    if (!std::isfinite(value))
      pair.check.file().Corrupt(
          fmt::format("tensor {} holds a value that is not finite", QuoteForMessage(other)));
  }
  const Measure measure{NormsOf(pair.a.values, pair.b).l2, NormsOf(pair.a.values, plain).l2};
  return Judge(pair.check, measure,
               fmt::format("nearer to {} than to {}", other, pair.check.tensor()));
}

// Codes in the order of their values: the bytes of e4m3 are sign and magnitude.
double CodeRank(double code, DType dtype) {
  if (dtype != DType::kF8E4M3) return code;
  return code >= 128 ? 128 - code : code;
}

CheckResult CheckCodes(const Pair& pair) {
  const DType dtype = pair.check.file().View(pair.check.tensor()).dtype;
  const double max_step = pair.check.Number("max_step");
  size_t num_different = 0, worst = 0;
  double largest = 0;
  for (size_t i = 0; i < pair.b.size(); ++i) {
    if (pair.a.values[i] == pair.b[i]) continue;
    ++num_different;
    const double step = Distance(CodeRank(pair.a.values[i], dtype), CodeRank(pair.b[i], dtype));
    if (step > largest) largest = step, worst = i;
  }
  if (num_different > 0 && largest > max_step) {
    return Judge(pair.check, {largest, max_step},
                 fmt::format("code {}", ElementDetail(pair.a, pair.b, worst)));
  }
  const double count = std::max<double>(1, static_cast<double>(pair.b.size()));
  return Judge(pair.check, {static_cast<double>(num_different) / count, pair.check.Number("frac")},
               fmt::format("{} of {} codes differ", num_different, pair.b.size()));
}

// Ids and weights of routed rows.
struct Routed {
  const std::vector<double>& ids;
  const std::vector<double>& weights;
  size_t top_k;

  // The pairs of a row, sorted; the weight of a skipped slot is 0.
  std::vector<std::pair<double, double>> Row(size_t row) const {
    std::vector<std::pair<double, double>> pairs;
    for (size_t i = row * top_k; i < (row + 1) * top_k; ++i) {
      pairs.emplace_back(ids[i], ids[i] < 0 ? 0.0 : weights[i]);
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
  }
};

using Columns = std::vector<std::pair<double, double>>;

std::vector<double> IdsOf(const Columns& columns) {
  std::vector<double> ids;
  for (const auto& column : columns) ids.push_back(column.first);
  return ids;
}

std::string RowDetail(size_t row, const Columns& a, const Columns& b) {
  return fmt::format("row {} is {}, expected {}", row, a, b);
}

// Compares the weights of two rows whose columns belong together.
void WorstWeight(const Check& check, const Columns& a, const Columns& b, Measure& worst) {
  const double atol = check.Number("atol"), rtol = check.Number("rtol");
  for (size_t k = 0; k < b.size(); ++k) {
    const Measure here{Distance(a[k].second, b[k].second), atol + rtol * std::abs(b[k].second)};
    if (here.Ratio() > worst.Ratio()) worst = here;
  }
}

// Whether the ids of a row are distinct and those of an expert.
bool IsChoice(const Columns& row, double num_experts) {
  for (size_t k = 0; k < row.size(); ++k) {
    if (row[k].first < 0 || row[k].first >= num_experts) return false;
    if (k > 0 && row[k].first == row[k - 1].first) return false;
  }
  return true;
}

// The rows by weight, for ties: which expert is named is left open.
Columns ByWeight(Columns row) {
  std::sort(row.begin(), row.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  return row;
}

double NumRoutableExperts(const CaseFile& file) {
  return static_cast<double>(file.SizeOr("num_physical_experts", file.Size("num_experts")) +
                             file.SizeOr("num_fused_shared_experts", 0) *
                                 std::max<size_t>(1, file.SizeOr("moe_ep_size", 1)));
}

CheckResult CheckRouting(const Pair& pair) {
  const Check& check = pair.check;
  const std::string weights = check.Text("weights");
  const auto computed = pair.outputs.find(weights);
  if (computed == pair.outputs.end()) return Refuse(check, weights + " was not computed");
  const std::vector<double> expected = check.file().Values(weights);
  if (expected.size() != pair.b.size()) {
    check.file().Corrupt(fmt::format("tensors {} and {} differ in size", QuoteForMessage(weights),
                                     QuoteForMessage(check.tensor())));
  }
  if (computed->second.values.size() != pair.b.size()) {
    return Refuse(check, weights + " differs in size from the ids");
  }
  const size_t top_k = RowLength(pair.a.shape);
  const Routed a{pair.a.values, computed->second.values, top_k}, b{pair.b, expected, top_k};
  const bool is_tie = check.mode() == "routing_tie";
  const double num_experts = is_tie ? NumRoutableExperts(check.file()) : 0;
  Measure worst{0, check.Number("atol")};
  std::string detail;
  for (size_t row = 0; row < pair.b.size() / top_k; ++row) {
    Columns ours = a.Row(row), theirs = b.Row(row);
    if (is_tie ? !IsChoice(ours, num_experts) : IdsOf(ours) != IdsOf(theirs)) {
      return Refuse(check, RowDetail(row, ours, theirs));
    }
    if (is_tie) ours = ByWeight(std::move(ours)), theirs = ByWeight(std::move(theirs));
    const double before = worst.Ratio();
    WorstWeight(check, ours, theirs, worst);
    if (worst.Ratio() > before) detail = RowDetail(row, ours, theirs);
  }
  return Judge(check, worst, std::move(detail));
}

// The physical ids of one logical expert as seen by the ranks. `maps` is logical_to_physical.
class Replicas {
 public:
  Replicas(const std::vector<double>& maps, size_t width, size_t per_gpu)
      : maps_(maps), width_(width), per_gpu_(static_cast<double>(per_gpu)) {}

  // Of expert number `row` over all layers.
  std::vector<double> Of(size_t row) const {
    std::vector<double> replicas;
    for (size_t x = row * width_; x < (row + 1) * width_; ++x) {
      if (maps_[x] >= 0) replicas.push_back(maps_[x]);
    }
    return replicas;
  }
  bool IsOn(double physical, size_t gpu) const {
    return std::floor(physical / per_gpu_) == static_cast<double>(gpu);
  }

 private:
  const std::vector<double>& maps_;
  size_t width_;
  double per_gpu_;
};

// What is wrong with the choices of all ranks for one expert; empty if nothing is.
std::string DispatchFault(const std::vector<double>& choices, const std::vector<double>& replicas,
                          const Replicas& all) {
  std::vector<size_t> taken(replicas.size());
  for (size_t gpu = 0; gpu < choices.size(); ++gpu) {
    const auto found = std::find(replicas.begin(), replicas.end(), choices[gpu]);
    if (found == replicas.end()) {
      return fmt::format("rank {} sends to {}, which is no replica", gpu, choices[gpu]);
    }
    const bool has_local = std::any_of(replicas.begin(), replicas.end(),
                                       [&](double replica) { return all.IsOn(replica, gpu); });
    if (has_local && !all.IsOn(choices[gpu], gpu)) {
      return fmt::format("rank {} sends to {} and has a replica itself", gpu, choices[gpu]);
    }
    if (!has_local) ++taken[static_cast<size_t>(found - replicas.begin())];
  }
  const auto [least, most] = std::minmax_element(taken.begin(), taken.end());
  if (*most > *least + 1) {
    return fmt::format("one replica serves {} ranks without their own and another {}", *most,
                       *least);
  }
  return "";
}

CheckResult CheckRankDispatch(const Pair& pair) {
  const Check& check = pair.check;
  const CaseFile& file = check.file();
  const std::string maps_name = "out.logical_to_physical";
  const auto computed = pair.outputs.find(maps_name);
  const Shape shape =
      computed != pair.outputs.end() ? computed->second.shape : file.View(maps_name).shape;
  const std::vector<double> maps =
      computed != pair.outputs.end() ? computed->second.values : file.Values(maps_name);
  const size_t num_gpus = file.Size("num_gpus"), num_physical = file.Size("num_physical_experts");
  const Shape& s = pair.a.shape;
  if (num_gpus == 0 || num_physical < num_gpus || s.rank() != 3 || s[0] != num_gpus ||
      shape.rank() != 3 || shape[0] != s[1] || shape[1] != s[2]) {
    file.Corrupt(
        fmt::format("the shapes of {} and {} do not fit num_gpus", check.tensor(), maps_name));
  }
  const Replicas all(maps, shape[2], num_physical / num_gpus);
  const size_t num_rows = s[1] * s[2];
  Measure faults;
  std::string detail;
  for (size_t row = 0; row < num_rows; ++row) {
    std::vector<double> choices;
    for (size_t gpu = 0; gpu < num_gpus; ++gpu) {
      choices.push_back(pair.a.values[gpu * num_rows + row]);
    }
    const std::string fault = DispatchFault(choices, all.Of(row), all);
    if (fault.empty()) continue;
    faults.error += 1;
    detail = fmt::format("layer {}, expert {}: {}", row / s[2], row % s[2], fault);
  }
  return Judge(check, faults, std::move(detail));
}

struct Mode {
  std::string_view name;
  CheckResult (*compare)(const Pair& pair);
};

constexpr Mode kModes[] = {
    {"exact", CheckExact},
    {"close", CheckClose},
    {"rel", CheckRel},
    {"routing", CheckRouting},
    {"routing_tie", CheckRouting},
    {"codes", CheckCodes},
    {"closer_than_plain", CheckCloserThanPlain},
    {"rank_dispatch", CheckRankDispatch},
};

const Mode& FindMode(const Check& check) {
  for (const Mode& mode : kModes) {
    if (mode.name == check.mode()) return mode;
  }
  check.Unknown("mode");
}

// Whether the check holds for one way of computing only.
bool IsConditional(const Check& check) {
  if (check.mode() == "closer_than_plain") return true;
  if (!check.Has("when")) return false;
  const std::string when = check.Text("when");
  if (when.starts_with("activations are not quantized") ||
      when.starts_with("activations are quantized")) {
    return true;
  }
  check.Unknown("when");
}

// The bytes of an fp8 tensor that is compared by codes; the values otherwise.
std::vector<double> ExpectedValues(const Check& check) {
  const TensorView view = check.file().View(check.tensor());
  if (check.mode() != "codes" || view.dtype != DType::kF8E4M3) {
    return check.file().Values(check.tensor());
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(view.data);
  return {bytes, bytes + view.NumElements()};
}

CheckResult RunCheck(const Check& check, const Computed& computed, const Outputs& outputs,
                     bool lowp) {
  const Mode& mode = FindMode(check);
  const TensorView view = check.file().View(check.tensor());
  if (!(computed.shape == view.shape) || computed.values.size() != view.NumElements()) {
    return Refuse(check, fmt::format("the shape is {}, expected {}", computed.shape.ToString(),
                                     view.shape.ToString()));
  }
  std::vector<double> expected = ExpectedValues(check);
  if (!check.Has("order")) return mode.compare({check, computed, expected, outputs, lowp});

  // Rows whose order is free are put into the same order on both sides.
  const std::optional<RowFamily> family = FamilyOf(check.Text("order"));
  if (!family) check.Unknown("order");
  Computed ours = computed;
  const std::string fault = PutInOrder(*family, check.file(), outputs, check.tensor(), ours.values);
  if (!fault.empty()) return Refuse(check, fault);
  PutInOrder(*family, check.file(), {}, check.tensor(), expected);
  return mode.compare({check, ours, expected, outputs, lowp});
}

}  // namespace

std::vector<CheckResult> RunChecks(const CaseFile& file, const Outputs& outputs, bool lowp) {
  std::vector<CheckResult> results;
  for (const nlohmann::json& json : file.checks()) {
    const Check check(file, json);
    const auto computed = outputs.find(check.tensor());
    if (computed != outputs.end()) {
      results.push_back(RunCheck(check, computed->second, outputs, lowp));
    } else if (!IsConditional(check)) {
      results.push_back(Refuse(check, "was not computed"));
    }
  }
  return results;
}

}  // namespace switchyard::replay
