// Layers spread over ranks: every dispatcher, against the same layer on one rank. Contract 8.4.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/ep_ranks.h"
#include "testing/errors.h"
#include "testing/moe_truth.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::ExpectError;
using testing::MoeCase;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::RandomTokens;
using testing::RunEp;
using testing::RunOneRank;
using testing::RunSpread;
using testing::Spread;

// A backend with the mode and the runner that make one path of it.
struct Path {
  std::string a2a;
  std::string runner;
  DeepepMode mode = DeepepMode::kAuto;
  bool own_tokens = false;

  std::string name() const {
    return fmt::format("{} x {}{}{}", a2a, runner,
                       mode == DeepepMode::kLowLatency ? ", low latency"
                       : mode == DeepepMode::kNormal   ? ", normal"
                                                       : "",
                       own_tokens ? ", own tokens" : ", replicated");
  }
};

std::vector<Path> AllPaths() {
  std::vector<Path> paths;
  for (bool own : {false, true}) {
    for (const char* runner : {"aiter", "ascend"}) {
      for (DeepepMode mode : {DeepepMode::kNormal, DeepepMode::kLowLatency})
        paths.push_back({"deepep", runner, mode, own});
      for (const char* a2a : {"mooncake", "nixl"})
        paths.push_back({a2a, runner, DeepepMode::kAuto, own});
    }
    paths.push_back({"ascend_fuseep", "auto", DeepepMode::kAuto, own});
    paths.push_back({"none", "aiter", DeepepMode::kAuto, own});
    paths.push_back({"none", "reference", DeepepMode::kAuto, own});
    paths.push_back({"mori", "aiter", DeepepMode::kAuto, own});
  }
  return paths;
}

EpSetup SetupOf(const Path& path, size_t ranks, size_t max_tokens) {
  EpSetup setup;
  setup.ranks = ranks;
  setup.layer.a2a = path.a2a;
  setup.layer.runner = path.runner;
  setup.layer.act_dtype = "f32";
  setup.options.deepep_mode = path.mode;
  setup.options.tokens_are_replicated = !path.own_tokens;
  setup.options.max_tokens_per_rank = std::max<size_t>(max_tokens, 1);
  setup.options.num_max_dispatch_tokens_per_rank = std::max<size_t>(max_tokens, 1);
  return setup;
}

class EpTest : public ::testing::Test {
 protected:
  EpTest() : random_(testing::MakeRandom(5)) {}

  // Spreads `tokens` as the path says (all to everybody, or some to each rank) and compares bits.
  void ExpectOneAnswer(const Path& path, EpSetup setup, const MoeCase& layer,
                       const MoeTokens& tokens, const std::vector<size_t>& counts) {
    SCOPED_TRACE(path.name() + ": " + setup.Describe());
    const std::vector<float> expected = RunOneRank(layer, tokens, path.runner);
    std::vector<MoeTokens> sources{tokens};
    if (path.own_tokens) {
      sources.clear();
      size_t first = 0;
      for (size_t count : counts) {
        sources.push_back(tokens.Slice(first, count));
        first += count;
      }
    }
    std::vector<float> found;
    for (const std::vector<float>& rows : RunSpread(setup, layer, sources))
      found.insert(found.end(), rows.begin(), rows.end());
    ASSERT_EQ(found.size(), expected.size());
    if (path.runner == "reference") {
      // Its one-rank sum is in f64, that over ranks in f32.
      for (size_t i = 0; i < found.size(); ++i)
        ASSERT_NEAR(found[i], expected[i], 1e-5) << "value " << i;
      return;
    }
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]))
          << "value " << i << ": " << found[i] << ", on one rank " << expected[i];
  }

  std::mt19937_64 random_;
};

// So many tokens for each of `ranks`: none for rank 1, the rest uneven.
std::vector<size_t> Uneven(size_t tokens, size_t ranks) {
  std::vector<size_t> counts(ranks, 0);
  for (size_t t = 0; t < tokens; ++t) {
    const size_t rank = t * t % ranks;
    ++counts[ranks > 1 && rank == 1 ? 0 : rank];
  }
  return counts;
}

