// One layer with random weights: FuseEP beside the low-latency protocol and runner aiter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench_exchange.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/fuseep/fused_moe.h"
#include "switchyard/moe/layer/moe_layer.h"

namespace switchyard::cli {

// Random matrices of one layer, in one scheme; owns their bytes.
class RandomExperts {
 public:
  // `scheme` is unquant (bf16) or w8a8_int8. Shapes: [I, H], [I, H], [H, I] of each local expert.
  RandomExperts(const moe::MoeRunnerConfig& config, std::string_view scheme, uint64_t seed);

  const moe::ExpertWeights& weights() const { return weights_; }
  moe::MoeQuantInfo Info() const;

 private:
  moe::ExpertBank MakeBank(size_t rows, size_t cols);
  const std::byte* MakeMatrix(size_t bytes);

  bool is_int8_;
  size_t num_experts_;
  uint64_t state_;
  std::vector<std::unique_ptr<uint64_t[]>> memory_;
  std::vector<std::unique_ptr<std::vector<float>>> scales_;
  moe::ExpertWeights weights_;
};

// The same layer computed both ways.
class FusedComparison {
 public:
  // Collective; ranks of one node.
  FusedComparison(ExecContext& context, ParallelGroups& groups, const moe::MoeRunnerConfig& config,
                  std::string_view scheme, size_t max_tokens);

  Rows RunLayer(const BenchTokens& tokens);
  Rows RunFused(int mode, const BenchTokens& tokens);
  // Errors: kInternal if they give other bits.
  void RequireSame(const BenchTokens& tokens);

 private:
  ExecContext& context_;
  RandomExperts experts_;
  moe::MoeQuantInfo info_;
  moe::ExpertParallel ep_;
  std::unique_ptr<ProcessGroup> group_;
  std::unique_ptr<moe::MoeLayer> layer_;
  std::vector<std::unique_ptr<moe::FusedMoe>> fused_;  // mode 1, mode 2
};

}  // namespace switchyard::cli
