// What must be refused, and the traps of the contract. After every refusal the same layer,
// dispatcher or runner gives the right answer again, with the same bits as before.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/runners/aiter.h"
#include "testing/errors.h"
#include "testing/moe_truth.h"
#include "testing/one_rank.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::DispatchOptions;
using testing::ExpectError;
using testing::MoeCase;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::MoeTruth;
using testing::Realisation;
using testing::RealisationsOf;
using testing::SimulatedDispatch;
using testing::Spread;
using Kind = testing::Realisation::Kind;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr auto kLowest = std::numeric_limits<int32_t>::min();
constexpr auto kHighest = std::numeric_limits<int32_t>::max();

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> Values(ConstRows rows) {
  std::vector<float> values;
  for (size_t i = 0; i < rows.rows; ++i)
    values.insert(values.end(), rows.Row(i), rows.Row(i) + rows.cols);
  return values;
}

// Every promise but one is kept; one such set for each of the four.
std::vector<DispatchPromises> WithOneChanged(const DispatchPromises& promises) {
  std::vector<DispatchPromises> changed(4, promises);
  changed[0].row_kind = promises.row_kind == RowKind::kToken ? RowKind::kExpanded : RowKind::kToken;
  changed[1].weights_applied_by = promises.weights_applied_by == WeightsAppliedBy::kRunner
                                      ? WeightsAppliedBy::kCombine
                                      : WeightsAppliedBy::kRunner;
  changed[2].id_space = promises.id_space == IdSpace::kLocal ? IdSpace::kGlobal : IdSpace::kLocal;
  changed[3].sums_owed =
      promises.sums_owed == SumsOwed::kNone ? SumsOwed::kExpertParallel : SumsOwed::kNone;
  return changed;
}

class NegativeTest : public ::testing::Test {
 protected:
  NegativeTest() {
    config_.topk.num_experts = 6;
    config_.topk.top_k = 2;
    config_.runner.layer_id = 9;
  }

  const Registry& registry_ = BuiltinRegistry();
  std::mt19937_64 random_ = testing::MakeRandom(61);
  ThreadPool pool_{2};
  Arena arena_;
  ExecContext context_{pool_, arena_};
  MoeCase case_{{.bias = true}, random_};
  MoeTokens tokens_ = testing::RandomTokens(5, 2, 6, 64, Spread::kSomeSkipped, random_);
  MoeLayerConfig config_;
};

// ---- the whole layer

class LayerNegativeTest : public NegativeTest {
 protected:
  // The call is refused, and the layer is as good as before.
  void ExpectRefused(MoeLayer& layer, std::initializer_list<std::string_view> words,
                     ConstRows hidden, const TopKOutput& topk) {
    ExpectError(ErrorCode::kInvalidArgument, words,
                [&] { layer.ForwardRouted(context_, hidden, topk); });
    const auto good = Values(layer.ForwardRouted(context_, tokens_.Hidden(), tokens_.TopK()));
    if (good_.empty()) good_ = good;
    EXPECT_TRUE(SameBits(good, good_));
  }

  // Layers with every runner that takes part without an exchange.
  void ForEachRunner(const std::function<void(MoeLayer&)>& body) {
    size_t runners = 0;
    for (std::string_view runner : registry_.FindScheme("unquant").runners) {
      SCOPED_TRACE(runner);
      good_.clear();
      std::unique_ptr<MoeLayer> layer;
      try {
        layer = std::make_unique<MoeLayer>(
            registry_, config_, MoeLayerOptions{.runner = std::string(runner)}, case_.Weights());
      } catch (const Error& error) {
        EXPECT_NE(error.code(), ErrorCode::kInternal) << error.message();
        continue;  // a runner of the list that is not built in
      }
      ++runners;
      body(*layer);
    }
    EXPECT_GE(runners, 2u);
  }

  std::vector<float> good_;
};

TEST_F(LayerNegativeTest, IdsOutOfRange) {
  ForEachRunner([&](MoeLayer& layer) {
    for (int32_t id : {6, 7, -2, kLowest, kHighest}) {
      MoeTokens bad = tokens_;
      bad.ids[5] = id;
      ExpectRefused(layer, {"layer 9", std::to_string(id)}, bad.Hidden(), bad.TopK());
    }
  });
}

TEST_F(LayerNegativeTest, ShapesThatContradict) {
  ForEachRunner([&](MoeLayer& layer) {
    const ConstRows hidden = tokens_.Hidden();
    const TopKOutput topk = tokens_.TopK();
    ExpectRefused(layer, {"layer 9", "63 columns", "expected 64"},
                  ConstRows(hidden.data, 5, 63, 64), topk);
    ExpectRefused(layer, {"layer 9", "4 rows", "5 tokens"}, hidden.Slice(0, 4), topk);
    TopKOutput bad = topk;
    bad.num_tokens = 6;
    ExpectRefused(layer, {"5 rows", "6 tokens"}, hidden, bad);
    bad = topk;
    bad.ids = topk.ids.first(9);
    ExpectRefused(layer, {"9 ids"}, hidden, bad);
    bad = topk;
    bad.weights = topk.weights.first(9);
    ExpectRefused(layer, {"9 weights"}, hidden, bad);
    bad = topk;
    bad.top_k = 3;
    ExpectRefused(layer, {"top_k 3"}, hidden, bad);
    ExpectRefused(layer, {"0 rows"}, hidden.Slice(0, 0), topk);
  });
}

TEST_F(LayerNegativeTest, UnknownNames) {
  const auto build = [&](const MoeLayerConfig& config, const MoeLayerOptions& options) {
    MoeLayer(registry_, config, options, case_.Weights());
  };
  ExpectError(ErrorCode::kNotFound, {"runner \"aitr\"", "did you mean \"aiter\""},
              [&] { build(config_, {.runner = "aitr"}); });
  ExpectError(ErrorCode::kUnsupported, {"--moe-a2a mooncak"},
              [&] { build(config_, {.a2a = "mooncak"}); });
  MoeLayerConfig bad = config_;
  bad.scheme_w13 = "unqant";
  ExpectError(ErrorCode::kNotFound, {"scheme \"unqant\"", "unquant"}, [&] { build(bad, {}); });
  bad = config_;
  bad.runner.activation = "silo";
  ExpectError(ErrorCode::kNotFound, {"layer 9", "\"silo\"", "silu"}, [&] { build(bad, {}); });
  bad = config_;
  bad.runner.is_gated = false;
  bad.runner.activation = "situ";
  ExpectError(ErrorCode::kUnsupported, {"layer 9", "\"situ\""}, [&] { build(bad, {}); });
}

TEST_F(LayerNegativeTest, UnregisteredPair) {
  for (const RunnerEntry& entry : registry_.runners()) {
    for (DispatchFormat format : {DispatchFormat::kFlashinfer, DispatchFormat::kDeepepV2}) {
      bool registered = false;
      for (const PrePermuteEntry& pre : registry_.pre_permutes())
        registered |= pre.format == format && pre.runner == entry.name;
      if (registered) continue;
      ExpectError(ErrorCode::kNotFound, {entry.name, DispatchFormatName(format)}, [&] {
        MoeRunner::Create(registry_, {std::string(entry.name), "none", true}, case_.Config(2),
                          format);
      });
    }
  }
}

