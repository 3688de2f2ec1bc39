// The whole layer: choices at construction, refusals, stages, and staying usable after an error.
#include "switchyard/moe/layer/moe_layer.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/routing/select_experts.h"
#include "testing/errors.h"
#include "testing/moe_case.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;
using testing::MoeCase;

class MoeLayerTest : public ::testing::Test {
 protected:
  MoeLayerTest()
      : random_(testing::MakeRandom(51)),
        case_(6, 20, 12, DType::kBF16, random_),
        pool_(2),
        context_{pool_, arena_} {
    config_.topk.num_experts = 6;
    config_.topk.top_k = 2;
    config_.runner.layer_id = 3;
  }
  std::mt19937_64 random_;
  MoeCase case_;
  ThreadPool pool_;
  Arena arena_;
  ExecContext context_;
  MoeLayerConfig config_;
};

TEST_F(MoeLayerTest, RoutesDispatchesAndCombines) {
  testing::MoeTokens tokens{9, 2, 20, testing::RandomFloats(random_, 9 * 20), {}, {}};
  const std::vector<float>& hidden = tokens.hidden;
  const std::vector<float> logits = testing::RandomFloats(random_, 9 * 6);
  for (size_t t = 0; t < 9; ++t) {
    int32_t ids[2];
    double weights[2];
    SelectExpertsReference(config_.topk, logits.data() + t * 6, ids, weights);
    tokens.ids.insert(tokens.ids.end(), ids, ids + 2);
    for (double weight : weights) tokens.weights.push_back(static_cast<float>(weight));
  }
  const testing::MoeRows expected =
      EvaluateMoe(OracleKind::kDense, case_, case_.Info(), case_.Config(2), tokens);
  for (const char* runner : {"auto", "aiter", "reference"}) {
    MoeLayer layer(BuiltinRegistry(), config_, {.runner = runner, .act_dtype = "f32"},
                   case_.Weights());
    RoutingRecord record;
    const Rows out = layer.Forward(context_, ConstRows(hidden.data(), 9, 20),
                                   ConstRows(logits.data(), 9, 6), &record);
    EXPECT_EQ(record.topk.num_tokens, 9u);
    EXPECT_LE(testing::RelativeL2(out, expected.values, expected.values), 3e-6) << runner;
    EXPECT_EQ(
        layer.Forward(context_, ConstRows(hidden.data(), 0, 20), ConstRows(logits.data(), 0, 6))
            .rows,
        0u);
  }
}

TEST_F(MoeLayerTest, AutoTakesTheSchemesFirstRunner) {
  EXPECT_EQ(MoeLayer(BuiltinRegistry(), config_, {}, case_.Weights()).runner().name(), "aiter");
}

TEST_F(MoeLayerTest, RefusesWhatCannotBe) {
  ExpectError(ErrorCode::kNotFound, {"runner \"ascent\"", "aiter"},
              [&] { MoeLayer(BuiltinRegistry(), config_, {.runner = "ascent"}, case_.Weights()); });
  ExpectError(ErrorCode::kUnsupported, {"--moe-a2a pplx"},
              [&] { MoeLayer(BuiltinRegistry(), config_, {.a2a = "pplx"}, case_.Weights()); });
  MoeLayerConfig too_many = config_;
  too_many.topk.top_k = 7;
  ExpectError(ErrorCode::kInvalidArgument, {"top_k", "1 to 6", "7"},
              [&] { MoeLayer(BuiltinRegistry(), too_many, {}, case_.Weights()); });
  MoeLayerConfig other_scheme = config_;
  other_scheme.scheme_w2 = "fp8_blok";
  ExpectError(ErrorCode::kNotFound, {"scheme \"fp8_blok\"", "did you mean \"fp8_block\""},
              [&] { MoeLayer(BuiltinRegistry(), other_scheme, {}, case_.Weights()); });
  other_scheme.scheme_w2 = "fp8_block";
  ExpectError(ErrorCode::kInvalidArgument,
              {"layer 3", "w2 (down)", "scheme fp8_block", "BF16 without scales"},
              [&] { MoeLayer(BuiltinRegistry(), other_scheme, {}, case_.Weights()); });
  ExpertWeights short_weights = case_.Weights();
  short_weights.w2.data.pop_back();
  ExpectError(ErrorCode::kInvalidArgument, {"layer 3", "w2 (down)", "6 experts", "weights of 5"},
              [&] { MoeLayer(BuiltinRegistry(), config_, {}, short_weights); });
  MoeCase halves(6, 20, 12, DType::kF16, random_);
  ExpectError(ErrorCode::kUnsupported, {"--act-dtype bf16", "F16"}, [&] {
    MoeLayer(BuiltinRegistry(), config_, {.act_dtype = "bf16"}, halves.Weights());
  });
}

