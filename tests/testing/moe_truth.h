// What a layer must return for a batch, and the judgement of what a runner returned. Contract 8.2,
// 8.3.
#pragma once

#include <string>
#include <vector>

#include "testing/moe_case.h"

namespace switchyard::testing {

// How a result differs from the truth.
struct Verdict {
  bool ok = false;
  double distance = 0;           // the largest of a row, relative L2
  double dense_distance = 0;     // of all rows to the layer without activation quantisation
  size_t codes_on_boundary = 0;  // that explain why a row is farther away than the bound
  std::string why;               // if not ok
};

// Where a value is.
struct Interval {
  double low, high;
};

// The results of one layer for one batch by both oracles, which are held to EvaluateMoe.
//
// The bound of a row is relative L2 against the size of its terms. An f32 runner may also quantise
// a value that lies on the boundary of two codes to the other side than f64 does. That is allowed
// where it can be proved: a row that misses its bound is computed again with the interval of every
// value between the products (a few f32 roundings wide), and passes if these intervals, and one
// code for each that holds a boundary, account for the rest. The caller counts the codes: at most
// 0.1 % of all values (contract 8.3).
class MoeTruth {
 public:
  // Errors: std::runtime_error if the oracles and EvaluateMoe disagree.
  MoeTruth(const MoeCase& layer, const moe::MoeQuantInfo& info, const moe::MoeRunnerConfig& config,
           MoeTokens tokens);

  // `dense`: whether the distance to the dense oracle is judged too. The contract's bounds are for
  // rows that come as they are: what a 4-bit wire leaves is harder to quantise again.
  // Shapes: rows [T, H], or [T * K, H] with no_combine.
  Verdict Judge(const std::vector<float>& rows, bool dense = true) const;

  // Values that are quantised between the products.
  size_t num_requantised() const;
  const MoeTokens& tokens() const { return tokens_; }
  const MoeRows& faithful() const { return faithful_; }

 private:
  double Bound() const;
  double DenseBound() const;
  // What f32 makes of each value between the products.
  std::vector<Interval> Intervals(size_t slot) const;
  // How far each of those values may be off, codes on a boundary included.
  std::vector<double> Uncertainty(size_t slot, size_t& codes) const;
  // What that may change in a row: the bound of each column, and the number of such codes.
  std::vector<double> Slack(size_t row, size_t& codes) const;
  void AddSlotSlack(size_t slot, std::vector<double>& slack, size_t& codes) const;

  const MoeCase& layer_;
  moe::MoeQuantInfo info_;
  moe::MoeRunnerConfig config_;
  MoeTokens tokens_;
  MoeRows faithful_, dense_;
  ActQuant row_quant_;  // a2 as it is for one row: a scale over the batch is given
};

}  // namespace switchyard::testing