// A bank in a format of another scheme, for every pair of schemes; and each list that is missing or
// of another length.
TEST_F(LayerNegativeTest, MixedBanks) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    const std::string name(scheme.name);
    SCOPED_TRACE(name);
    const MoeCase layer({.scheme_w13 = name, .scheme_w2 = name, .bias = true}, random_);
    MoeLayerConfig config = config_;
    config.scheme_w13 = config.scheme_w2 = name;
    const auto build = [&](const ExpertWeights& weights) {
      MoeLayer(registry_, config, {.runner = "reference"}, weights);
    };
    EXPECT_NO_THROW(build(layer.Weights()));
    for (const SchemeEntry& other : registry_.schemes()) {
      const std::string other_name(other.name);
      const MoeCase foreign({.scheme_w13 = other_name, .scheme_w2 = other_name}, random_);
      const ExpertBank& bank = foreign.Weights().w2;
      if (scheme.accepts(bank.format, bank.rows, bank.cols)) continue;
      ExpertWeights weights = layer.Weights();
      weights.w2 = bank;
      ExpectError(ErrorCode::kInvalidArgument,
                  {"layer 9", "w2 (down)", name, DTypeName(bank.format.dtype)},
                  [&] { build(weights); });
    }
    const auto refuses = [&](std::initializer_list<std::string_view> words,
                             const std::function<void(ExpertWeights&)>& edit) {
      ExpertWeights weights = layer.Weights();
      edit(weights);
      ExpectError(ErrorCode::kInvalidArgument, words, [&] { build(weights); });
    };
    refuses({"w1 (gate)", "6 experts", "weights of 5"},
            [](ExpertWeights& w) { w.w1.data.pop_back(); });
    refuses({"w3 (up)", "expected [32, 64]", "found [31, 64]"},
            [](ExpertWeights& w) { w.w3.rows = 31; });
    refuses({"w2 (down)", "biases of 5 experts", "expected 6"},
            [](ExpertWeights& w) { w.w2.bias.pop_back(); });
    refuses({"w2 (down)", "null"}, [](ExpertWeights& w) { w.w2.bias[3] = nullptr; });
    refuses({"w1 (gate)", "null"}, [](ExpertWeights& w) { w.w1.data[5] = nullptr; });
    refuses({"w1 (gate)", "every 63 values"}, [](ExpertWeights& w) { w.w1.stride = 63; });
    const MatrixFormat& format = layer.Weights().w1.format;
    if (format.is_quantized()) {
      refuses({"w3 (up)", "needs scales of 6 experts", "found 0"},
              [](ExpertWeights& w) { w.w3.scale.clear(); });
      refuses({"w2 (down)", "needs scales of 6 experts", "found 7"},
              [](ExpertWeights& w) { w.w2.scale.push_back(w.w2.scale[0]); });
      refuses({"w2 (down)", "I8 per"},
              [](ExpertWeights& w) { w.w2.format.scale_dtype = DType::kI8; });
      refuses({"w2 (down)"}, [](ExpertWeights& w) { w.w2.format.scale_cols = 0; });
    }
    if (format.has_zero) {
      refuses({"w2 (down)", "zero points of 6 experts", "found 5"},
              [](ExpertWeights& w) { w.w2.zero.pop_back(); });
    }
  }
  // Gate and up in two formats of one scheme.
  const MoeCase f32({.bias = false}, random_);
  const MoeCase bf16({.variant = 1}, random_);
  ExpertWeights mixed = f32.Weights();
  mixed.w3 = bf16.Weights().w3;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "w1 (gate)", "F32", "w3 (up)", "BF16"},
              [&] { MoeLayer(registry_, config_, {}, mixed); });
}

TEST_F(LayerNegativeTest, MasksAndPadding) {
  MoeLayerConfig bad = config_;
  bad.expert_mask = {1, 1, 1, 1, 1};
  const auto build = [&] { MoeLayer(registry_, bad, {}, case_.Weights()); };
  ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "mask", "5 entries", "expected 6"}, build);
  bad.expert_mask = {1, 1, 1, 1, 1, 0};
  ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "5 experts", "weights of 6"}, build);
  bad = config_;
  bad.hidden_pad = 64;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "padding"}, build);
  bad = config_;
  bad.intermediate_pad = 32;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "padding"}, build);
}

TEST_F(LayerNegativeTest, RouterWeightOnInputNeedsTopOne) {
  config_.runner.apply_router_weight_on_input = true;
  for (const char* runner : {"aiter", "reference"}) {
    ExpectError(ErrorCode::kUnsupported,
                {"layer 9", runner, "apply_router_weight_on_input", "top_k 1", "2"},
                [&] { MoeLayer(registry_, config_, {.runner = runner}, case_.Weights()); });
  }
  config_.topk.top_k = 1;
  for (const char* runner : {"aiter", "reference"}) {
    // A call with more columns than the layer was built for would take weights of other tokens.
    MoeLayer layer(registry_, config_, {.runner = runner}, case_.Weights());
    ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "top_k 1", "2"},
                [&] { layer.ForwardRouted(context_, tokens_.Hidden(), tokens_.TopK()); });
    const MoeTokens one = testing::RandomTokens(3, 1, 6, 64, Spread::kRandom, random_);
    EXPECT_EQ(layer.ForwardRouted(context_, one.Hidden(), one.TopK()).rows, 3u);
  }
}

// ---- dispatchers

// An answer of another format, other promises, or rows that are not summed.
class DispatcherNegativeTest : public NegativeTest {
 protected:
  // A runner behind this dispatcher.
  std::unique_ptr<MoeRunner> RunnerFor(const DispatcherEntry& entry) const {
    for (const PrePermuteEntry& pre : registry_.pre_permutes()) {
      if (pre.format == entry.format)
        return MoeRunner::Create(registry_, {std::string(pre.runner), "none", true},
                                 case_.Config(2), entry.format);
    }
    return nullptr;
  }

  // Copies of the answer that must be refused, as the struct that the format has.
  template <typename Concrete>
  void ExpectRefusals(Dispatcher& dispatcher, const CombineInput& answer) {
    for (const DispatchPromises& promises : WithOneChanged(answer.promises)) {
      Concrete bad = As<Concrete>(answer);
      bad.promises = promises;
      ExpectError(ErrorCode::kInvalidArgument,
                  {"layer 9", DescribePromises(promises), DescribePromises(answer.promises)},
                  [&] { dispatcher.Combine(context_, bad); });
    }
    for (RoutewiseLayout layout : {RoutewiseLayout::kTokenTopk, RoutewiseLayout::kExpanded}) {
      Concrete bad = As<Concrete>(answer);
      bad.routewise = layout;
      ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "routewise"},
                  [&] { dispatcher.Combine(context_, bad); });
    }
    Concrete bad = As<Concrete>(answer);
    bad.hidden_states.rows -= 1;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 9"},
                [&] { dispatcher.Combine(context_, bad); });
  }
};

