#include "moe/fuseep/fuse_ranks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/runners/aiter.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe::fuse_ranks {
namespace {

using testing::ExpectError;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::Spread;

constexpr std::chrono::milliseconds kLong{60000};

// So many floats with the same bits, NaN or not.
bool SameBits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
}

// What a rank does in a step.
struct Part {
  size_t first, count;  // tokens
  bool fails;
};

std::vector<std::vector<Part>> RandomParts(size_t num_steps, size_t num_ranks, size_t num_tokens,
                                           std::mt19937_64& random) {
  std::vector<std::vector<Part>> steps(num_steps, std::vector<Part>(num_ranks));
  for (auto& step : steps) {
    for (Part& part : step) {
      part.count = random() % 4 == 0 ? 0 : random() % 12;
      part.first = random() % (num_tokens - 12);
      part.fails = random() % (10 * num_ranks) == 0;
    }
  }
  return steps;
}

// A step in which some ranks fail: they say why, and the others name one of them.
void ExpectFailure(Rank& rank, FusedMoe& moe, const TestLayer& layer, MoeTokens tokens,
                   const std::vector<Part>& step, size_t number) {
  if (step[rank.group->rank()].fails) {
    tokens.ids[number % tokens.ids.size()] = number % 2 == 0 ? -2 : static_cast<int32_t>(kExperts);
    ExpectError(ErrorCode::kInvalidArgument, {"layer 3", "names expert"},
                [&] { rank.Run(moe, layer, tokens); });
    return;
  }
  const std::string message = ExpectError(ErrorCode::kUnavailable, {"layer 3", "failed"},
                                          [&] { rank.Run(moe, layer, tokens); });
  bool names_one = false;
  for (size_t other = 0; other < step.size(); ++other) {
    names_one |=
        step[other].fails && message.find(fmt::format("rank {} of", other)) != std::string::npos;
  }
  EXPECT_TRUE(names_one) << message;
}

}  // namespace

FusedMoeOptions Options(int mode) {
  FusedMoeOptions options;
  options.mode = mode;
  options.num_max_dispatch_tokens_per_rank = kLimit;
  options.buffer_mb = 64;
  options.timeout = kLong;
  return options;
}

MoeCaseOptions CaseOptions(std::string_view scheme, size_t variant) {
  MoeCaseOptions options;
  options.scheme_w13 = options.scheme_w2 = scheme;
  options.variant = variant;
  options.experts = kExperts;
  options.hidden = kHidden;
  options.intermediate = kInner;
  return options;
}

MoeTokens Tokens(size_t count, size_t top_k, Spread spread, std::mt19937_64& random) {
  return testing::RandomTokens(count, top_k, kExperts, kHidden, spread, random);
}

TestLayer::TestLayer(const MoeCaseOptions& options, size_t top_k, DType act,
                     std::mt19937_64& random)
    : case_(options, random), info_(case_.Info()), config_(case_.Config(top_k)) {
  config_.activation_dtype = act;
  config_.layer_id = 3;
  config_.w13_kernel = ExpertKernel{info_.w1.format, info_.a13};
  config_.w2_kernel = ExpertKernel{info_.w2.format, info_.a2};
}

MoeRunnerConfig TestLayer::ConfigOf(size_t num_ranks) const {
  MoeRunnerConfig config = config_;
  config.num_local_experts = kExperts / num_ranks;
  return config;
}

MoeQuantInfo TestLayer::InfoOf(const ProcessGroup& group) const {
  const size_t local = kExperts / group.size();
  return case_.InfoOfExperts(group.rank() * local, local);
}

std::vector<float> TestLayer::OnOneRank(const MoeTokens& tokens) const {
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  AiterRunnerInput input;
  input.hidden_states = QuantRows::Plain(tokens.Hidden());
  input.topk_ids = tokens.ids;
  input.topk_weights = tokens.weights;
  input.top_k = tokens.top_k;
  RunningState state;
  const auto core = BuiltinRegistry().FindRunner(AiterRunnerInput::kRunner).make(config_);
  const auto& output =
      static_cast<const AiterRunnerOutput&>(core->Run(context, input, info_, state));
  const Rows rows = output.hidden_states;
  return {rows.data, rows.data + rows.rows * rows.cols};
}

Batch MakeBatch(const TestLayer& layer, const std::vector<size_t>& counts, Spread spread,
                std::mt19937_64& random) {
  Batch batch;
  for (size_t count : counts) {
    batch.sources.push_back(Tokens(count, layer.top_k(), spread, random));
    batch.expected.push_back(layer.OnOneRank(batch.sources.back()));
  }
  return batch;
}

Rank::Rank(ProcessGroup& world, size_t threads)
    : group(world.Duplicate("fuse_ep", Deadline::After(kLong, "test"))), pool(threads) {}

std::vector<float> Rank::Run(FusedMoe& moe, const TestLayer& layer, const MoeTokens& tokens) {
  ArenaScope scope(arena);
  ExecContext context{pool, arena};
  const Rows rows = moe.Run(context, tokens.Hidden(), tokens.TopK(), layer.InfoOf(*group));
  EXPECT_EQ(rows.rows, tokens.count);
  return {rows.data, rows.data + rows.rows * rows.cols};
}

void Rank::ExpectBits(FusedMoe& moe, const TestLayer& layer, const Batch& batch,
                      const std::string& what) {
  const std::vector<float> rows = Run(moe, layer, batch.sources[group->rank()]);
  EXPECT_TRUE(SameBits(rows, batch.expected[group->rank()]))
      << what << ", rank " << group->rank() << " of " << group->size();
}

void RunRandomSteps(ProcessGroup& world, size_t num_steps) {
  std::mt19937_64 random = testing::MakeRandom(78);  // the same on all ranks
  MoeCaseOptions small = CaseOptions("w8a8_int8");
  small.hidden = 32;
  small.intermediate = 16;
  const TestLayer layer(small, 2, DType::kF32, random);
  const MoeTokens tokens =
      testing::RandomTokens(200, 2, kExperts, 32, Spread::kSomeSkipped, random);
  // A token's row does not depend on its batch.
  const std::vector<float> expected = layer.OnOneRank(tokens);
  const auto steps = RandomParts(num_steps, world.size(), tokens.count, random);

  Rank rank(world);
  const size_t me = world.rank();
  const MoeRunnerConfig config = layer.ConfigOf(world.size());
  FusedMoeOptions options = Options();
  options.first_epoch = 0u - static_cast<uint32_t>(num_steps / 2);
  const auto buffer =
      std::make_shared<FusedMoeBuffer>(*rank.group, FusedMoeShapeOf(config), options);
  std::vector<std::unique_ptr<FusedMoe>> moes;
  for (size_t i = 0; i < 2; ++i) {
    options.mode = (i + me) % 2 == 0 ? kDispatchGmmCombineDecode : kDispatchFfnCombine;
    moes.push_back(std::make_unique<FusedMoe>(buffer, config, options));
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    FusedMoe& moe = *moes[i % 5 == 0 ? 1 : 0];
    const Part part = steps[i][me];
    if (std::ranges::any_of(steps[i], &Part::fails)) {
      ExpectFailure(rank, moe, layer, tokens.Slice(part.first, 3), steps[i], i);
      continue;
    }
    const std::vector<float> rows = rank.Run(moe, layer, tokens.Slice(part.first, part.count));
    ASSERT_TRUE(SameBits(rows, std::span(expected).subspan(part.first * 32, part.count * 32)))
        << "step " << i << ", rank " << me;
  }
}

}  // namespace switchyard::moe::fuse_ranks