TEST_F(EpTest, EveryPathGivesTheBitsOfOneRank) {
  for (size_t ranks : {1u, 2u, 3u, 4u, 8u}) {
    MoeCaseOptions options;
    options.experts = ranks == 3 ? 9 : 8;
    const MoeCase layer(options, random_);
    for (size_t count : {0u, 1u, 7u, 33u}) {
      const MoeTokens tokens =
          RandomTokens(count, 3, options.experts, options.hidden, Spread::kRandom, random_);
      for (const Path& path : AllPaths())
        ExpectOneAnswer(path, SetupOf(path, ranks, count), layer, tokens, Uneven(count, ranks));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(EpTest, OddRoutings) {
  MoeCaseOptions options;
  options.experts = 8;
  options.bias = true;
  const MoeCase layer(options, random_);
  for (Spread spread :
       {Spread::kAllToOne, Spread::kNoneToFirst, Spread::kSomeSkipped, Spread::kAllSkipped}) {
    for (size_t top_k : {1u, 2u, 7u}) {
      const MoeTokens tokens =
          RandomTokens(9, top_k, options.experts, options.hidden, spread, random_);
      for (const Path& path : AllPaths())
        ExpectOneAnswer(path, SetupOf(path, 4, 9), layer, tokens, {9, 0, 0, 0});
      if (HasFatalFailure()) return;
    }
  }
}

// Rows stay in the sender's memory above the limit, and are written to the receiver's below.
TEST_F(EpTest, PushAndPublish) {
  MoeCaseOptions options;
  options.experts = 8;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(40, 2, 8, options.hidden, Spread::kRandom, random_);
  for (size_t push_rows : {0u, 1u, 10u, 1000u}) {
    for (const Path& path : AllPaths()) {
      EpSetup setup = SetupOf(path, 2, 40);
      setup.options.push_rows = push_rows;
      ExpectOneAnswer(path, setup, layer, tokens, {30, 10});
    }
  }
}

TEST_F(EpTest, AcrossNodes) {
  MoeCaseOptions options;
  options.experts = 8;
  const MoeCase layer(options, random_);
  for (size_t node_size : {1u, 2u, 3u}) {
    for (size_t count : {0u, 1u, 21u}) {
      const MoeTokens tokens =
          RandomTokens(count, 3, 8, options.hidden, Spread::kSomeSkipped, random_);
      for (const Path& path : AllPaths()) {
        if (path.a2a == "ascend_fuseep") continue;  // inside a node only
        EpSetup setup = SetupOf(path, 4, count);
        setup.node_size = node_size;
        ExpectOneAnswer(path, setup, layer, tokens, Uneven(count, 4));
      }
      if (HasFatalFailure()) return;
    }
  }
}

// Nodes need not hold neighbouring ranks, and both ways between them give the same bits.
TEST_F(EpTest, RanksOfNodesInAnyOrder) {
  MoeCaseOptions options;
  options.experts = 12;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(25, 4, 12, options.hidden, Spread::kSomeSkipped, random_);
  for (const std::vector<size_t>& order :
       {std::vector<size_t>{0, 2, 4, 1, 3, 5}, {5, 4, 1, 0, 3, 2}}) {
    for (size_t node_size : {2u, 3u}) {
      for (Hierarchy hierarchy : {Hierarchy::kOn, Hierarchy::kOff}) {
        for (const Path& path : AllPaths()) {
          if (path.a2a == "ascend_fuseep") continue;  // inside a node only
          EpSetup setup = SetupOf(path, 6, 25);
          setup.node_size = node_size;
          setup.order = order;
          setup.options.hierarchy = hierarchy;
          setup.options.push_rows = 3;
          ExpectOneAnswer(path, setup, layer, tokens, Uneven(25, 6));
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

// What travels between nodes: a token once for each rank there, or once for each node.
TEST_F(EpTest, RowsBetweenNodes) {
  constexpr size_t kTokens = 24, kTopK = 8, kExperts = 16;
  MoeCaseOptions options;
  options.experts = kExperts;
  const MoeCase layer(options, random_);
  const MoeTokens tokens =
      RandomTokens(kTokens, kTopK, kExperts, options.hidden, Spread::kSomeSkipped, random_);
  // Of all tokens, six for each rank; ranks 0 and 1 are one node, 2 and 3 the other.
  size_t routes = 0, ranks = 0, nodes = 0;
  for (size_t t = 0; t < kTokens; ++t) {
    std::array<bool, 4> to_rank{};
    for (size_t slot = t * kTopK; slot < (t + 1) * kTopK; ++slot) {
      if (tokens.ids[slot] < 0) continue;
      const auto rank = static_cast<size_t>(tokens.ids[slot]) / 4;
      if (rank / 2 == t / 12) continue;
      ++routes;
      to_rank[rank] = true;
    }
    const size_t reached = static_cast<size_t>(std::count(to_rank.begin(), to_rank.end(), true));
    ranks += reached;
    nodes += reached != 0 ? 1 : 0;
  }
  ASSERT_LT(nodes, ranks);
  ASSERT_LT(ranks, routes);
  for (const bool deterministic : {true, false}) {
    for (const bool hierarchical : {true, false}) {
      EpSetup setup = SetupOf({"deepep", "aiter", DeepepMode::kNormal, true}, 4, 6);
      setup.node_size = 2;
      setup.options.deterministic = deterministic;
      setup.options.hierarchy = hierarchical ? Hierarchy::kAuto : Hierarchy::kOff;
      SCOPED_TRACE(setup.Describe());
      std::array<ExchangeStats, 4> sent;
      RunEp(setup, [&](EpRank& rank) {
        const size_t me = rank.world.rank();
        const auto moe = testing::MakeRankLayer(rank, setup, layer, kTopK);
        const MoeTokens mine = tokens.Slice(6 * me, 6);
        moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
        sent[me] = rank.ep.stats();
      });
      ExchangeStats all;
      for (const ExchangeStats& one : sent) all += one;
      EXPECT_EQ(all.rows_between_nodes, hierarchical ? nodes : ranks);
      EXPECT_EQ(all.results_between_nodes, deterministic ? routes : hierarchical ? nodes : ranks);
    }
  }
}

// Over rails the ranks of a node add up what they have of a token; near whatever the rows are.
TEST_F(EpTest, SummedByNodes) {
  MoeCaseOptions options;
  options.experts = 8;
  options.hidden = 128;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(17, 6, 8, options.hidden, Spread::kSomeSkipped, random_);
  const std::vector<float> exact = RunOneRank(layer, tokens, "aiter");
  const std::vector<double> exact64(exact.begin(), exact.end());
  for (const auto& [home, bound] : std::vector<std::pair<std::string, double>>{
           {"auto", 1e-6}, {"bf16", 6e-3}, {"fp8", 7e-2}, {"mxfp8", 7e-2}}) {
    for (const Path& path : AllPaths()) {
      if (path.a2a == "ascend_fuseep") continue;  // inside a node only
      if (path.own_tokens || path.runner == "reference") continue;
      if (path.a2a == "none" && (home == "fp8" || home == "mxfp8")) continue;  // plain rows only
      EpSetup setup = SetupOf(path, 4, 17);
      setup.node_size = 2;
      setup.layer.combine_dtype = home;
      setup.options.deterministic = false;
      SCOPED_TRACE(path.name() + " " + home);
      const std::vector<float> rows = RunSpread(setup, layer, {tokens})[0];
      EXPECT_LE(testing::RelativeL2(ConstRows(rows.data(), 17, 128), exact64, exact64), bound);
    }
  }
}

// Experts that quantise their activations get the codes of the sender.
TEST_F(EpTest, EveryScheme) {
  for (const SchemeEntry& scheme : BuiltinRegistry().schemes()) {
    // One scale over the batch of a rank depends on what is in it, by definition.
    if (scheme.act_quant == ActQuantKind::kFp8Tensor) continue;
    MoeCaseOptions options;
    options.experts = 4;
    options.hidden = 128;
    options.intermediate = 128;
    options.scheme_w13 = options.scheme_w2 = std::string(scheme.name);
    const MoeCase layer(options, random_);
    const MoeTokens tokens = RandomTokens(11, 2, 4, options.hidden, Spread::kRandom, random_);
    for (const Path& path : AllPaths()) {
      const auto& able = scheme.runners;
      const bool fuses =
          path.a2a == "ascend_fuseep" && (scheme.name == "unquant" || scheme.name == "w8a8_int8");
      if (!fuses && std::find(able.begin(), able.end(), path.runner) == able.end()) continue;
      if (path.runner == "reference") continue;  // f64: judged by the other tests
      SCOPED_TRACE(scheme.name);
      ExpectOneAnswer(path, SetupOf(path, 2, 11), layer, tokens, {4, 7});
    }
    if (HasFatalFailure()) return;
  }
}

// Ranks that split the experts, and copies of all experts.
TEST_F(EpTest, MoeTpAndMoeDp) {
  MoeCaseOptions options;
  options.experts = 4;
  options.bias = true;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(13, 2, 4, options.hidden, Spread::kRandom, random_);
  for (const auto& [ranks, moe_tp, moe_dp, node_size] :
       std::vector<std::array<size_t, 4>>{{2, 2, 1, 2},
                                          {4, 2, 1, 4},
                                          {4, 4, 1, 4},
                                          {4, 1, 2, 4},
                                          {8, 2, 2, 8},
                                          {4, 2, 1, 2},
                                          {4, 4, 1, 2},
                                          {8, 4, 1, 2},
                                          {8, 1, 2, 2}}) {
    for (const bool own : {false, true}) {
      for (const char* runner : {"aiter", "reference", "ascend"}) {
        const bool ascend = runner == std::string_view("ascend");
        if (ascend && (own || ranks != moe_tp * moe_dp)) continue;
        if (own && moe_dp != 1) continue;
        EpSetup setup = SetupOf({"none", runner, DeepepMode::kAuto, own}, ranks, 13);
        setup.moe_tp = moe_tp;
        setup.moe_dp = moe_dp;
        setup.node_size = node_size;
        SCOPED_TRACE(setup.Describe());
        std::vector<MoeTokens> sources{tokens};
        if (own) {
          sources.assign(ranks, tokens.Slice(0, 0));
          sources[0] = tokens.Slice(0, 5);
          sources.back() = tokens.Slice(5, 8);
        }
        std::vector<float> found;
        for (const std::vector<float>& rows : RunSpread(setup, layer, sources))
          found.insert(found.end(), rows.begin(), rows.end());
        const std::vector<float> expected = RunOneRank(layer, tokens, runner);
        ASSERT_EQ(found.size(), expected.size());
        // The sum over I is cut in parts, so only nearly the same.
        for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 2e-6);
      }
    }
  }
}

// Ranks that sum what they have, and rows that are rounded on their way: near, and the same for
// every path.
TEST_F(EpTest, SummedByRanksAndRoundedRows) {
  MoeCaseOptions options;
  options.experts = 8;
  options.hidden = 128;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(17, 4, 8, options.hidden, Spread::kRandom, random_);
  const std::vector<float> exact = RunOneRank(layer, tokens, "aiter");
  const std::vector<double> exact64(exact.begin(), exact.end());
  const auto run = [&](const Path& path, const std::string& out, const std::string& home,
                       bool deterministic, size_t ranks) {
    EpSetup setup = SetupOf(path, ranks, 17);
    setup.layer.dispatch_dtype = out;
    setup.layer.combine_dtype = home;
    setup.options.deterministic = deterministic;
    return RunSpread(setup, layer, {tokens})[0];
  };
  struct Rounding {
    const char* out;
    const char* home;
    double bound;  // of the relative L2 distance
  };
  for (const Path& path : AllPaths()) {
    if (path.own_tokens || path.runner == "reference" || path.a2a == "ascend_fuseep") continue;
    for (const Rounding& rounding :
         {Rounding{"auto", "auto", 1e-6}, Rounding{"bf16", "auto", 4e-3},
          Rounding{"auto", "bf16", 4e-3}, Rounding{"fp8", "auto", 5e-2},
          Rounding{"int8", "auto", 1.5e-2}, Rounding{"mxfp8", "fp8", 7e-2},
          Rounding{"mxfp4", "mxfp8", 2.5e-1}}) {
      if (path.a2a == "none" && std::string_view(rounding.out) != "auto") continue;
      if (path.a2a == "mori" && std::string_view(rounding.out) == "int8") continue;
      SCOPED_TRACE(fmt::format("{}: {} {}", path.name(), rounding.out, rounding.home));
      std::vector<float> first;
      for (size_t ranks : {1u, 4u}) {
        for (bool deterministic : {true, false}) {
          const std::vector<float> rows =
              run(path, rounding.out, rounding.home, deterministic, ranks);
          const double distance =
              testing::RelativeL2(ConstRows(rows.data(), 17, 128), exact64, exact64);
          EXPECT_LE(distance, rounding.bound);
          if (!deterministic) continue;
          if (first.empty()) first = rows;
          EXPECT_EQ(rows, first) << "rounding depends on the number of ranks";
        }
      }
    }
  }
}

// --- What goes wrong
// ------------------------------------------------------------------------------

TEST_F(EpTest, OneTokenTooManyIsAnErrorOnEveryRankAndTheNextPassWorks) {
  MoeCaseOptions options;
  options.experts = 4;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(9, 2, 4, options.hidden, Spread::kRandom, random_);
  for (const Path& path : AllPaths()) {
    if (!path.own_tokens || path.a2a == "mooncake" || path.a2a == "nixl") continue;
    if (path.a2a == "ascend_fuseep") continue;  // tests/moe/fuseep
    SCOPED_TRACE(path.name());
    EpSetup setup = SetupOf(path, 2, 4);
    const std::string setting =
        path.mode == DeepepMode::kLowLatency ? "num-max-dispatch-tokens-per-rank" : "chunk";
    RunEp(setup, [&](EpRank& rank) {
      const auto moe = testing::MakeRankLayer(rank, setup, layer, 2);
      const auto run = [&](size_t count) {
        const MoeTokens mine = tokens.Slice(0, rank.world.rank() == 0 ? count : 2);
        rank.ep.BeginPass(path.mode == DeepepMode::kLowLatency ? ForwardPhase::kDecode
                                                               : ForwardPhase::kPrefill);
        return moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
      };
      EXPECT_EQ(run(4).rows, rank.world.rank() == 0 ? 4u : 2u) << "the limit itself";
      if (rank.world.rank() == 0) {
        ExpectError(ErrorCode::kInvalidArgument, {"5 tokens", setting, "allows 4", "step 2"},
                    [&] { run(5); });
      } else {
        ExpectError(ErrorCode::kUnavailable, {"rank 0 has given this step up", "rank 1", "layer 0"},
                    [&] { run(5); });
      }
      EXPECT_EQ(run(3).rows, rank.world.rank() == 0 ? 3u : 2u) << "usable again";
    });
  }
}

// Between nodes a rank that fails ends the group, at once for those who wait on either leg.
TEST_F(EpTest, AFailureBetweenNodesReachesEveryRank) {
  MoeCaseOptions options;
  options.experts = 8;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(9, 4, 8, options.hidden, Spread::kRandom, random_);
  for (Hierarchy hierarchy : {Hierarchy::kOn, Hierarchy::kOff}) {
    for (size_t who = 0; who < 4; ++who) {
      for (int stage = 0; stage < 4; ++stage) {
        EpSetup setup = SetupOf({"deepep", "aiter", DeepepMode::kNormal, true}, 4, 9);
        setup.node_size = 2;
        setup.options.hierarchy = hierarchy;
        setup.options.timeout = std::chrono::seconds(60);
        SCOPED_TRACE(fmt::format("rank {} after stage {}", who, stage));
        const auto start = std::chrono::steady_clock::now();
        RunEp(setup, [&](EpRank& rank) {
          const auto moe = testing::MakeRankLayer(rank, setup, layer, 4);
          Dispatcher& dispatcher = moe->dispatcher();
          const bool fails = rank.world.rank() == who;
          const auto step = [&] {
            if (fails && stage == 0) {
              // Ids that are none; found before anything is sent.
              std::vector<int32_t> ids(tokens.ids.size(), 99);
              TopKOutput topk = tokens.TopK();
              topk.ids = ids;
              dispatcher.DispatchA(rank.context, tokens.Hidden(), topk);
            }
            dispatcher.DispatchA(rank.context, tokens.Hidden(), tokens.TopK());
            if (fails && stage == 1) return dispatcher.Abort();
            const DispatchOutput& output = dispatcher.DispatchB(rank.context);
            if (fails && stage == 2) return dispatcher.Abort();
            dispatcher.CombineA(rank.context, moe->Apply(rank.context, output));
            if (fails && stage == 3) return dispatcher.Abort();
            dispatcher.CombineB(rank.context);
          };
          if (fails && stage == 0) {
            ExpectError(ErrorCode::kInvalidArgument, {"99"}, step);
            return;
          }
          if (fails) return step();
          // One step may still find all it needs, the next one does not.
          ExpectError(ErrorCode::kUnavailable, {fmt::format("rank {}", who)}, [&] {
            step();
            step();
          });
        });
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
      }
    }
  }
}

// A rank that says nothing any more, whichever leg it is missing on.
TEST_F(EpTest, ALostRankBetweenNodes) {
  MoeCaseOptions options;
  options.experts = 8;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(6, 4, 8, options.hidden, Spread::kRandom, random_);
  for (const char* a2a : {"deepep", "mooncake"}) {
    EpSetup setup = SetupOf({a2a, "aiter", DeepepMode::kAuto, true}, 4, 6);
    setup.node_size = 2;
    setup.options.timeout = std::chrono::milliseconds(300);
    SCOPED_TRACE(a2a);
    RunEp(setup, [&](EpRank& rank) {
      const auto moe = testing::MakeRankLayer(rank, setup, layer, 4);
      const auto run = [&] { moe->ForwardRouted(rank.context, tokens.Hidden(), tokens.TopK()); };
      run();
      if (rank.world.rank() != 2) ExpectError(ErrorCode::kUnavailable, {"rank"}, run);
    });
  }
}

TEST_F(EpTest, RefusalsAtStartUp) {
  MoeCaseOptions options;
  options.experts = 6;
  const MoeCase layer(options, random_);
  const auto refused = [&](EpSetup setup, ErrorCode code,
                           std::initializer_list<std::string_view> words) {
    RunEp(setup, [&](EpRank& rank) {
      ExpectError(code, words, [&] { testing::MakeRankLayer(rank, setup, layer, 2); });
    });
  };
  EpSetup uneven = SetupOf({"deepep", "aiter"}, 4, 4);
  refused(uneven, ErrorCode::kInvalidArgument,
          {"6 experts", "4 ranks", "--ep-num-redundant-experts 2"});
  EpSetup many = SetupOf({"deepep", "aiter"}, 8, 4);
  refused(many, ErrorCode::kInvalidArgument,
          {"--moe-ep-size 8", "only 6 experts", "--ep-num-redundant-experts 2"});
  EpSetup reference = SetupOf({"deepep", "reference"}, 2, 4);
  refused(reference, ErrorCode::kUnsupported, {"deepep", "reference", "(none, reference)"});
  EpSetup ascend = SetupOf({"mori", "ascend"}, 2, 4);
  EXPECT_ANY_THROW(RunSpread(ascend, layer, {RandomTokens(1, 2, 6, 64, Spread::kRandom, random_)}));

  MoeLayerOptions alone;
  alone.a2a = "deepep";
  ExpectError(ErrorCode::kFailedPrecondition, {"layer 0", "deepep_normal", "process groups"}, [&] {
    MoeLayer(BuiltinRegistry(), testing::LayerConfigOf(layer, 2), alone, layer.Weights());
  });
}

// A rank that is not there any more: the others say so, or, with an elastic protocol, go on
// without what it had.
TEST_F(EpTest, LostRanks) {
  MoeCaseOptions options;
  options.experts = 8;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(6, 2, 8, options.hidden, Spread::kRandom, random_);
  for (const char* a2a : {"mooncake", "nixl", "deepep"}) {
    SCOPED_TRACE(a2a);
    EpSetup setup = SetupOf({a2a, "aiter", DeepepMode::kAuto, true}, 4, 6);
    if (a2a == std::string_view("deepep")) setup.options.deepep_mode = DeepepMode::kLowLatency;
    setup.options.timeout = std::chrono::milliseconds(300);
    // What is left without rank 2 and its experts 4 and 5.
    MoeTokens without = tokens;
    for (size_t slot = 0; slot < without.ids.size(); ++slot) {
      if (without.ids[slot] / 2 == 2) without.ids[slot] = -1;
    }
    const std::vector<float> expected = RunOneRank(layer, without, "aiter");
    RunEp(setup, [&](EpRank& rank) {
      const auto moe = testing::MakeRankLayer(rank, setup, layer, 2);
      const auto run = [&](const MoeTokens& mine) {
        rank.ep.BeginPass(ForwardPhase::kDecode);
        const Rows rows = moe->ForwardRouted(rank.context, mine.Hidden(), mine.TopK());
        std::vector<float> values;
        for (size_t t = 0; t < rows.rows; ++t)
          values.insert(values.end(), rows.Row(t), rows.Row(t) + rows.cols);
        return values;
      };
      run(tokens);
      if (rank.world.rank() != 2) {
        if (a2a == std::string_view("deepep")) {
          ExpectError(ErrorCode::kUnavailable,
                      {"rank 2", "layer 0", "step 2", "deepep_ll dispatch"}, [&] { run(tokens); });
        } else {
          std::vector<size_t> lost;
          rank.ep.SetOnRankLost([&](size_t who, std::string_view) { lost.push_back(who); });
          for (int step = 0; step < 3; ++step) EXPECT_EQ(run(tokens), expected);
          EXPECT_EQ(lost, std::vector<size_t>{2});
          EXPECT_EQ(rank.ep.active_ranks()[2], 0);
        }
      }
    });
  }
}

TEST_F(EpTest, HooksReplaceWhatPasses) {
  MoeCaseOptions options;
  options.experts = 4;
  const MoeCase layer(options, random_);
  const MoeTokens tokens = RandomTokens(3, 2, 4, options.hidden, Spread::kRandom, random_);
  MoeLayer moe(BuiltinRegistry(), testing::LayerConfigOf(layer, 2), {.runner = "aiter"},
               layer.Weights());
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  std::string order;
  Dispatcher& dispatcher = moe.dispatcher();
  HookHandle first = dispatcher.pre_dispatch_hooks().Register(
      [&](ExecContext&, ConstRows& hidden, TopKOutput& topk) {
        order += "1";
        hidden = hidden.Slice(0, 2);
        topk.num_tokens = 2;
        topk.ids = topk.ids.first(4);
        topk.weights = topk.weights.first(4);
      });
  HookHandle second = dispatcher.pre_dispatch_hooks().Register(
      [&](ExecContext&, ConstRows&, TopKOutput&) { order += "2"; });
  dispatcher.dispatch_hooks().Register([&](ExecContext&) { order += "d"; });
  dispatcher.post_dispatch_hooks().Register(
      [&](ExecContext&, const DispatchOutput*&) { order += "o"; });
  dispatcher.pre_combine_hooks().Register(
      [&](ExecContext&, const CombineInput*&) { order += "c"; });
  dispatcher.post_combine_hooks().Register([&](ExecContext&, Rows& rows) {
    order += "r";
    rows = rows.Slice(0, 1);
  });
  EXPECT_NE(first.id(), second.id());
  EXPECT_EQ(moe.ForwardRouted(context, tokens.Hidden(), tokens.TopK()).rows, 1u);
  EXPECT_EQ(order, "12docr");
  second.Remove();
  second.Remove();
  order.clear();
  moe.ForwardRouted(context, tokens.Hidden(), tokens.TopK());
  EXPECT_EQ(order, "1docr");
}

}  // namespace
}  // namespace switchyard::moe