TEST_F(DispatcherNegativeTest, StagesFormatsAndPromises) {
  for (const DispatcherEntry& entry : registry_.dispatchers()) {
    if (entry.a2a != "none") continue;  // those need ranks: tests/moe/ep
    SCOPED_TRACE(entry.name);
    MoeRunnerConfig config = case_.Config(2);
    config.layer_id = 9;
    const auto dispatcher = entry.make({config, "aiter"});
    const auto runner = RunnerFor(entry);
    ASSERT_NE(runner, nullptr);
    const auto dispatch = [&]() -> const DispatchOutput& {
      return dispatcher->Dispatch(context_, tokens_.Hidden(), tokens_.TopK());
    };
    const auto answer = [&]() -> const CombineInput& {
      return runner->Run(context_, dispatch(), case_.Info());
    };
    const std::vector<float> good = Values(dispatcher->Combine(context_, answer()));

    const CombineInput& late = answer();
    dispatcher->Combine(context_, late);
    ExpectError(ErrorCode::kFailedPrecondition, {"layer 9", "combine"},
                [&] { dispatcher->Combine(context_, late); });
    dispatch();
    ExpectError(ErrorCode::kFailedPrecondition, {"layer 9", "outstanding"}, dispatch);
    dispatcher->Abort();
    dispatcher->Abort();  // harmless
    ExpectError(ErrorCode::kFailedPrecondition, {"layer 9", "combine"},
                [&] { dispatcher->Combine(context_, late); });

    const CombineInput& kept = answer();
    if (entry.format == DispatchFormat::kStandard) {
      const AscendTpCombineInput other(As<StandardCombineInput>(kept).hidden_states, kTokenRows);
      ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "standard", "ascend_tp"},
                  [&] { dispatcher->Combine(context_, other); });
      ExpectRefusals<StandardCombineInput>(*dispatcher, kept);
    } else {
      const StandardCombineInput other(context_.arena.AllocateRows(5, 64), kept.promises);
      ExpectError(ErrorCode::kInvalidArgument,
                  {"layer 9", "standard", DispatchFormatName(entry.format)},
                  [&] { dispatcher->Combine(context_, other); });
      if (entry.format == DispatchFormat::kAscendTp)
        ExpectRefusals<AscendTpCombineInput>(*dispatcher, kept);
    }
    // A refused combine leaves the dispatch outstanding: the right answer still counts.
    EXPECT_TRUE(SameBits(Values(dispatcher->Combine(context_, kept)), good));
    EXPECT_TRUE(SameBits(Values(dispatcher->Combine(context_, answer())), good));
  }
}

// A runner that answers with another format or other promises than the dispatch has is a bug of
// ours, and is found before combine.
DispatchPromises lie;
DispatchFormat lied_format;

TEST_F(DispatcherNegativeTest, ARunnerThatBreaksAPromise) {
  Registry registry;
  RegisterBuiltins(registry);
  registry.Add(FusedEntry{
      "none", "aiter",
      [](ExecContext& context, const DispatchOutput& output, const MoeQuantInfo&,
         const MoeRunnerConfig& config) -> const CombineInput& {
        auto* answer = context.arena.New<StandardCombineInput>(
            context.arena.AllocateRows(As<StandardDispatchOutput>(output).hidden_states.rows,
                                       config.hidden_size),
            lie);
        answer->format = lied_format;
        return *answer;
      }});
  MoeLayer layer(registry, config_, {.runner = "aiter"}, case_.Weights());
  const auto call = [&] { layer.ForwardRouted(context_, tokens_.Hidden(), tokens_.TopK()); };
  lied_format = DispatchFormat::kStandard;
  for (const DispatchPromises& promises : WithOneChanged(kTokenRows)) {
    lie = promises;
    ExpectError(
        ErrorCode::kInternal,
        {"layer 9", "runner aiter", DescribePromises(promises), DescribePromises(kTokenRows)},
        call);
  }
  lie = kTokenRows;
  EXPECT_NO_THROW(call());
  lied_format = DispatchFormat::kDeepepLl;
  ExpectError(ErrorCode::kInternal, {"layer 9", "standard", "deepep_ll"}, call);
  lied_format = DispatchFormat::kStandard;
  EXPECT_NO_THROW(call());
}

// ---- dispatch outputs that contradict themselves

class FormatNegativeTest : public NegativeTest {
 protected:
  // A dispatch of tokens_ and the runners behind it; each bad copy of its output is refused and
  // the good one gives the same bits as before.
  struct Stage {
    std::unique_ptr<MoeRunner> runner;
    std::unique_ptr<SimulatedDispatch> dispatch;
    std::vector<float> good;
  };

  std::vector<float> RunGood(Stage& stage) {
    const CombineInput* answer = &stage.runner->Run(context_, stage.dispatch->output(0), info_);
    return stage.dispatch->Combine({&answer, 1})[0];
  }

  // Every runner that takes the realisation.
  std::vector<Stage> Stages(Kind kind, const DispatchOptions& options = {}) {
    std::vector<Stage> stages;
    for (const PrePermuteEntry& pre : registry_.pre_permutes()) {
      for (const Realisation& realisation : RealisationsOf(registry_, pre.format)) {
        if (realisation.kind != kind) continue;
        MoeRunnerConfig config = case_.Config(2);
        config.layer_id = 9;
        Stage stage;
        stage.runner = MoeRunner::Create(registry_, {std::string(pre.runner), "none", true}, config,
                                         pre.format);
        stage.dispatch = std::make_unique<SimulatedDispatch>(
            context_, realisation, config, 6, std::vector<MoeTokens>{tokens_}, options);
        try {
          stage.good = RunGood(stage);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
          continue;
        }
        stages.push_back(std::move(stage));
      }
    }
    EXPECT_FALSE(stages.empty());
    return stages;
  }

  template <typename Concrete>
  void ExpectRefused(std::vector<Stage>& stages, std::initializer_list<std::string_view> words,
                     const std::function<void(Concrete&)>& edit) {
    for (Stage& stage : stages) {
      SCOPED_TRACE(stage.runner->name());
      Concrete bad = As<Concrete>(stage.dispatch->output(0));
      edit(bad);
      ExpectError(ErrorCode::kInvalidArgument, words,
                  [&] { stage.runner->Run(context_, bad, info_); });
      EXPECT_TRUE(SameBits(RunGood(stage), stage.good));
    }
  }

  MoeQuantInfo info_ = case_.Info();
};

