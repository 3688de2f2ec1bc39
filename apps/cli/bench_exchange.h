// Dispatch and combine of every protocol behind a runner that only hands rows back, and the rows
// that they have to move.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bench_raw.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/moe/ep/expert_parallel.h"

namespace switchyard::cli {

// The layer whose rows travel, as every rank knows it.
struct BenchLayer {
  moe::MoeRunnerConfig config;      // num_local_experts of each rank
  moe::DispatcherQuantConfig wire;  // how rows travel
  size_t dispatch_row_bytes = 0;    // header included
  size_t home_row_bytes = 0;
};

// The routing of the tokens of one rank: uniform, from a seed that all ranks know.
struct BenchTokens {
  size_t count = 0;
  size_t top_k = 0;
  size_t cols = 0;
  std::vector<float> hidden;  // [T, H]
  std::vector<int32_t> ids;   // [T, K]
  std::vector<float> weights;

  static BenchTokens Random(const moe::MoeRunnerConfig& config, size_t count, size_t rank);
  // Those of all ranks, one behind the other.
  static BenchTokens Join(std::span<const BenchTokens> all);

  ConstRows Hidden() const { return ConstRows(hidden.data(), count, cols); }
  moe::TopKOutput TopK() const { return {count, top_k, weights, ids, {}}; }
};

// What a protocol has to move.
enum class Traffic {
  kOnce,       // a token once to each rank that has one of its experts; a row per route back
  kAll,        // every token to every rank; a row per route back
  kReplicated  // a row per route to the rank that owns the token, sums to all
};

struct Backend {
  std::string_view label;
  std::string_view a2a;
  moe::DispatchMode mode;
  Traffic traffic;
  bool is_low_latency;
};
inline constexpr std::array<Backend, 7> kBackends{{
    {"standard, replicated", "none", moe::DispatchMode::kAny, Traffic::kReplicated, false},
    {"standard, own tokens", "none", moe::DispatchMode::kAny, Traffic::kAll, false},
    {"deepep normal", "deepep", moe::DispatchMode::kNormal, Traffic::kOnce, false},
    {"deepep low latency", "deepep", moe::DispatchMode::kLowLatency, Traffic::kOnce, true},
    {"mooncake", "mooncake", moe::DispatchMode::kAny, Traffic::kOnce, true},
    {"nixl", "nixl", moe::DispatchMode::kAny, Traffic::kOnce, true},
    {"mori", "mori", moe::DispatchMode::kAny, Traffic::kOnce, false},
}};

// The rows of rank `me`. `all` are the tokens of each rank. With `summed` a rank sends one row back
// for all routes of a token.
std::vector<Leg> LegsOf(const Backend& backend, const BenchLayer& layer,
                        std::span<const BenchTokens> all, size_t me, bool summed);

// DispatchA, DispatchB, rows handed back, CombineA, CombineB.
class DispatchStep {
 public:
  // Collective. `tokens` are those of this rank, or all of them where they are replicated.
  DispatchStep(ExecContext& context, ParallelGroups& groups,
               const moe::ExpertParallelOptions& options, const Backend& backend,
               const BenchLayer& layer, const BenchTokens& tokens);

  void Run();

  // Microseconds of this rank for each stage, summed over the Runs since the last call, and their
  // number.
  struct Stages {
    std::array<double, 4> us = {};
    size_t runs = 0;
  };
  Stages TakeStages() { return std::exchange(stages_, {}); }

 private:
  // What a runner would return, in place of any work.
  const moe::CombineInput& HandBack(const moe::DispatchOutput& output);
  // Rows for the slots whose experts are here.
  void MakeRows(std::span<const int32_t> ids, bool ids_are_local);
  // Rows in the slabs, as many as are defined.
  void MakeSlab(const moe::DeepepLlDispatchOutput& output);

  ExecContext& context_;
  const BenchLayer& layer_;
  const BenchTokens& tokens_;
  moe::ExpertParallel ep_;
  std::unique_ptr<moe::Dispatcher> dispatcher_;
  // Made in the first Run; the routing is always the same.
  bool is_made_ = false;
  std::unique_ptr<float[]> data_;
  Rows rows_;
  std::vector<int32_t> row_of_slot_;
  Stages stages_;
};

}  // namespace switchyard::cli