// Numbers that would make every result wrong are refused when the layer is built; a good layer
// follows each.
TEST_F(MoeLayerTest, RefusesNumbersWithoutMeaning) {
  const auto expect_refusal =
      [&](std::initializer_list<std::string_view> parts,
          const std::function<void(MoeLayerConfig&, ExpertWeights&, MoeLayerOptions&)>& spoil) {
        MoeLayerConfig config = config_;
        ExpertWeights weights = case_.Weights();
        MoeLayerOptions options;
        spoil(config, weights, options);
        ExpectError(ErrorCode::kInvalidArgument, parts,
                    [&] { MoeLayer(BuiltinRegistry(), config, options, weights); });
        EXPECT_NO_THROW(MoeLayer(BuiltinRegistry(), config_, {}, case_.Weights()));
      };
  for (double factor : {0.0, -2.0, std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity()}) {
    expect_refusal(
        {"layer 3", "routed_scaling_factor", "positive and finite"},
        [&](auto& config, auto&, auto&) { config.runner.routed_scaling_factor = factor; });
  }
  expect_refusal({"layer 3", "shared experts", "2.5", "must be equal"},
                 [](auto& config, auto&, auto&) {
                   config.topk.num_fused_shared_experts = 1;
                   config.topk.num_experts = 5;
                   config.runner.routed_scaling_factor = 2.5;
                 });
  expect_refusal({"act_dtype", "\"f64\""},
                 [](auto&, auto&, auto& options) { options.act_dtype = "f64"; });
  expect_refusal({"layer 3", "hidden_size 0"}, [](auto&, auto& weights, auto&) {
    weights.hidden_size = 0;
    weights.w1.cols = weights.w3.cols = weights.w2.rows = 0;
  });
  expect_refusal({"layer 3", "activation scale 2", "w3 (up) 1"},
                 [](auto&, auto& weights, auto&) { weights.w1.act.scale = 2; });
}

// A runner that a scheme does not list is refused although it is registered.
TEST_F(MoeLayerTest, ARegisteredRunnerStillNeedsTheScheme) {
  Registry registry;
  RegisterBuiltins(registry);
  registry.Add(RunnerEntry{"mine", "a runner of a test", nullptr});
  ExpectError(ErrorCode::kUnsupported, {"runner mine", "scheme unquant", "aiter"},
              [&] { MoeLayer(registry, config_, {.runner = "mine"}, case_.Weights()); });
}

// Contract 3.0: one outstanding dispatch, combine needs one, and an error in between leaves the
// layer usable.
TEST_F(MoeLayerTest, DispatcherStages) {
  MoeRunnerConfig config;
  config.layer_id = 5;
  const auto dispatcher = BuiltinRegistry().FindDispatcher("standard").make({config, "aiter"});
  const std::vector<float> hidden(8);
  const ConstRows rows(hidden.data(), 2, 4);
  StandardCombineInput input(context_.arena.AllocateRows(2, 4));
  ExpectError(ErrorCode::kFailedPrecondition, {"layer 5", "combine_a without"},
              [&] { dispatcher->Combine(context_, input); });
  dispatcher->Dispatch(context_, rows, {});
  ExpectError(ErrorCode::kFailedPrecondition, {"layer 5", "outstanding"},
              [&] { dispatcher->Dispatch(context_, rows, {}); });
  StandardCombineInput wrong_rows(context_.arena.AllocateRows(3, 4));
  ExpectError(ErrorCode::kInvalidArgument, {"2 rows must come back", "found 3"},
              [&] { dispatcher->Combine(context_, wrong_rows); });
  StandardCombineInput wrong_promise = input;
  wrong_promise.promises.weights_applied_by = WeightsAppliedBy::kCombine;
  ExpectError(ErrorCode::kInvalidArgument,
              {"layer 5", "weights applied by the runner", "weights applied by the combine"},
              [&] { dispatcher->Combine(context_, wrong_promise); });
  EXPECT_EQ(dispatcher->Combine(context_, input).rows, 2u);
  ExpectError(ErrorCode::kFailedPrecondition, {"combine_a without"},
              [&] { dispatcher->Combine(context_, input); });
  dispatcher->Dispatch(context_, rows, {});
  dispatcher->Abort();
  EXPECT_NO_THROW(dispatcher->Dispatch(context_, rows, {}));
}

// A layer whose runner throws once works the next time.
TEST_F(MoeLayerTest, StaysUsableAfterAnErrorInTheRunner) {
  static bool fail = true;
  Registry registry;
  RegisterBuiltins(registry);
  registry.Add(
      FusedEntry{"none", "aiter",
                 [](ExecContext& context, const DispatchOutput& output, const MoeQuantInfo&,
                    const MoeRunnerConfig& config) -> const CombineInput& {
                   if (fail) throw Error(ErrorCode::kInternal, "planted");
                   return *context.arena.New<StandardCombineInput>(context.arena.AllocateRows(
                       As<StandardDispatchOutput>(output).hidden_states.rows, config.hidden_size));
                 }});
  MoeLayer layer(registry, config_, {}, case_.Weights());
  const std::vector<float> hidden(40);
  const std::vector<float> logits(12);
  const auto forward = [&] {
    return layer.Forward(context_, ConstRows(hidden.data(), 2, 20), ConstRows(logits.data(), 2, 6));
  };
  ExpectError(ErrorCode::kInternal, {"planted"}, forward);
  fail = false;
  EXPECT_EQ(forward().rows, 2u);
}

}  // namespace
}  // namespace switchyard::moe