TEST_F(FormatNegativeTest, LowLatencySlab) {
  using Slab = DeepepLlDispatchOutput;
  auto stages = Stages(Kind::kLowLatency);
  std::vector<int32_t> counts;
  const auto with_count = [&](size_t expert, int32_t count) {
    return [&counts, expert, count](Slab& slab) {
      counts.assign(slab.masked_m.begin(), slab.masked_m.end());
      counts[expert] = count;
      slab.masked_m = counts;
    };
  };
  for (int32_t count : {9, kHighest, -1, kLowest}) {
    ExpectRefused<Slab>(stages, {"layer 9", "masked_m of expert 4", std::to_string(count)},
                        with_count(4, count));
  }
  ExpectRefused<Slab>(stages, {"layer 9", "5 entries", "6 experts"},
                      [](Slab& slab) { slab.masked_m = slab.masked_m.first(5); });
  ExpectRefused<Slab>(stages, {"layer 9", "rows"},
                      [](Slab& slab) { slab.hidden_states.rows -= 1; });
  ExpectRefused<Slab>(stages, {"layer 9", "capacity"}, [](Slab& slab) { slab.capacity += 1; });
  ExpectRefused<Slab>(stages, {"layer 9", "63"}, [](Slab& slab) { slab.hidden_states.cols = 63; });
}

TEST_F(FormatNegativeTest, ExpandedRows) {
  using Normal = DeepepNormalDispatchOutput;
  auto stages = Stages(Kind::kNormalExpanded);
  std::vector<int32_t> counts;
  const auto with_counts = [&](std::vector<int32_t> changed) {
    return [&counts, changed](Normal& normal) {
      counts = changed;
      normal.num_recv_tokens_per_expert = counts;
    };
  };
  ExpectRefused<Normal>(stages, {"layer 9", "1000"}, with_counts({1000, 0, 0, 0, 0, 0}));
  ExpectRefused<Normal>(stages, {"layer 9", "-1"}, with_counts({-1, 1, 0, 0, 0, 0}));
  ExpectRefused<Normal>(stages, {"layer 9"}, with_counts({kHighest, kHighest, 2, 0, 0, 0}));
  ExpectRefused<Normal>(stages, {"layer 9", "7", "6"}, with_counts({0, 0, 0, 0, 0, 0, 1}));
  ExpectRefused<Normal>(stages, {"layer 9", "5", "6"}, with_counts({0, 0, 0, 0, 1}));
}

TEST_F(FormatNegativeTest, TokenRows) {
  using Normal = DeepepNormalDispatchOutput;
  auto stages = Stages(Kind::kNormalTokens);
  std::vector<int32_t> ids;
  // 6 is the sink slot of the runner, and no id.
  for (int32_t id : {6, 7, -2, kLowest, kHighest}) {
    ExpectRefused<Normal>(stages, {"layer 9", "token 2", std::to_string(id)}, [&](Normal& normal) {
      ids.assign(normal.topk_ids.begin(), normal.topk_ids.end());
      ids[5] = id;
      normal.topk_ids = ids;
    });
  }
  ExpectRefused<Normal>(stages, {"layer 9", "ids"}, [](Normal& normal) {
    normal.topk_ids = normal.topk_ids.first(normal.topk_ids.size() - 1);
  });
  ExpectRefused<Normal>(stages, {"layer 9", "weights"},
                        [](Normal& normal) { normal.topk_weights = normal.topk_weights.first(1); });
  ExpectRefused<Normal>(stages, {"layer 9", "top_k 3"}, [](Normal& normal) { normal.top_k = 3; });
  ExpectRefused<Normal>(stages, {"layer 9", "top_k 0"}, [](Normal& normal) { normal.top_k = 0; });
  ExpectRefused<Normal>(stages, {"layer 9", "65"},
                        [](Normal& normal) { normal.hidden_states.cols = 65; });
}

TEST_F(FormatNegativeTest, MoriRows) {
  using Normal = DeepepNormalDispatchOutput;
  auto stages = Stages(Kind::kMori, {.expert_output = true});
  MoriDispatch mori;
  const auto with = [&](const std::function<void(MoriDispatch&)>& edit) {
    return [&mori, edit](Normal& normal) {
      mori = *normal.mori;
      edit(mori);
      normal.mori = &mori;
    };
  };
  ExpectRefused<Normal>(stages, {"layer 9", "recv_cap"},
                        with([](MoriDispatch& m) { m.num_recv_tokens = m.recv_cap + 1; }));
  ExpectRefused<Normal>(stages, {"layer 9", "recv_cap", "1"},
                        with([](MoriDispatch& m) { m.recv_cap = 1; }));
  ExpectRefused<Normal>(stages, {"layer 9", "received"}, with([](MoriDispatch& m) {
                          m.recv_cap = 0;
                          m.num_recv_tokens = 1000;
                        }));
  ExpectRefused<Normal>(stages, {"layer 9", "expert_mask"},
                        with([](MoriDispatch& m) { m.expert_mask = {}; }));
  const std::vector<int32_t> too_many(8, 1), too_few{1, 1, 0, 1, 1, 1};
  ExpectRefused<Normal>(stages, {"layer 9", "8 local experts", "6"},
                        with([&](MoriDispatch& m) { m.expert_mask = too_many; }));
  ExpectRefused<Normal>(stages, {"layer 9", "5 local experts", "6"},
                        with([&](MoriDispatch& m) { m.expert_mask = too_few; }));
  ExpectRefused<Normal>(stages, {"layer 9", "expert_output"},
                        with([](MoriDispatch& m) { m.expert_output.rows = 1; }));
  ExpectRefused<Normal>(stages, {"layer 9", "output"},
                        with([](MoriDispatch& m) { m.expert_output.cols = 63; }));
  ExpectRefused<Normal>(stages, {"layer 9", "I8"},
                        with([](MoriDispatch& m) { m.out_dtype = DType::kI8; }));
  std::vector<int32_t> ids;
  for (int32_t id : {6, -2, kLowest, kHighest}) {
    ExpectRefused<Normal>(stages, {"layer 9", "token 0", std::to_string(id)}, [&](Normal& normal) {
      ids.assign(normal.topk_ids.begin(), normal.topk_ids.end());
      ids[0] = id;
      normal.topk_ids = ids;
    });
  }
  ExpectRefused<Normal>(stages, {"layer 9", "ids"},
                        [](Normal& normal) { normal.topk_ids = normal.topk_ids.first(4); });
}

