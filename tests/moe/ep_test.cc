// Layers spread over ranks: every dispatcher, against the same layer on one rank. Contract 8.4.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
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

  // One rank without groups: what all others are held to.
  std::vector<float> OneRank(const MoeCase& layer, const MoeTokens& tokens,
                             const std::string& runner) {
    MoeLayerOptions options;
    options.runner = runner;
    options.act_dtype = "f32";
    MoeLayer moe(BuiltinRegistry(), testing::LayerConfigOf(layer, tokens.top_k), options,
                 layer.Weights());
    ThreadPool pool(1);
    Arena arena;
    ExecContext context{pool, arena};
    const Rows rows = moe.ForwardRouted(context, tokens.Hidden(), tokens.TopK());
    std::vector<float> values;
    for (size_t t = 0; t < rows.rows; ++t)
      values.insert(values.end(), rows.Row(t), rows.Row(t) + rows.cols);
    return values;
  }

  // Spreads `tokens` as the path says (all to everybody, or some to each rank) and compares bits.
  void ExpectOneAnswer(const Path& path, EpSetup setup, const MoeCase& layer,
                       const MoeTokens& tokens, const std::vector<size_t>& counts) {
    SCOPED_TRACE(path.name() + ": " + setup.Describe());
    const std::vector<float> expected = OneRank(layer, tokens, path.runner);
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
  for (size_t ranks : {1, 2, 3, 4, 8}) {
    MoeCaseOptions options;
    options.experts = ranks == 3 ? 9 : 8;
    const MoeCase layer(options, random_);
    for (size_t count : {0, 1, 7, 33}) {
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
    for (size_t top_k : {1, 2, 7}) {
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
  for (size_t push_rows : {0, 1, 10, 1000}) {
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
  for (size_t node_size : {1, 2, 3}) {
    for (size_t count : {0, 1, 21}) {
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
  for (const auto& [ranks, moe_tp, moe_dp] :
       std::vector<std::array<size_t, 3>>{{2, 2, 1}, {4, 2, 1}, {4, 4, 1}, {4, 1, 2}, {8, 2, 2}}) {
    for (const bool own : {false, true}) {
      for (const char* runner : {"aiter", "reference", "ascend"}) {
        const bool ascend = runner == std::string_view("ascend");
        if (ascend && (own || ranks != moe_tp * moe_dp)) continue;
        if (own && moe_dp != 1) continue;
        EpSetup setup = SetupOf({"none", runner, DeepepMode::kAuto, own}, ranks, 13);
        setup.moe_tp = moe_tp;
        setup.moe_dp = moe_dp;
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
        const std::vector<float> expected = OneRank(layer, tokens, runner);
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
  const std::vector<float> exact = OneRank(layer, tokens, "aiter");
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
      for (size_t ranks : {1, 4}) {
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
    const std::vector<float> expected = OneRank(layer, without, "aiter");
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

TEST_F(EpTest, ManyRandomSteps) {
  constexpr size_t kSteps = 300;
  MoeCaseOptions options;
  options.experts = 8;
  options.hidden = 32;
  options.intermediate = 16;
  const MoeCase layer(options, random_);
  std::vector<MoeTokens> batches;
  std::vector<std::vector<float>> expected;
  for (size_t i = 0; i < 12; ++i) {
    batches.push_back(RandomTokens(i, 2, 8, 32, Spread::kSomeSkipped, random_));
    expected.push_back(OneRank(layer, batches.back(), "aiter"));
  }
  EpSetup setup = SetupOf({"none", "aiter", DeepepMode::kAuto, true}, 4, 12);
  setup.options.push_rows = 5;
  RunEp(setup, [&](EpRank& rank) {
    std::vector<std::unique_ptr<MoeLayer>> layers;
    for (const char* a2a : {"none", "deepep", "mooncake", "mori", "deepep"}) {
      EpSetup one = setup;
      one.layer.a2a = a2a;
      layers.push_back(testing::MakeRankLayer(rank, one, layer, 2));
    }
    std::mt19937_64 together(7);
    std::mt19937_64 alone(rank.world.rank());
    for (size_t step = 0; step < kSteps; ++step) {
      rank.ep.BeginPass(together() % 2 == 0 ? ForwardPhase::kDecode : ForwardPhase::kPrefill);
      MoeLayer& moe = *layers[together() % layers.size()];
      const size_t batch = alone() % batches.size();
      const bool give_up = together() % 10 == 0;
      rank.arena.Reset();
      if (give_up) {  // between two stages, all ranks
        moe.dispatcher().DispatchA(rank.context, batches[batch].Hidden(), batches[batch].TopK());
        if (together() % 2 == 0) {
          moe.dispatcher().DispatchB(rank.context);
        } else {
          static_cast<void>(together());
        }
        moe.dispatcher().Abort();
        continue;
      }
      const Rows rows =
          moe.ForwardRouted(rank.context, batches[batch].Hidden(), batches[batch].TopK());
      ASSERT_EQ(rows.rows, batches[batch].count);
      for (size_t t = 0; t < rows.rows; ++t) {
        for (size_t h = 0; h < rows.cols; ++h)
          ASSERT_EQ(rows.Row(t)[h], expected[batch][t * rows.cols + h]) << "step " << step;
      }
    }
  });
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
