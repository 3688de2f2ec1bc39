// FuseEP as tests see it: layers in any scheme, what they give on one rank by runner "aiter", and
// the part of one rank, on whatever carries the ranks.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/fuseep/fused_moe.h"
#include "switchyard/parallel/process_group.h"
#include "testing/moe_case.h"

namespace switchyard::moe::fuse_ranks {

inline constexpr size_t kHidden = 96;
inline constexpr size_t kInner = 48;
inline constexpr size_t kExperts = 24;  // of 1, 2, 3, 4 and 8 ranks
inline constexpr size_t kLimit = 70;    // num_max_dispatch_tokens_per_rank

// Waits as long as only a broken program does.
FusedMoeOptions Options(int mode = kDispatchFfnCombine);
testing::MoeCaseOptions CaseOptions(std::string_view scheme, size_t variant = 0);
testing::MoeTokens Tokens(size_t count, size_t top_k, testing::Spread spread,
                          std::mt19937_64& random);

// Layer number 3.
class TestLayer {
 public:
  TestLayer(const testing::MoeCaseOptions& options, size_t top_k, DType act,
            std::mt19937_64& random);

  const testing::MoeCase& layer() const { return case_; }
  const MoeQuantInfo& info() const { return info_; }
  const MoeRunnerConfig& config() const { return config_; }
  MoeRunnerConfig& config() { return config_; }
  size_t top_k() const { return config_.top_k; }

  // As a rank of so many has it.
  MoeRunnerConfig ConfigOf(size_t num_ranks) const;
  MoeQuantInfo InfoOf(const ProcessGroup& group) const;

  // The result of runner "aiter" with all experts.
  std::vector<float> OnOneRank(const testing::MoeTokens& tokens) const;

 private:
  testing::MoeCase case_;
  MoeQuantInfo info_;
  MoeRunnerConfig config_;
};

// The tokens of each rank, and what must come out.
struct Batch {
  std::vector<testing::MoeTokens> sources;
  std::vector<std::vector<float>> expected;
};
Batch MakeBatch(const TestLayer& layer, const std::vector<size_t>& counts, testing::Spread spread,
                std::mt19937_64& random);

// One rank of a group "fuse_ep".
struct Rank {
  explicit Rank(ProcessGroup& world, size_t threads = 1);

  std::vector<float> Run(FusedMoe& moe, const TestLayer& layer, const testing::MoeTokens& tokens);
  void ExpectBits(FusedMoe& moe, const TestLayer& layer, const Batch& batch,
                  const std::string& what);

  std::unique_ptr<ProcessGroup> group;
  ThreadPool pool;
  Arena arena;
};

// The part of one rank in a long sequence of steps on two layers with one buffer: modes that differ
// per rank, uneven tokens, ranks that fail, epochs that wrap around.
void RunRandomSteps(ProcessGroup& world, size_t num_steps);

}  // namespace switchyard::moe::fuse_ranks