// Each promise that a runner cannot keep, in every realisation; whose sums are owed is not its
// affair.
TEST_F(FormatNegativeTest, PromisesOfTheDispatch) {
  const auto check = [&]<typename Concrete>(Kind kind) {
    auto stages = Stages(kind);
    for (Stage& stage : stages) {
      SCOPED_TRACE(stage.runner->name());
      const Concrete good = As<Concrete>(stage.dispatch->output(0));
      const auto changed = WithOneChanged(good.promises);
      for (size_t i = 0; i < 3; ++i) {
        Concrete bad = good;
        bad.promises = changed[i];
        if (IsRoutewise(bad.promises)) continue;  // a promise that runners do keep: ep_test
        // kUnsupported where the promises are those of a realisation that the runner does not take.
        try {
          stage.runner->Run(context_, bad, info_);
          ADD_FAILURE() << DescribePromises(bad.promises) << " was taken";
        } catch (const Error& error) {
          EXPECT_TRUE(error.code() == ErrorCode::kInvalidArgument ||
                      error.code() == ErrorCode::kUnsupported);
          EXPECT_NE(error.message().find(DescribePromises(bad.promises)), std::string::npos)
              << error.message();
        }
      }
      Concrete owing = good;
      owing.promises = changed[3];
      EXPECT_EQ(stage.runner->Run(context_, owing, info_).promises, changed[3]);
      if (kind == Kind::kRegistered) continue;  // its dispatch is combined once
      EXPECT_TRUE(SameBits(RunGood(stage), stage.good));
    }
  };
  check.operator()<StandardDispatchOutput>(Kind::kStandard);
  check.operator()<DeepepNormalDispatchOutput>(Kind::kNormalTokens);
  check.operator()<DeepepNormalDispatchOutput>(Kind::kNormalExpanded);
  check.operator()<DeepepNormalDispatchOutput>(Kind::kMori);
  check.operator()<DeepepLlDispatchOutput>(Kind::kLowLatency);
  const auto ascend_tp = RealisationsOf(registry_, DispatchFormat::kAscendTp);
  if (!ascend_tp.empty()) check.operator()<AscendTpDispatchOutput>(Kind::kRegistered);
}

// ---- settings behind an exchange

TEST_F(FormatNegativeTest, SettingsThatNeedTheFinishedSum) {
  MoeRunnerConfig no_combine, scaled, on_input;
  no_combine.no_combine = true;
  scaled.routed_scaling_factor = 2.5;
  on_input.apply_router_weight_on_input = true;
  const std::vector<Kind> all = {Kind::kNormalTokens, Kind::kNormalExpanded, Kind::kMori,
                                 Kind::kLowLatency};
  const struct {
    std::string_view word;
    MoeRunnerConfig config;
    std::vector<Kind> refused_by;
  } cases[] = {
      {"no_combine", no_combine, all},
      {"routed_scaling_factor", scaled, all},
      {"apply_router_weight_on_input", on_input, {Kind::kNormalExpanded, Kind::kLowLatency}},
  };
  const MoeTokens one = testing::RandomTokens(4, 1, 6, 64, Spread::kRandom, random_);
  for (const auto& test : cases) {
    MoeCaseOptions options;
    options.runner = test.config;
    const MoeCase layer(options, random_);
    MoeRunnerConfig config = layer.Config(1);
    config.layer_id = 9;
    for (Kind kind : test.refused_by) {
      for (DispatchFormat format : {DispatchFormat::kDeepepNormal, DispatchFormat::kDeepepLl}) {
        for (const Realisation& realisation : RealisationsOf(registry_, format)) {
          if (realisation.kind != kind) continue;
          SCOPED_TRACE(realisation.name);
          MoeRunnerConfig plain = config;
          plain.no_combine = false;
          SimulatedDispatch dispatch(context_, realisation, plain, 6, {one});
          ExpectError(ErrorCode::kUnsupported, {"layer 9", test.word}, [&] {
            MoeRunner::Create(registry_, {"aiter", "none", true}, config, format)
                ->Run(context_, dispatch.output(0), layer.Info());
          });
        }
      }
    }
  }
}

// A dispatcher over SimulatedDispatch, as a program would add one.
template <Kind kKind>
class TestDispatcher : public Dispatcher {
 public:
  explicit TestDispatcher(const MoeRunnerConfig& config)
      : Dispatcher(config.layer_id), config_(config) {}
  std::string_view name() const override { return "test"; }
  static Realisation TheRealisation() {
    for (DispatchFormat format : {DispatchFormat::kDeepepNormal, DispatchFormat::kDeepepLl}) {
      for (const Realisation& realisation : RealisationsOf(BuiltinRegistry(), format)) {
        if (realisation.kind == kKind) return realisation;
      }
    }
    return {};
  }
  DispatchFormat format() const override { return TheRealisation().format; }

 protected:
  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) override {
    MoeTokens tokens{hidden.rows, topk.top_k, hidden.cols, {}, {}, {}};
    tokens.hidden = Values(hidden);
    tokens.ids.assign(topk.ids.begin(), topk.ids.end());
    tokens.weights.assign(topk.weights.begin(), topk.weights.end());
    dispatch_ = std::make_unique<SimulatedDispatch>(
        context, TheRealisation(), config_, config_.num_experts, std::vector<MoeTokens>{tokens});
  }
  const DispatchOutput& FinishDispatch(ExecContext&) override { return dispatch_->output(0); }
  void StartCombine(ExecContext& context, const CombineInput& input) override {
    const CombineInput* answer = &input;
    const std::vector<float> rows = dispatch_->Combine({&answer, 1})[0];
    out_ = context.arena.AllocateRows(rows.size() / config_.hidden_size, config_.hidden_size);
    std::copy(rows.begin(), rows.end(), out_.data);
  }
  Rows FinishCombine(ExecContext&) override { return out_; }
  void Reset() noexcept override { dispatch_.reset(); }

 private:
  Rows out_;
  MoeRunnerConfig config_;
  std::unique_ptr<SimulatedDispatch> dispatch_;
};

template <Kind kKind>
void AddTestDispatcher(Registry& registry, std::string_view name) {
  registry.Add(DispatcherEntry{name, name, "of a test",
                               TestDispatcher<kKind>::TheRealisation().format, DispatchMode::kAny,
                               [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
                                 return std::make_unique<TestDispatcher<kKind>>(args.config);
                               }});
}

// The factor that a runner cannot apply behind an exchange, the layer puts into the weights, once.
TEST_F(LayerNegativeTest, RoutedScalingBehindAnExchangeGoesIntoTheWeights) {
  Registry registry;
  RegisterBuiltins(registry);
  AddTestDispatcher<Kind::kNormalTokens>(registry, "test_tokens");
  AddTestDispatcher<Kind::kNormalExpanded>(registry, "test_expanded");
  AddTestDispatcher<Kind::kMori>(registry, "test_mori");
  AddTestDispatcher<Kind::kLowLatency>(registry, "test_ll");
  config_.runner.routed_scaling_factor = 2.5;
  MoeRunnerConfig scaled = case_.Config(2);
  scaled.routed_scaling_factor = 2.5;
  const MoeTruth truth(case_, case_.Info(), scaled, tokens_);
  for (const char* a2a : {"none", "test_tokens", "test_expanded", "test_mori", "test_ll"}) {
    MoeLayer layer(registry, config_, {.runner = "aiter", .a2a = a2a, .act_dtype = "f32"},
                   case_.Weights());
    const auto verdict =
        truth.Judge(Values(layer.ForwardRouted(context_, tokens_.Hidden(), tokens_.TopK())));
    EXPECT_TRUE(verdict.ok) << a2a << ": " << verdict.why;
    // An error in the runner leaves dispatcher and layer usable.
    MoeTokens bad = tokens_;
    bad.cols = 63;
    EXPECT_THROW(layer.ForwardRouted(context_, bad.Hidden(), bad.TopK()), Error);
    EXPECT_TRUE(
        truth.Judge(Values(layer.ForwardRouted(context_, tokens_.Hidden(), tokens_.TopK()))).ok)
        << a2a;
  }
}

