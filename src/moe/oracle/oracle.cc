#include "switchyard/moe/oracle/oracle.h"

#include <fmt/format.h>

#include <algorithm>

#include "moe/oracle/fake_quant.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

// Expert of an id, or -1 to skip it.
int64_t LocalExpert(const MoeQuantInfo& info, const MoeRunnerConfig& config,
                    const OracleTokens& tokens, size_t slot) {
  const int32_t id = tokens.topk_ids[slot];
  if (id == -1) return -1;
  const std::span<const int32_t> mask = info.expert_mask;
  const size_t limit = mask.empty() ? info.w1.num_experts() : mask.size();
  if (id < 0 || static_cast<size_t>(id) >= limit) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("layer {}: token {} names expert {}; ids are -1 to {}", config.layer_id,
                    tokens.first_token + slot / tokens.top_k, id, static_cast<int64_t>(limit) - 1));
  }
  if (mask.empty()) return id;
  if (mask[static_cast<size_t>(id)] == 0) return -1;
  return std::count_if(mask.begin(), mask.begin() + id, [](int32_t one) { return one != 0; });
}

void CheckSizes(const MoeQuantInfo& info, const MoeRunnerConfig& config,
                const OracleTokens& tokens) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("layer {}: {}", config.layer_id, what));
  };
  if (tokens.hidden.cols != info.w1.cols)
    refuse(fmt::format("hidden states have {} columns, expected {}", tokens.hidden.cols,
                       info.w1.cols));
  const size_t slots = tokens.hidden.rows * tokens.top_k;
  if (tokens.topk_ids.size() != slots || tokens.topk_weights.size() != slots)
    refuse(fmt::format("{} rows with top_k {}, {} ids and {} weights", tokens.hidden.rows,
                       tokens.top_k, tokens.topk_ids.size(), tokens.topk_weights.size()));
  if (config.apply_router_weight_on_input && tokens.top_k > 1)
    refuse(fmt::format("apply_router_weight_on_input needs top_k 1, found {}", tokens.top_k));
  RequireExperts(info, info.expert_mask, config.is_gated, config.layer_id);
}

// Row n of expert e, dequantised, without the padded columns.
double Dot(const ExpertMatrices& w, size_t expert, size_t n, const std::vector<double>& x) {
  std::vector<double> row(x.size());
  quant::MatrixRow(w, expert, n, row);
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k) sum += row[k] * x[k];
  return w.bias.empty() ? sum : sum + w.bias[expert][n * w.bias_stride];
}

// The rows that a product takes, one vector each; empty rows are not counted in any statistic.
using RowSet = std::vector<std::vector<double>>;

class Oracle {
 public:
  Oracle(OracleKind kind, const MoeQuantInfo& info, const MoeRunnerConfig& config,
         const OracleTokens& tokens)
      : faithful_(kind == OracleKind::kFaithful), info_(info), config_(config), tokens_(tokens) {}

  OracleRows Run() const {
    const size_t num_slots = tokens_.hidden.rows * tokens_.top_k;
    RowSet x = Inputs();
    if (faithful_) FakeQuantize(info_.a13, x);
    RowSet hidden(num_slots);
    for (size_t slot = 0; slot < num_slots; ++slot) {
      const int64_t expert = LocalExpert(info_, config_, tokens_, slot);
      if (expert >= 0) hidden[slot] = Hidden(static_cast<size_t>(expert), x[slot / tokens_.top_k]);
    }
    if (faithful_) FakeQuantize(info_.a2, hidden);
    OracleRows out{config_.no_combine ? num_slots : tokens_.hidden.rows, info_.w2.rows, {}};
    out.values.assign(out.rows * out.cols, 0.0);
    for (size_t slot = 0; slot < num_slots; ++slot) {
      if (!hidden[slot].empty()) AddDown(slot, hidden[slot], out);
    }
    return out;
  }

 private:
  // Rows that no expert sees are never read.
  bool HasExpert(size_t token) const {
    for (size_t slot = token * tokens_.top_k; slot < (token + 1) * tokens_.top_k; ++slot) {
      if (LocalExpert(info_, config_, tokens_, slot) >= 0) return true;
    }
    return false;
  }

  RowSet Inputs() const {
    RowSet x(tokens_.hidden.rows);
    for (size_t t = 0; t < x.size(); ++t) {
      if (!HasExpert(t)) continue;
      const float weight = config_.apply_router_weight_on_input ? tokens_.topk_weights[t] : 1.0f;
      for (size_t h = 0; h + info_.hidden_pad < tokens_.hidden.cols; ++h) {
        const float value = tokens_.hidden.Row(t)[h];
        // The faithful form quantises what a kernel holds: the product rounded to f32.
        x[t].push_back(faithful_ ? double{value * weight} : double{value} * double{weight});
      }
    }
    return x;
  }

  std::vector<double> Hidden(size_t expert, const std::vector<double>& x) const {
    std::vector<double> hidden;
    for (size_t i = 0; i + info_.intermediate_pad < info_.w1.rows; ++i) {
      const double gate = Dot(info_.w1, expert, i, x);
      const double up = config_.is_gated ? Dot(info_.w3, expert, i, x) : 0.0;
      hidden.push_back(config_.formula.entry.scalar(gate, up, config_.formula.params));
    }
    return hidden;
  }

  void AddDown(size_t slot, const std::vector<double>& hidden, OracleRows& out) const {
    const auto expert = static_cast<size_t>(LocalExpert(info_, config_, tokens_, slot));
    const bool weighted = !config_.apply_router_weight_on_input &&
                          (!config_.no_combine || config_.no_combine_keep_router_weight);
    const double factor =
        (weighted ? double{tokens_.topk_weights[slot]} : 1.0) * config_.routed_scaling_factor;
    double* row = &out.values[(config_.no_combine ? slot : slot / tokens_.top_k) * out.cols];
    for (size_t h = 0; h + info_.hidden_pad < out.cols; ++h)
      row[h] += factor * Dot(info_.w2, expert, h, hidden);
  }

  bool faithful_;
  const MoeQuantInfo& info_;
  const MoeRunnerConfig& config_;
  const OracleTokens& tokens_;
};

}  // namespace

OracleRows RunOracle(OracleKind kind, const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                     const OracleTokens& tokens) {
  CheckSizes(quant_info, config, tokens);
  return Oracle(kind, quant_info, config, tokens).Run();
}

}  // namespace switchyard::moe
