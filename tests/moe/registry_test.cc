// Contract 1.5: explicit registration, duplicates and misses name their keys, fused functions and
// their switch.
#include "switchyard/moe/registry/registry.h"

#include <gtest/gtest.h>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/moe_runner.h"
#include "testing/errors.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

TEST(Registry, BuiltinsAreThereOnce) {
  Registry registry;
  RegisterBuiltins(registry);
  EXPECT_EQ(registry.FindRunner("aiter").name, "aiter");
  EXPECT_EQ(registry.FindRunner("reference").name, "reference");
  EXPECT_EQ(registry.DispatcherFor("none", "aiter").name, "standard");
  EXPECT_EQ(registry.FindScheme("unquant").name, "unquant");
  for (const PrePermuteEntry& pre : registry.pre_permutes()) {
    EXPECT_NO_THROW(registry.FindPostPermute(pre.runner, pre.format))
        << "every pre-permute has its post-permute";
    EXPECT_NO_THROW(registry.FindRunner(pre.runner));
  }
  ExpectError(ErrorCode::kInvalidArgument, {"registered twice"},
              [&] { RegisterBuiltins(registry); });
}

TEST(Registry, DuplicatesNameTheirKeys) {
  Registry registry;
  RegisterBuiltins(registry);
  ExpectError(ErrorCode::kInvalidArgument, {"runner", "\"aiter\""},
              [&] { registry.Add(registry.FindRunner("aiter")); });
  ExpectError(ErrorCode::kInvalidArgument, {"dispatcher", "\"standard\""},
              [&] { registry.Add(DispatcherEntry(registry.FindDispatcher("standard"))); });
  ExpectError(ErrorCode::kInvalidArgument, {"scheme", "\"unquant\""},
              [&] { registry.Add(SchemeEntry(registry.FindScheme("unquant"))); });
  ExpectError(ErrorCode::kInvalidArgument, {"pre-permute", "standard", "aiter"}, [&] {
    registry.Add(PrePermuteEntry{DispatchFormat::kStandard, "aiter", nullptr});
  });
  ExpectError(ErrorCode::kInvalidArgument, {"post-permute", "standard", "reference"}, [&] {
    registry.Add(PostPermuteEntry{"reference", DispatchFormat::kStandard, nullptr});
  });
  registry.Add(FusedEntry{"none", "mine", nullptr});
  ExpectError(ErrorCode::kInvalidArgument, {"fused function", "none", "mine"}, [&] {
    registry.Add(FusedEntry{"none", "mine", nullptr});
  });
}

TEST(Registry, MissesNameBothKeysAndWhatThereIs) {
  const Registry& registry = BuiltinRegistry();
  ExpectError(ErrorCode::kNotFound,
              {"pre-permute", "deepep_v2", "aiter",
               "registered:", "(dispatch format standard, runner aiter)"},
              [&] { registry.FindPrePermute(DispatchFormat::kDeepepV2, "aiter"); });
  ExpectError(ErrorCode::kNotFound, {"post-permute", "ascend_tp", "reference"},
              [&] { registry.FindPostPermute("reference", DispatchFormat::kAscendTp); });
  ExpectError(ErrorCode::kNotFound, {"runner \"aitre\"", "did you mean \"aiter\""},
              [&] { registry.FindRunner("aitre"); });
  ExpectError(ErrorCode::kNotFound, {"scheme", "fp9"}, [&] { registry.FindScheme("fp9"); });
  ExpectError(ErrorCode::kNotFound, {"dispatcher"}, [&] { registry.FindDispatcher("morri"); });
  ExpectError(ErrorCode::kUnsupported,
              {"--moe-a2a deepep", "reference", "(deepep, aiter)", "(deepep, ascend)"},
              [&] { registry.DispatcherFor("deepep", "reference"); });
  ExpectError(ErrorCode::kUnsupported, {"--moe-a2a pplx", "no dispatcher"},
              [&] { registry.DispatcherFor("pplx", "aiter"); });
  EXPECT_EQ(registry.FindFused("none", "aiter"), nullptr) << "a missing fused function is no error";
}

// A fused function takes the place of permute, core and permute, unless the switch drops it.
TEST(MoeRunner, TakesTheFusedFunctionUnlessDisabled) {
  Registry registry;
  RegisterBuiltins(registry);
  registry.Add(
      FusedEntry{"none", "aiter",
                 [](ExecContext& context, const DispatchOutput& output, const MoeQuantInfo&,
                    const MoeRunnerConfig& config) -> const CombineInput& {
                   const Rows rows = context.arena.AllocateRows(
                       As<StandardDispatchOutput>(output).hidden_states.rows, config.hidden_size);
                   for (size_t t = 0; t < rows.rows; ++t)
                     std::fill_n(rows.Row(t), rows.cols, 42.0f);
                   return *context.arena.New<StandardCombineInput>(rows);
                 }});
  MoeRunnerConfig config;
  config.hidden_size = 3;
  const auto fused =
      MoeRunner::Create(registry, {"aiter", "none", false}, config, DispatchFormat::kStandard);
  EXPECT_TRUE(fused->is_fused());
  const auto modular =
      MoeRunner::Create(registry, {"aiter", "none", true}, config, DispatchFormat::kStandard);
  EXPECT_FALSE(modular->is_fused());
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  const std::vector<float> x(6, 1.0f);
  const StandardDispatchOutput dispatched(ConstRows(x.data(), 2, 3), TopKOutput{});
  EXPECT_EQ(As<StandardCombineInput>(fused->Run(context, dispatched, {})).hidden_states.Row(1)[2],
            42.0f);
}

TEST(MoeRunner, AMissingPairIsAnErrorAtConstruction) {
  ExpectError(ErrorCode::kNotFound, {"pre-permute", "ascend_tp", "aiter"}, [] {
    MoeRunner::Create(BuiltinRegistry(), {"aiter", "none", false}, {}, DispatchFormat::kAscendTp);
  });
}

TEST(RunningState, IsTyped) {
  struct Left {
    int value;
  };
  struct Other {
    int value;
  };
  Arena arena;
  RunningState state;
  state.Emplace<Left>(arena, 7);
  EXPECT_EQ(state.Get<Left>().value, 7);
  ExpectError(ErrorCode::kInternal, {"running state"}, [&] { state.Get<Other>(); });
}

TEST(DispatchOutput, CastsAreChecked) {
  const DispatchOutput other{DispatchFormat::kDeepepLl, {}};
  ExpectError(ErrorCode::kInternal, {"deepep_ll", "standard"},
              [&] { As<StandardDispatchOutput>(other); });
}

}  // namespace
}  // namespace switchyard::moe