// ---- values

// Every scheme and realisation: what a row holds stays in the row.
class ValueTest : public NegativeTest {
 protected:
  // The layer of a scheme behind every place that takes it.
  void ForEachPlace(
      const MoeCase& layer,
      const std::function<void(const std::string& place,
                               const std::function<std::vector<float>(const MoeTokens&)>& run)>&
          body) {
    const SchemeEntry& scheme = registry_.FindScheme(layer.options().scheme_w13);
    for (const PrePermuteEntry& pre : registry_.pre_permutes()) {
      if (std::find(scheme.runners.begin(), scheme.runners.end(), pre.runner) ==
          scheme.runners.end())
        continue;
      for (const Realisation& realisation : RealisationsOf(registry_, pre.format)) {
        const auto run = [&](const MoeTokens& tokens) {
          const MoeRunnerConfig config = layer.Config(tokens.top_k);
          const auto runner = MoeRunner::Create(registry_, {std::string(pre.runner), "none", true},
                                                config, pre.format);
          SimulatedDispatch dispatch(context_, realisation, config, layer.experts(), {tokens});
          const CombineInput* answer = &runner->Run(context_, dispatch.output(0), layer.Info());
          return dispatch.Combine({&answer, 1})[0];
        };
        try {
          run(tokens_);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
          continue;
        }
        body(std::string(pre.runner) + " behind " + realisation.name + ", scheme " +
                 std::string(scheme.name),
             run);
      }
    }
  }

  // That rows other than `changed` have the same bits.
  void ExpectOthersUnchanged(const std::vector<float>& found, const std::vector<float>& before,
                             const std::function<bool(size_t)>& changed, const std::string& where) {
    ASSERT_EQ(found.size(), before.size());
    for (size_t t = 0; t < found.size() / 64; ++t) {
      if (changed(t)) continue;
      EXPECT_EQ(std::memcmp(found.data() + t * 64, before.data() + t * 64, 64 * sizeof(float)), 0)
          << where << ", token " << t;
    }
  }
};

// Bug-log 9.
TEST_F(ValueTest, NaNAndInfinityStayInTheirRows) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    if (scheme.act_quant == ActQuantKind::kFp8Tensor) continue;  // one scale for all rows
    const std::string name(scheme.name);
    const MoeCase layer({.scheme_w13 = name, .scheme_w2 = name}, random_);
    ForEachPlace(layer, [&](const std::string& place, const auto& run) {
      const std::vector<float> before = run(tokens_);
      for (float value : {kNaN, kInf, -kInf, 3.4e38f, -3.4e38f, 1e-45f}) {
        MoeTokens poisoned = tokens_;
        for (size_t h = 0; h < 64; h += value == kNaN ? 1 : 7) poisoned.hidden[3 * 64 + h] = value;
        ExpectOthersUnchanged(
            run(poisoned), before, [](size_t t) { return t == 3; }, place);
      }
      EXPECT_TRUE(SameBits(run(tokens_), before)) << place;
    });
  }
}

// A NaN that a scheme can show is shown: it does not become a plausible number.
TEST_F(ValueTest, NaNIsNotHidden) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    if (scheme.act_quant == ActQuantKind::kInt8Static) continue;  // has no code for it
    const std::string name(scheme.name);
    const MoeCase layer({.scheme_w13 = name, .scheme_w2 = name}, random_);
    MoeTokens poisoned = testing::RandomTokens(3, 2, 6, 64, Spread::kRandom, random_);
    poisoned.hidden[64 + 5] = kNaN;
    ForEachPlace(layer, [&](const std::string& place, const auto& run) {
      const std::vector<float> rows = run(poisoned);
      EXPECT_TRUE(std::isnan(rows[64])) << place;
    });
  }
}

// Scales of 0 and NaN, and large ones, in the weights of one expert.
TEST_F(ValueTest, ScalesOfZeroAndNaN) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    if (scheme.act_quant == ActQuantKind::kFp8Tensor) continue;
    const std::string name(scheme.name);
    const MoeCase layer({.scheme_w13 = name, .scheme_w2 = name}, random_);
    if (!layer.Weights().w1.format.is_quantized()) continue;
    for (int byte : {0x00, 0xff, 0x7f}) {  // f32: 0, NaN, huge; e8m0: 2^-127, NaN, 1
      const std::vector<std::byte> scales(4096, static_cast<std::byte>(byte));
      for (size_t matrix : {0u, 1u}) {
        MoeQuantInfo info = layer.Info();
        ExpertMatrices& bank = matrix == 0 ? info.w1 : info.w2;
        std::vector<const std::byte*> list(bank.scale.begin(), bank.scale.end());
        list[2] = scales.data();
        bank.scale = list;
        const auto uses = [&](size_t t) {
          return tokens_.ids[2 * t] == 2 || tokens_.ids[2 * t + 1] == 2;
        };
        for (const PrePermuteEntry& pre : registry_.pre_permutes()) {
          if (pre.format != DispatchFormat::kStandard && pre.format != DispatchFormat::kDeepepLl)
            continue;
          if (std::find(scheme.runners.begin(), scheme.runners.end(), pre.runner) ==
              scheme.runners.end())
            continue;
          const MoeRunnerConfig config = layer.Config(2);
          const auto runner = MoeRunner::Create(registry_, {std::string(pre.runner), "none", true},
                                                config, pre.format);
          SimulatedDispatch dispatch(context_, RealisationsOf(registry_, pre.format)[0], config, 6,
                                     {tokens_});
          const CombineInput* good = &runner->Run(context_, dispatch.output(0), layer.Info());
          const std::vector<float> before = dispatch.Combine({&good, 1})[0];
          const CombineInput* answer = &runner->Run(context_, dispatch.output(0), info);
          const std::vector<float> rows = dispatch.Combine({&answer, 1})[0];
          ExpectOthersUnchanged(rows, before, uses, name);
          for (size_t t = 0; t < tokens_.count; ++t) {
            if (byte == 0 && uses(t)) {
              EXPECT_TRUE(std::isfinite(rows[t * 64])) << name;
            }
          }
        }
      }
    }
  }
}

// ---- the traps of contract 3.4, 3.9 and 4.2

using TrapTest = FormatNegativeTest;

// "LL layout": a slab has no ids per row. What the sender's routing says is handed back, never
// read.
TEST_F(TrapTest, LowLatencySlabIsNotTokenRows) {
  for (Stage& stage : Stages(Kind::kLowLatency)) {
    DeepepLlDispatchOutput slab = As<DeepepLlDispatchOutput>(stage.dispatch->output(0));
    const CombineInput* good = &stage.runner->Run(context_, slab, info_);
    const std::vector<int32_t> nonsense(slab.topk_ids.size(), kHighest);
    const std::vector<float> nan(slab.topk_weights.size(), kNaN);
    slab.topk_ids = nonsense;
    slab.topk_weights = nan;
    slab.expected_m = 0;
    const auto& answer = As<DeepepLlCombineInput>(stage.runner->Run(context_, slab, info_));
    const auto& expected = As<DeepepLlCombineInput>(*good);
    EXPECT_EQ(answer.topk_ids.data(), nonsense.data());
    EXPECT_EQ(answer.topk_weights.data(), nan.data());
    for (size_t e = 0; e < 6; ++e) {
      for (size_t i = 0; i < static_cast<size_t>(slab.masked_m[e]); ++i) {
        const size_t row = e * slab.capacity + i;
        EXPECT_EQ(std::memcmp(answer.hidden_states.Row(row), expected.hidden_states.Row(row),
                              64 * sizeof(float)),
                  0);
      }
    }
  }
}

