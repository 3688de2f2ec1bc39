// Many exchanges in a row, in random order: dispatchers, nodes, batches that overlap, ranks that
// give up between two stages, epochs that wrap around. SWITCHYARD_LONG_TESTS=1 takes 10,000 steps.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/ep_ranks.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::MoeCase;
using testing::MoeTokens;

constexpr size_t kRanks = 4;
constexpr size_t kStepsPerRound = 40;
constexpr size_t kMostTokens = 11;
constexpr size_t kTopK = 2;

size_t NumSteps() {
  const char* value = std::getenv("SWITCHYARD_LONG_TESTS");
  return value != nullptr && std::string_view(value) == "1" ? 10'000 : 400;
}

size_t ResidentBytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

using Random = std::mt19937_64;
size_t Draw(Random& random, size_t below) { return random() % below; }

// The layer, and batches of tokens with what one rank makes of them.
struct Material {
  explicit Material(Random& random)
      : layer({.experts = 8, .hidden = 32, .intermediate = 16}, random) {
    for (size_t count = 0; count <= kMostTokens; ++count) {
      batches.push_back(
          testing::RandomTokens(count, kTopK, 8, 32, testing::Spread::kSomeSkipped, random));
      expected.push_back(testing::RunOneRank(layer, batches.back(), "aiter"));
    }
  }

  MoeCase layer;
  std::vector<MoeTokens> batches;            // batch i has i tokens
  std::vector<std::vector<float>> expected;  // [tokens * H] of each
};

// What all ranks know of a step of one batch.
struct Plan {
  MoeLayer* layer = nullptr;
  size_t batch = 0;  // of two-batch overlap
  // Stage after which the ranks of the mask give up, 4 = none.
  size_t give_up_after = 4;
  uint32_t who = 0;
};

// One batch on its way through the four stages of a dispatcher.
class Lane {
 public:
  Lane(EpRank& rank, const Material& material, const Plan& plan, Dispatcher& dispatcher,
       size_t tokens, bool may_fail)
      : rank_(rank),
        material_(material),
        plan_(plan),
        dispatcher_(dispatcher),
        tokens_(material.batches[tokens]),
        may_fail_(may_fail) {}

  bool is_over() const { return stage_ == 4; }
  // This rank gave up, or failed because another did.
  bool is_broken() const { return is_broken_; }

  void RunNextStage() {
    if (is_over()) return;
    try {
      RunStage();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
      EXPECT_TRUE(may_fail_) << error.what();
      return Break();
    }
    const bool mine = (plan_.who >> rank_.world.rank() & 1) != 0;
    if (mine && stage_ == plan_.give_up_after) return Break();
    ++stage_;
  }

 private:
  void Break() {
    dispatcher_.Abort();
    is_broken_ = true;
    stage_ = 4;
  }

  void RunStage() {
    ExecContext& context = rank_.context;
    switch (stage_) {
      case 0: dispatcher_.DispatchA(context, tokens_.Hidden(), tokens_.TopK()); return;
      case 1: input_ = &plan_.layer->Apply(context, dispatcher_.DispatchB(context)); return;
      case 2: dispatcher_.CombineA(context, *input_); return;
      default: Compare(dispatcher_.CombineB(context));
    }
  }

  void Compare(ConstRows rows) {
    const std::vector<float>& expected = material_.expected[tokens_.count];
    ASSERT_EQ(rows.rows, tokens_.count);
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_EQ(rows.Row(i / rows.cols)[i % rows.cols], expected[i]) << "value " << i;
  }

  EpRank& rank_;
  const Material& material_;
  const Plan plan_;
  Dispatcher& dispatcher_;
  const MoeTokens& tokens_;
  const CombineInput* input_ = nullptr;
  const bool may_fail_;
  size_t stage_ = 0;
  bool is_broken_ = false;
};

// A rank's layers, with the dispatchers of their second batch.
class Layers {
 public:
  Layers(EpRank& rank, const EpSetup& setup, const Material& material) {
    for (const char* a2a : {"none", "deepep", "mooncake", "mori", "nixl", "deepep"}) {
      EpSetup one = setup;
      one.layer.a2a = a2a;
      layers_.push_back(testing::MakeRankLayer(rank, one, material.layer, kTopK));
    }
    MoeRunnerConfig config = material.layer.Config(kTopK);
    config.num_local_experts /= rank.ep.ep_size();
    for (ForwardPhase phase : {ForwardPhase::kPrefill, ForwardPhase::kDecode}) {
      rank.ep.BeginPass(phase);
      for (const auto& layer : layers_) {
        const std::string_view name = layer->dispatcher().name();
        std::unique_ptr<Dispatcher>& second = second_[{layer.get(), name}];
        second = BuiltinRegistry().FindDispatcher(name).make(
            {.config = config, .runner = "aiter", .ep = &rank.ep, .batch = 1});
        second->SetQuantConfig({});
      }
    }
  }

  MoeLayer& PickLayer(Random& random) { return *layers_[Draw(random, layers_.size())]; }

  Dispatcher& DispatcherOf(const Plan& plan) {
    Dispatcher& first = plan.layer->dispatcher();
    return plan.batch == 0 ? first : *second_.at({plan.layer, first.name()});
  }

 private:
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  std::map<std::pair<const MoeLayer*, std::string_view>, std::unique_ptr<Dispatcher>> second_;
};

// One group of ranks and its steps. `together` is the same on all ranks.
class Round {
 public:
  Round(EpRank& rank, const EpSetup& setup, const Material& material, Random together)
      : rank_(rank),
        setup_(setup),
        material_(material),
        together_(std::move(together)),
        alone_(together_() + rank.world.rank()),
        last_step_(Draw(together_, 2 * kStepsPerRound)),
        layers_(rank, setup, material) {}

