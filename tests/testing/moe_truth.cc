#include "testing/moe_truth.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/decode/decode.h"
#include "quant/act_quant.h"
#include "testing/quant_formats.h"

namespace switchyard::testing {
namespace {

// The width of an interval that holds what f32 makes of a sum, relative to the size of its terms,
// and of a formula, relative to its value.
constexpr double kSumError = 0x1p-21;
constexpr double kFormulaError = 0x1p-20;

double Norm(std::span<const double> values) {
  double sum = 0;
  for (double value : values) sum += value * value;
  return std::sqrt(sum);
}

// Contract 8.3, "vs dense oracle", of one product's rows.
double DenseBoundOf(ActQuantKind kind) {
  switch (kind) {
    case ActQuantKind::kNone: return 0;
    case ActQuantKind::kInt8Token: return 1.5e-2;
    case ActQuantKind::kFp8Token:
    case ActQuantKind::kFp8Group:
    case ActQuantKind::kFp8Tensor:
    case ActQuantKind::kMxFp8: return 5e-2;
    case ActQuantKind::kInt8Static:  // what the given scale does not suit saturates
    case ActQuantKind::kFp8TensorStatic: return std::numeric_limits<double>::infinity();
    case ActQuantKind::kInt4Token:
    case ActQuantKind::kMxFp4: return 2e-1;
  }
  return 0;
}

void CheckOracle(moe::OracleKind kind, const moe::MoeQuantInfo& info,
                 const moe::MoeRunnerConfig& config, const MoeTokens& tokens,
                 const MoeRows& expected) {
  const moe::OracleRows found = moe::RunOracle(kind, info, config, tokens.Oracle());
  if (found.values.size() != expected.values.size())
    throw std::runtime_error("moe/oracle returns another number of rows");
  for (size_t i = 0; i < found.values.size(); ++i) {
    if (std::abs(found.values[i] - expected.values[i]) <= 1e-12 * expected.size[i]) continue;
    throw std::runtime_error(fmt::format(
        "moe/oracle ({}) and EvaluateMoe disagree with a13 {}, a2 {}: row {}, column {}: {} and {}",
        kind == moe::OracleKind::kDense ? "dense" : "faithful", ActQuantKindName(info.a13.kind),
        ActQuantKindName(info.a2.kind), i / expected.cols, i % expected.cols, found.values[i],
        expected.values[i]));
  }
}

}  // namespace

MoeTruth::MoeTruth(const MoeCase& layer, const moe::MoeQuantInfo& info,
                   const moe::MoeRunnerConfig& config, MoeTokens tokens)
    : layer_(layer),
      info_(info),
      config_(config),
      tokens_(std::move(tokens)),
      faithful_(EvaluateMoe(moe::OracleKind::kFaithful, layer, info, config, tokens_)),
      dense_(EvaluateMoe(moe::OracleKind::kDense, layer, info, config, tokens_)),
      row_quant_(info.a2) {
  CheckOracle(moe::OracleKind::kFaithful, info_, config_, tokens_, faithful_);
  CheckOracle(moe::OracleKind::kDense, info_, config_, tokens_, dense_);
  if (info_.a2.kind != ActQuantKind::kFp8Tensor) return;
  float amax = 1e-12f;
  for (const std::vector<double>& row : faithful_.hidden) {
    for (double value : row) amax = std::max(amax, std::abs(static_cast<float>(value)));
  }
  row_quant_.kind = ActQuantKind::kFp8TensorStatic;
  row_quant_.scale = amax / kE4M3Max;
}

size_t MoeTruth::num_requantised() const {
  if (info_.a2.kind == ActQuantKind::kNone) return 0;
  size_t count = 0;
  for (const std::vector<double>& row : faithful_.hidden) count += row.size();
  return count;
}

double MoeTruth::Bound() const {
  // Products of rows rounded to bf16, or a formula that rounds in between.
  if (config_.activation_dtype == DType::kBF16) return 4e-3 * 3;
  if (config_.formula.entry.name == "silu_rounded") return 4e-3;
  const bool quantised = info_.w1.format.is_quantized() || info_.w2.format.is_quantized();
  return quantised ? 1e-5 : 1e-6 * 3;
}

double MoeTruth::DenseBound() const {
  // The contract's numbers are close to what random rows give.
  return Bound() + 1.5 * std::max(DenseBoundOf(info_.a13.kind), DenseBoundOf(info_.a2.kind));
}

Verdict MoeTruth::Judge(const std::vector<float>& rows, bool dense) const {
  Verdict verdict;
  if (rows.size() != faithful_.values.size()) {
    verdict.why = fmt::format("{} values, expected {}", rows.size(), faithful_.values.size());
    return verdict;
  }
  const size_t cols = faithful_.cols;
  for (size_t t = 0; t < faithful_.rows; ++t) {
    std::vector<double> error(cols);
    for (size_t h = 0; h < cols; ++h)
      error[h] = std::abs(rows[t * cols + h] - faithful_.values[t * cols + h]);
    const double size = Norm(std::span(faithful_.size).subspan(t * cols, cols));
    const double distance = size == 0 ? Norm(error) : Norm(error) / size;
    if (distance <= Bound()) {
      verdict.distance = std::max(verdict.distance, distance);
      continue;
    }
    size_t codes = 0;
    const std::vector<double> slack = Slack(t, codes);
    for (size_t h = 0; h < cols; ++h) {
      if (error[h] <= Bound() * size + slack[h]) continue;
      verdict.why = fmt::format(
          "row {} is {:.2e} away from the faithful oracle, bound {:.2e}; column {}: {} "
          "instead of {}, of which {:.2e} by {} codes on a boundary",
          t, distance, Bound(), h, rows[t * cols + h], faithful_.values[t * cols + h], slack[h],
          codes);
      return verdict;
    }
    verdict.codes_on_boundary += codes;
  }
  verdict.ok = true;
  if (!dense || cols < 16) return verdict;  // codes of one value or two say little
  const ConstRows view(rows.data(), faithful_.rows, cols);
  // A few rows are no statistic: their bound is against the size of the terms.
  const bool few = faithful_.rows < 32;
  verdict.dense_distance = RelativeL2(view, dense_.values, few ? dense_.size : dense_.values);
  verdict.ok = verdict.dense_distance <= DenseBound() || Norm(dense_.values) == 0;
  if (!verdict.ok)
    verdict.why = fmt::format("{:.2e} away from the dense oracle, bound {:.2e}",
                              verdict.dense_distance, DenseBound());
  return verdict;
}

std::vector<double> MoeTruth::Slack(size_t row, size_t& codes) const {
  std::vector<double> slack(faithful_.cols);
  const size_t slots = config_.no_combine ? 1 : tokens_.top_k;
  for (size_t slot = row * slots; slot < (row + 1) * slots; ++slot) {
    if (tokens_.ids[slot] >= 0) AddSlotSlack(slot, slack, codes);
  }
  return slack;
}

std::vector<Interval> MoeTruth::Intervals(size_t slot) const {
  const MoeCase::Exact& expert = layer_.exact(static_cast<size_t>(tokens_.ids[slot]));
  const std::vector<double>& x = faithful_.x[slot / tokens_.top_k];
  const std::vector<double>& hidden = faithful_.hidden[slot];
  // A sum and the width of its interval.
  const auto product = [&](const std::vector<double>& w, const float* b, size_t stride, size_t i) {
    double sum = b == nullptr ? 0.0 : b[i * stride];
    double size = std::abs(sum);
    for (size_t h = 0; h < x.size() && !w.empty(); ++h) {
      sum += w[i * x.size() + h] * x[h];
      size += std::abs(w[i * x.size() + h] * x[h]);
    }
    return std::pair(sum, size * kSumError);
  };
  std::vector<Interval> intervals;
  double largest = 0, widest = 0;
  for (size_t i = 0; i < hidden.size(); ++i) {
    const auto [gate, gate_error] =
        product(expert.w1, expert.b1, layer_.Weights().w1.bias_stride, i);
    const auto [up, up_error] = product(expert.w3, expert.b3, layer_.Weights().w3.bias_stride, i);
    double low = hidden[i], high = hidden[i];
    for (double g : {gate - gate_error, gate + gate_error}) {
      for (double u : {up - up_error, up + up_error}) {
        const double value = config_.formula.entry.scalar(g, u, config_.formula.params);
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
    const double width = std::abs(hidden[i]) * kFormulaError;
    intervals.push_back({low - width, high + width});
    largest = std::max(largest, std::abs(hidden[i]));
    widest = std::max(widest, high - low + 2 * width);
  }
  // A scale is no better known than the value that it is made of.
  for (size_t i = 0; i < hidden.size() && info_.a2.kind != ActQuantKind::kNone; ++i) {
    const double width = largest == 0 ? 0 : std::abs(hidden[i]) / largest * widest;
    intervals[i].low -= width;
    intervals[i].high += width;
  }
  return intervals;
}

std::vector<double> MoeTruth::Uncertainty(size_t slot, size_t& codes) const {
  const std::vector<Interval> intervals = Intervals(slot);
  const std::vector<double>& hidden = faithful_.hidden[slot];
  const size_t inner = hidden.size();
  std::vector<double> uncertain;
  for (const Interval& interval : intervals) uncertain.push_back(interval.high - interval.low);
  if (info_.a2.kind == ActQuantKind::kNone) return uncertain;
  // Row 2 i has value i at the low end of its interval, row 2 i + 1 at the high end.
  std::vector<float> ends(2 * inner * inner);
  for (size_t i = 0; i < ends.size(); ++i) ends[i] = static_cast<float>(hidden[i % inner]);
  for (size_t i = 0; i < inner; ++i) {
    ends[2 * i * inner + i] = static_cast<float>(intervals[i].low);
    ends[(2 * i + 1) * inner + i] = static_cast<float>(intervals[i].high);
  }
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  const QuantRows rows =
      quant::QuantizeRows(context, ConstRows(ends.data(), 2 * inner, inner), row_quant_);
  for (size_t i = 0; i < inner; ++i) {
    if (kernels::CodeAt(rows.dtype, rows.Row(2 * i), i) ==
        kernels::CodeAt(rows.dtype, rows.Row(2 * i + 1), i))
      continue;
    ++codes;
    uncertain[i] += std::abs(RowElement(rows, 2 * i + 1, i) - RowElement(rows, 2 * i, i));
  }
  return uncertain;
}

void MoeTruth::AddSlotSlack(size_t slot, std::vector<double>& slack, size_t& codes) const {
  const std::vector<double> uncertain = Uncertainty(slot, codes);
  const std::vector<double>& w2 = layer_.exact(static_cast<size_t>(tokens_.ids[slot])).w2;
  double factor = config_.routed_scaling_factor;
  if (!config_.apply_router_weight_on_input &&
      (!config_.no_combine || config_.no_combine_keep_router_weight))
    factor *= double{tokens_.weights[slot]};
  for (size_t h = 0; h < slack.size(); ++h) {
    for (size_t i = 0; i < uncertain.size(); ++i)
      slack[h] += std::abs(factor * w2[h * uncertain.size() + i]) * uncertain[i];
  }
}

}  // namespace switchyard::testing