// "quark_int4fp8 without expert_mask": a slot that is not local must not be computed with another
// expert, and without a mask nothing is computed at all.
TEST_F(TrapTest, QuarkInt4Fp8WithoutMask) {
  const MoeCase layer({.scheme_w13 = "quark_int4fp8", .scheme_w2 = "quark_int4fp8"}, random_);
  tokens_.ids[0] = 5;
  tokens_.ids[1] = 0;
  const MoeRunnerConfig config = layer.Config(2);
  const MoeTruth truth(layer, layer.Info(), config, tokens_);
  for (Kind kind : {Kind::kStandard, Kind::kNormalTokens, Kind::kMori}) {
    for (DispatchFormat format : {DispatchFormat::kStandard, DispatchFormat::kDeepepNormal}) {
      for (const Realisation& realisation : RealisationsOf(registry_, format)) {
        if (realisation.kind != kind) continue;
        const auto runner = MoeRunner::Create(registry_, {"aiter", "none", true}, config, format);
        SimulatedDispatch dispatch(context_, realisation, config, 6,
                                   {tokens_.Slice(0, 3), tokens_.Slice(3, 2)});
        std::vector<const CombineInput*> answers;
        for (size_t rank = 0; rank < 2; ++rank) {
          MoeQuantInfo info = layer.InfoOfExperts(rank * 3, 3);
          info.expert_mask = dispatch.expert_mask(rank);
          if (kind == Kind::kStandard) {
            // Global ids against the weights of three experts.
            MoeQuantInfo no_mask = info;
            no_mask.expert_mask = {};
            ExpectError(ErrorCode::kInvalidArgument, {"expert", "-1 to 2"},
                        [&] { runner->Run(context_, dispatch.output(rank), no_mask); });
          }
          answers.push_back(&runner->Run(context_, dispatch.output(rank), info));
        }
        std::vector<float> rows;
        for (const std::vector<float>& part : dispatch.Combine(answers))
          rows.insert(rows.end(), part.begin(), part.end());
        const auto verdict = truth.Judge(rows);
        EXPECT_TRUE(verdict.ok) << realisation.name << ": " << verdict.why;
      }
    }
  }
}

// "A dispatcher whose combine also weights would square them": the result is linear in the weights.
TEST_F(TrapTest, WeightsAreAppliedOnce) {
  MoeTokens doubled = tokens_;
  for (float& weight : doubled.weights) weight *= 2.0f;
  for (Kind kind : {Kind::kStandard, Kind::kNormalTokens, Kind::kNormalExpanded, Kind::kMori,
                    Kind::kLowLatency}) {
    auto stages = Stages(kind);
    std::swap(tokens_, doubled);
    auto twice = Stages(kind);
    std::swap(tokens_, doubled);
    ASSERT_EQ(stages.size(), twice.size());
    for (size_t i = 0; i < stages.size(); ++i) {
      for (float& value : stages[i].good) value *= 2.0f;
      EXPECT_TRUE(SameBits(stages[i].good, twice[i].good)) << stages[i].runner->name();
    }
  }
}

// 3.4: token rows and expanded rows have the same fields. Told apart by their promises, and refused
// where the other promises come with the fields of the one.
TEST_F(TrapTest, TokenAndExpandedRowsHaveTheSameFields) {
  using Normal = DeepepNormalDispatchOutput;
  for (Stage& stage : Stages(Kind::kNormalTokens)) {
    Normal rows = As<Normal>(stage.dispatch->output(0));
    // The counts of token rows are sizes of a scratch, more than there are rows.
    rows.promises = kExpandedRows;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 9", "counts"},
                [&] { stage.runner->Run(context_, rows, info_); });
  }
  for (Stage& stage : Stages(Kind::kNormalExpanded)) {
    Normal rows = As<Normal>(stage.dispatch->output(0));
    rows.promises = {RowKind::kToken, WeightsAppliedBy::kRunner, IdSpace::kLocal, SumsOwed::kNone};
    EXPECT_THROW(stage.runner->Run(context_, rows, info_), Error);
  }
}

// 3.9 and num_local_tokens: rows at and past the total are not read, though they name experts.
TEST_F(TrapTest, RowsPastTheTotalAreIgnored) {
  for (Stage& stage : Stages(Kind::kMori, {.spare = 4})) {
    DeepepNormalDispatchOutput rows = As<DeepepNormalDispatchOutput>(stage.dispatch->output(0));
    MoriDispatch mori = *rows.mori;
    mori.num_recv_tokens = 2;
    rows.mori = &mori;
    const auto& answer = As<DeepepNormalCombineInput>(stage.runner->Run(context_, rows, info_));
    ASSERT_EQ(answer.hidden_states.rows, mori.recv_cap);
    for (size_t t = 2; t < answer.hidden_states.rows; ++t) {
      for (float value : answer.hidden_states.RowSpan(t)) EXPECT_EQ(value, 0.0f);
    }
    mori.num_recv_tokens = 0;
    EXPECT_NO_THROW(stage.runner->Run(context_, rows, info_));
  }
}

// Only the experts of the mask are computed; the n-th 1 is expert n of the weights.
TEST_F(TrapTest, ExpertMaskOnGlobalIds) {
  const std::vector<int32_t> mask = {0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1};
  const std::vector<int32_t> local = {-1, 0, -1, 1, 2, -1, 3, -1, 4, -1, -1, 5};
  MoeTokens global = testing::RandomTokens(9, 3, 12, 64, Spread::kSomeSkipped, random_);
  MoeTokens mapped = global;
  for (int32_t& id : mapped.ids) id = id < 0 ? -1 : local[static_cast<size_t>(id)];
  const MoeTruth truth(case_, info_, case_.Config(3), mapped);
  MoeQuantInfo masked = info_;
  masked.expert_mask = mask;
  for (const char* name : {"aiter", "reference"}) {
    const auto runner = MoeRunner::Create(registry_, {name, "none", true}, case_.Config(3),
                                          DispatchFormat::kStandard);
    const StandardDispatchOutput dispatched(global.Hidden(), global.TopK());
    const auto verdict = truth.Judge(
        Values(As<StandardCombineInput>(runner->Run(context_, dispatched, masked)).hidden_states));
    EXPECT_TRUE(verdict.ok) << name << ": " << verdict.why;
  }
}

