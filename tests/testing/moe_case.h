// A random MoE layer in any scheme, its tokens, and its result by plain loops in f64: written
// independently of the runners and of moe/oracle, which are both held to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "quant/weight_quant.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/moe/oracle/oracle.h"
#include "switchyard/moe/registry/registry.h"
#include "testing/random.h"

namespace switchyard::testing {

// The formats that a scheme accepts among all that QuantizeMatrix makes, and f32, bf16 and f16
// without scales. Empty: no maker fits, and whoever asked should fail with a message.
std::vector<quant::WeightQuant> FormatsOf(const moe::SchemeEntry& scheme, size_t rows, size_t cols);

// How w13 lies in memory: two matrices, or one with gate and up rows as halves or in turn.
enum class GateUpStorage { kSeparate, kHalves, kInterleaved };

struct MoeCaseOptions {
  std::string scheme_w13 = "unquant";
  std::string scheme_w2 = "unquant";
  size_t variant = 0;  // which of FormatsOf the schemes, modulo their number
  size_t experts = 6;
  size_t hidden = 64;
  size_t intermediate = 32;
  bool bias = false;
  GateUpStorage storage = GateUpStorage::kSeparate;
  size_t replicas = 0;  // so many experts more, which share the matrices of the first ones
  moe::MoeRunnerConfig runner =
      {};  // activation, is_gated, factors, … ; MoeCase fills in the sizes
};

// Blocks of ggml hold 32 columns: with a scheme of them both sizes are rounded up.
void FitSizes(MoeCaseOptions& options);

// The routing of a batch, and its rows. -1 = no expert.
struct MoeTokens {
  size_t count = 0;
  size_t top_k = 1;
  size_t cols = 0;             // H
  std::vector<float> hidden;   // [T, H]
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]

  ConstRows Hidden() const { return ConstRows(hidden.data(), count, cols); }
  moe::TopKOutput TopK() const { return {count, top_k, weights, ids, {}}; }
  moe::OracleTokens Oracle() const { return {Hidden(), ids, weights, top_k}; }
  // Tokens [first, first + n).
  MoeTokens Slice(size_t first, size_t n) const;
};

// Where the routes of random tokens go.
enum class Spread {
  kRandom,
  kAllToOne,     // column k of every token is expert k
  kNoneToFirst,  // never expert 0
  kSomeSkipped,  // a third of the slots is -1
  kAllSkipped
};
// Needs top_k experts, and one more for kNoneToFirst. Weights of skipped slots are not 0: they must
// not matter.
MoeTokens RandomTokens(size_t count, size_t top_k, size_t experts, size_t hidden, Spread spread,
                       std::mt19937_64& random);

// Weights of a layer. Values are scaled so that gate, up and outputs are of the order of 1.
class MoeCase {
 public:
  // Errors: std::runtime_error naming the scheme if no maker fits it; Error (kUnsupported) from
  //   SplitGateUp where the format cannot be stacked.
  MoeCase(const MoeCaseOptions& options, std::mt19937_64& random);
  // Gated silu without quantisation.
  MoeCase(size_t experts, size_t hidden, size_t intermediate, DType dtype, std::mt19937_64& random);
  MoeCase(const MoeCase&) = delete;
  MoeCase& operator=(const MoeCase&) = delete;

  const MoeCaseOptions& options() const { return options_; }
  size_t experts() const { return options_.experts + options_.replicas; }
  size_t hidden() const { return options_.hidden; }
  size_t intermediate() const { return options_.intermediate; }

  const moe::ExpertWeights& Weights() const { return weights_; }
  // Views of Weights(); without activation quantisation a13 and a2 are kNone.
  moe::MoeQuantInfo Info(bool activation_quant = true) const;
  // The experts [first, first + count) alone.
  moe::MoeQuantInfo InfoOfExperts(size_t first, size_t count) const;
  // options().runner with sizes, top_k and formula.
  moe::MoeRunnerConfig Config(size_t top_k) const;
  // Overwrites the w2 of every expert, which must not be quantised.
  void FillW2(float value);

  // The three matrices of an expert in f64, decoded here. [I, H], [I, H], [H, I]
  struct Exact {
    std::vector<double> w1, w3, w2;
    const float* b1 = nullptr;  // or null
    const float* b3 = nullptr;
    const float* b2 = nullptr;
  };
  const Exact& exact(size_t expert) const {
    return exact_[expert < options_.experts ? expert : expert - options_.experts];
  }

 private:
  void Build(std::mt19937_64& random);
  // Random [rows, cols] in the format; stays where it is.
  const quant::QuantMatrix& AddMatrix(const quant::WeightQuant& how, size_t rows, size_t cols,
                                      std::mt19937_64& random);
  const float* AddBias(size_t count, std::mt19937_64& random);
  moe::ExpertBank BankOf(const std::vector<const quant::QuantMatrix*>& matrices) const;

  MoeCaseOptions options_;
  std::deque<quant::QuantMatrix> matrices_;
  std::deque<std::vector<float>> biases_;
  moe::ExpertWeights weights_;
  std::vector<Exact> exact_;
};

// The result of a layer in f64.
struct MoeRows {
  size_t rows = 0;
  size_t cols = 0;
  std::vector<double> values;
  // The same with every term of the last sums by its absolute value: what rounding errors are
  // relative to, however much the terms cancel.
  std::vector<double> size;
  std::vector<std::vector<double>> x;  // of each token, as gemm1 multiplies it; empty if none does
  std::vector<std::vector<double>> hidden;  // of each slot after the activation, not quantised yet
};

// Plain loops over MoeCase::Exact. `info` gives a13 and a2 alone, which the faithful kind obeys:
// rows are quantised by the kernels of quant/act_quant.h, where moe/oracle has code of its own, so
// each checks the other.
MoeRows EvaluateMoe(moe::OracleKind kind, const MoeCase& layer, const moe::MoeQuantInfo& info,
                    const moe::MoeRunnerConfig& config, const MoeTokens& tokens);

// L2 distance of rows to f64 rows, relative to the L2 norm of `size`.
double RelativeL2(ConstRows rows, const std::vector<double>& expected,
                  const std::vector<double>& size);

}  // namespace switchyard::testing