  // Returns the number of steps: fewer than asked for where a rank has given up between nodes.
  size_t Run(size_t steps) {
    // More than any step takes, so that none of them may need the system.
    rank_.context.arena.Allocate(size_t{4} << 20);
    rank_.context.arena.Reset();
    const size_t allocations = rank_.arena.num_system_allocations();
    bool goes_on = true;
    for (; goes_on && step_ < steps && !::testing::Test::HasFailure(); ++step_) {
      goes_on = Step();
      rank_.context.arena.Reset();
    }
    EXPECT_EQ(rank_.arena.num_system_allocations(), allocations);
    return step_;
  }

 private:
  bool IsOnSeveralNodes() const { return setup_.node_size < kRanks; }

  Plan MakePlan(size_t batch) {
    Plan plan;
    plan.layer = &layers_.PickLayer(together_);
    plan.batch = batch;
    // Between nodes it is the end of the round.
    const bool gives_up = IsOnSeveralNodes() ? step_ == last_step_ : Draw(together_, 6) == 0;
    const size_t stage = Draw(together_, 3);
    const auto who = static_cast<uint32_t>(1 + Draw(together_, (1u << kRanks) - 1));
    if (!gives_up) return plan;
    plan.give_up_after = stage;
    // Elastic protocols would take the ranks out, and the last step of replicated tokens is no
    // exchange.
    const std::string_view name = plan.layer->dispatcher().name();
    const bool all = name == "mooncake" || name == "nixl" || setup_.options.tokens_are_replicated;
    plan.who = all ? (1u << kRanks) - 1 : who;
    return plan;
  }

  // One batch, or two at once. Whether there may be another step.
  bool Step() {
    rank_.ep.BeginPass(Draw(together_, 2) == 0 ? ForwardPhase::kDecode : ForwardPhase::kPrefill);
    const size_t num_lanes = 1 + Draw(together_, 2);
    std::vector<Lane> lanes;
    for (size_t i = 0; i < num_lanes; ++i) {
      const Plan plan = MakePlan(num_lanes == 1 ? Draw(together_, 2) : i);
      Random& random = setup_.options.tokens_are_replicated ? together_ : alone_;
      // Who gives up may be a step ahead of who hears of it.
      const bool may_fail = IsOnSeveralNodes() ? step_ + 1 >= last_step_ : plan.give_up_after != 4;
      lanes.emplace_back(rank_, material_, plan, layers_.DispatcherOf(plan),
                         Draw(random, material_.batches.size()), may_fail);
    }
    // Every rank takes the stages in the same order, also those whose lane is over.
    std::vector<size_t> order;
    for (size_t i = 0; i < num_lanes; ++i) order.insert(order.end(), 4, i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Draw(together_, i)]);
    for (size_t lane : order) {
      lanes[lane].RunNextStage();
      // Between nodes the group is aborted: nothing works on it any more, and nothing hangs.
      if (lanes[lane].is_broken() && IsOnSeveralNodes()) return false;
    }
    return true;
  }

  EpRank& rank_;
  const EpSetup& setup_;
  const Material& material_;
  Random together_;
  Random alone_;
  const size_t last_step_;  // between nodes, where somebody gives up; often beyond the end
  size_t step_ = 0;
  Layers layers_;
};

EpSetup DrawSetup(Random& random) {
  EpSetup setup;
  setup.ranks = kRanks;
  setup.node_size = std::array<size_t, 6>{4, 4, 2, 2, 1, 3}[Draw(random, 6)];
  setup.layer.runner = "aiter";
  setup.layer.act_dtype = "f32";
  setup.options.tokens_are_replicated = Draw(random, 4) == 0;
  setup.options.max_tokens_per_rank = kMostTokens;
  setup.options.num_max_dispatch_tokens_per_rank = kMostTokens;
  setup.options.push_rows = std::array<size_t, 3>{0, 5, 100}[Draw(random, 3)];
  setup.options.hierarchy =
      std::array{Hierarchy::kAuto, Hierarchy::kOn, Hierarchy::kOff}[Draw(random, 3)];
  setup.options.first_epoch = UINT32_MAX - static_cast<uint32_t>(Draw(random, 6));
  setup.options.timeout = std::chrono::seconds(60);
  return setup;
}

TEST(EpStepsTest, ManyRandomSteps) {
  Random random = testing::MakeRandom(6);
  const Material material(random);
  const size_t wanted = NumSteps();
  size_t done = 0;
  size_t resident_early = 0;
  while (done < wanted && !::testing::Test::HasFailure()) {
    const EpSetup setup = DrawSetup(random);
    const Random together(random());
    SCOPED_TRACE(fmt::format("after {} steps: {}", done, setup.Describe()));
    std::array<size_t, kRanks> steps{};
    testing::RunEp(setup, [&](EpRank& rank) {
      SCOPED_TRACE(fmt::format("rank {}, {}", rank.world.rank(), setup.Describe()));
      steps[rank.world.rank()] = Round(rank, setup, material, together).Run(kStepsPerRound);
    });
    done += *std::max_element(steps.begin(), steps.end());
    if (done < wanted / 4) resident_early = ResidentBytes();
  }
  EXPECT_GE(done, wanted);
  // Nothing that grows with the steps; a short run has not warmed up.
  if (wanted >= 10'000) {
    EXPECT_LT(ResidentBytes(), resident_early + (size_t{64} << 20));
  }
}

}  // namespace
}  // namespace switchyard::moe