// hidden_pad, intermediate_pad: padded columns are not read, not counted in a scale, and 0 in the
// result.
TEST_F(TrapTest, PaddedColumnsAreNotCounted) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    const std::string name(scheme.name);
    const MoeCase layer({.scheme_w13 = name, .scheme_w2 = name, .bias = true}, random_);
    MoeQuantInfo info = layer.Info();
    info.hidden_pad = 5;
    info.intermediate_pad = 3;
    MoeTokens tokens = tokens_;
    for (size_t t = 0; t < tokens.count; ++t)
      std::fill_n(tokens.hidden.begin() + static_cast<std::ptrdiff_t>(t * 64 + 59), 5, kNaN);
    const MoeRunnerConfig config = layer.Config(2);
    const OracleRows expected = RunOracle(OracleKind::kFaithful, info, config, tokens.Oracle());
    for (const char* runner_name : {"aiter", "reference"}) {
      for (DispatchFormat format :
           {DispatchFormat::kStandard, DispatchFormat::kDeepepNormal, DispatchFormat::kDeepepLl}) {
        for (const Realisation& realisation : RealisationsOf(registry_, format)) {
          if (std::string_view(runner_name) == "reference" && format != DispatchFormat::kStandard)
            continue;
          const auto runner =
              MoeRunner::Create(registry_, {runner_name, "none", true}, config, format);
          SimulatedDispatch dispatch(context_, realisation, config, 6, {tokens});
          const CombineInput* answer = &runner->Run(context_, dispatch.output(0), info);
          const std::vector<float> rows = dispatch.Combine({&answer, 1})[0];
          EXPECT_LE(
              testing::RelativeL2(ConstRows(rows.data(), 5, 64), expected.values, expected.values),
              1e-4)
              << name << ", " << runner_name << " behind " << realisation.name;
          for (size_t i = 0; i < rows.size(); ++i) {
            if (i % 64 >= 59) {
              EXPECT_EQ(rows[i], 0.0f);
            }
          }
        }
      }
    }
  }
}

// MORI's expert_output and out_dtype: the rows are where combine reads, and rounded once.
TEST_F(TrapTest, OutputViewAndOutputType) {
  const auto plain = Stages(Kind::kMori);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (bool view : {false, true}) {
      // SimulatedDispatch proves that the rows are in the view.
      const auto stages = Stages(Kind::kMori, {.expert_output = view, .out_dtype = dtype});
      ASSERT_EQ(stages.size(), plain.size());
      for (size_t i = 0; i < stages.size(); ++i) {
        std::vector<float> expected = plain[i].good;
        for (float& value : expected) {
          if (dtype == DType::kBF16) value = ToFloat(ToBF16(value));
          if (dtype == DType::kF16) value = ToFloat(ToF16(value));
        }
        EXPECT_TRUE(SameBits(stages[i].good, expected)) << DTypeName(dtype);
      }
    }
  }
}

// ---- the reconciliation table of contract 4.2

TEST(ReconcileWire, EveryRowOfTheTable) {
  using enum ActQuantKind;
  using enum QuantType;
  // Weights, wire, dequantised when plain or not clamped, when clamped and interleaved, the type
  // that results.
  const struct {
    QuantType weights;
    ActQuantKind wire;
    bool dequantised, when_clamped;
    QuantType type;
  } table[] = {
      {kPer1x32, kFp8Group, true, true, kPer1x32},
      {kPer1x32, kMxFp8, false, false, kPer1x32},
      {kPer1x32, kMxFp4, false, true, kPer1x32},
      {kPer1x32, kNone, false, false, kPer1x32},
      {kPer128x128, kMxFp4, true, true, kPer128x128},
      {kPerToken, kMxFp4, true, true, kPerToken},
      {kPer128x128, kFp8Group, false, false, kPer128x128},
      {kPerToken, kFp8Group, false, false, kPerToken},
      {kPer128x128, kNone, false, false, kPer128x128},
      {kPerToken, kNone, false, false, kPerToken},
      // Not in the reference's table: the scales of 32 columns do not fit these products.
      {kPer128x128, kMxFp8, true, true, kPer128x128},
      {kPerToken, kMxFp8, true, true, kPerToken},
      {kNo, kMxFp4, false, false, kPer1x32},
      {kNo, kMxFp8, false, false, kPer1x32},
      {kNo, kFp8Group, false, false, kPer128x128},
      {kNo, kNone, false, false, kNo},
  };
  for (const auto& row : table) {
    for (bool clamped : {false, true}) {
      const Reconciled found = ReconcileWire(row.weights, row.wire, clamped);
      EXPECT_EQ(found.dequantize, clamped ? row.when_clamped : row.dequantised)
          << QuantTypeName(row.weights) << ", " << ActQuantKindName(row.wire);
      EXPECT_EQ(found.quant_type, row.type)
          << QuantTypeName(row.weights) << ", " << ActQuantKindName(row.wire);
    }
  }
  for (QuantType weights : {kNo, kPerToken, kPer128x128, kPer1x32}) {
    for (ActQuantKind wire :
         {kInt8Token, kInt4Token, kInt8Static, kFp8Token, kFp8Tensor, kFp8TensorStatic}) {
      ExpectError(ErrorCode::kUnsupported, {ActQuantKindName(wire), QuantTypeName(weights)},
                  [&] { ReconcileWire(weights, wire, false); });
    }
  }
}

// The row of the table that depends on the activation, by its numbers: rows of a 4-bit wire before
// a clamped, interleaved SwiGLU become bf16 and are quantised again.
TEST_F(TrapTest, ClampedInterleavedFp4IsDequantised) {
  for (bool interleaved : {false, true}) {
    MoeCaseOptions options{.scheme_w13 = "mxfp4_w4a8", .scheme_w2 = "mxfp4_w4a8"};
    options.runner.swiglu_limit = 0.7f;
    options.runner.gate_up_interleaved = interleaved;
    const MoeCase layer(options, random_);
    const MoeRunnerConfig config = layer.Config(2);
    testing::Wire wire;
    wire.how.kind = ActQuantKind::kMxFp4;
    MoeTokens arrived = AfterWire(context_, tokens_, wire);
    MoeQuantInfo info = layer.Info();
    if (interleaved) {
      for (float& value : arrived.hidden) value = ToFloat(ToBF16(value));
    } else {
      info.a13 = {};
    }
    const MoeTruth truth(layer, info, config, arrived);
    const auto runner = MoeRunner::Create(registry_, {"aiter", "none", true}, config,
                                          DispatchFormat::kDeepepNormal);
    for (const Realisation& realisation :
         RealisationsOf(registry_, DispatchFormat::kDeepepNormal)) {
      if (realisation.kind != Kind::kMori) continue;
      SimulatedDispatch dispatch(context_, realisation, config, 6, {tokens_}, {.wire = wire});
      const CombineInput* answer = &runner->Run(context_, dispatch.output(0), layer.Info());
      const auto verdict = truth.Judge(dispatch.Combine({&answer, 1})[0], false);
      EXPECT_TRUE(verdict.ok) << "interleaved " << interleaved << ": " << verdict.why;
    }
  }
}

}  // namespace
}  // namespace switchyard::moe
