// Cases that ranks replay together; the ranks are threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "replay/case_builder.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/parallel/run_ranks.h"
#include "switchyard/replay/replay.h"
#include "testing/errors.h"
#include "testing/goldens.h"
#include "testing/safetensors_builder.h"

namespace switchyard::replay {
namespace {

using testing::CaseBuilder;
using testing::ExpectError;

std::vector<std::filesystem::path> Cases(std::initializer_list<const char*> kinds) {
  std::vector<std::filesystem::path> cases;
  for (const char* kind : kinds) {
    const auto folder = testing::LocalGoldenDir() / "moe-layer" / "cases" / kind;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      cases.push_back(entry.path());
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

// One rank's replay of a case.
ReplayResult ReplayOnRank(const std::filesystem::path& path, ReplayOptions options,
                          ProcessGroup& world) {
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  options.world = &world;
  return ReplayCase(path, moe::BuiltinRegistry(), context, options);
}

// What rank 0 found.
ReplayResult ReplayOverRanks(const std::filesystem::path& path, const ReplayOptions& options,
                             size_t num_ranks) {
  ReplayResult first;
  RunRanks(num_ranks, [&](ProcessGroup& world) {
    const ReplayResult result = ReplayOnRank(path, options, world);
    if (world.rank() == 0) {
      first = result;
    } else {
      EXPECT_FALSE(result.name.empty());
      EXPECT_TRUE(result.checks.empty()) << "rank 0 alone compares";
    }
  });
  return first;
}

std::string Describe(const ReplayResult& result) {
  std::string text = fmt::format("{}/{}: {}", result.kind, result.name, result.skipped);
  for (const CheckResult& check : result.checks) {
    if (!check.passed)
      text += fmt::format("\n  {}: error {}, {}", check.tensor, check.error, check.detail);
  }
  return text;
}

struct Way {
  std::string a2a;
  std::string runner;
  moe::DeepepMode mode = moe::DeepepMode::kAuto;
  bool own_tokens = false;

  ReplayOptions Options() const {
    ReplayOptions options;
    options.a2a = a2a;
    options.runner = runner;
    options.ep.deepep_mode = mode;
    options.ep.tokens_are_replicated = !own_tokens;
    options.ep.timeout = std::chrono::seconds(60);
    return options;
  }
};

std::vector<Way> AllWays() {
  std::vector<Way> ways;
  for (const bool own_tokens : {false, true}) {
    for (const char* runner : {"auto", "ascend", "reference"}) {
      ways.push_back({"none", runner, moe::DeepepMode::kAuto, own_tokens});
      if (runner == std::string_view("reference")) continue;
      ways.push_back({"deepep", runner, moe::DeepepMode::kNormal, own_tokens});
      ways.push_back({"deepep", runner, moe::DeepepMode::kLowLatency, own_tokens});
      for (const char* a2a : {"mooncake", "nixl", "mori", "ascend_fuseep"})
        ways.push_back({a2a, runner, moe::DeepepMode::kAuto, own_tokens});
    }
  }
  return ways;
}

// Skipped is what one rank would skip too, and what the result of ranks cannot equal.
TEST(ReplayRanks, LayersAgreeOverEveryBackend) {
  for (const size_t ranks : {1u, 2u, 3u, 4u}) {
    size_t passed = 0;
    for (const Way& way : AllWays()) {
      for (const auto& path : Cases({"layer", "qlayer"})) {
        const ReplayResult result = ReplayOverRanks(path, way.Options(), ranks);
        EXPECT_TRUE(result.passed() || !result.skipped.empty())
            << way.a2a << " " << way.runner << ", " << ranks << " ranks: " << Describe(result);
        passed += result.passed() ? 1 : 0;
        const bool is_plain = way.a2a == "none" && way.runner == "auto";
        EXPECT_TRUE(result.passed() || !is_plain) << ranks << " ranks: " << Describe(result);
      }
    }
    EXPECT_GT(passed, 150u) << ranks << " ranks";
  }
}

// 6 experts over 4 ranks: two have copies.
TEST(ReplayRanks, ExpertsThatRanksDoNotDivide) {
  const auto cases = Cases({"layer"});
  const auto six = std::find_if(cases.begin(), cases.end(), [](const auto& path) {
    return path.filename() == "059-act-step2.safetensors";
  });
  ASSERT_NE(six, cases.end());
  for (const char* a2a : {"none", "deepep", "mori", "nixl", "ascend_fuseep"}) {
    for (const size_t ranks : {4u, 5u, 7u, 8u}) {
      const ReplayResult result = ReplayOverRanks(*six, Way{a2a, "aiter"}.Options(), ranks);
      EXPECT_TRUE(result.passed()) << a2a << ", " << ranks << " ranks: " << Describe(result);
    }
  }
}

TEST(ReplayRanks, DispatchesGoOverTheWorldIfItIsLargeEnough) {
  for (const auto& path : Cases({"dispatch"})) {
    for (const size_t ranks : {1u, 2u, 4u, 5u}) {
      const ReplayResult result = ReplayOverRanks(path, {}, ranks);
      EXPECT_TRUE(result.passed()) << ranks << " ranks: " << Describe(result);
      const auto over = [&](const std::string& how) {
        return std::any_of(result.checks.begin(), result.checks.end(), [&](const auto& check) {
          return check.tensor.find(how) != std::string::npos;
        });
      };
      if (result.name == "normal-skipped") {
        EXPECT_TRUE(over("out.recv_topk_ids (deepep_normal, 4 threads)"));
        EXPECT_TRUE(over("out.recv_topk_ids (deepep_normal, 4 threads on 2 nodes)"));
        EXPECT_EQ(over("out.recv_topk_ids (deepep_normal, 4 ranks (threads))"), ranks >= 4);
      } else if (result.name == "ll-skipped") {
        for (const char* name : {"deepep_ll", "mooncake", "nixl"})
          EXPECT_EQ(over(fmt::format("out.masked_m ({}, 4 ranks (threads))", name)), ranks >= 4);
      } else if (result.name == "mori-w2") {
        EXPECT_EQ(over("out.recv_src_token (mori, 2 ranks (threads))"), ranks >= 2);
      }
    }
  }
}

// What needs no ranks is rank 0's.
TEST(ReplayRanks, OtherKindsAreOfTheFirstRank) {
  for (const auto& path : Cases({"routing", "eplb", "quant", "activation"})) {
    const ReplayResult result = ReplayOverRanks(path, {}, 2);
    EXPECT_TRUE(result.passed()) << Describe(result);
  }
}

// A batch that is scaled as one has another scale on every rank.
TEST(ReplayRanks, WhatRanksCannotEqualIsSkipped) {
  testing::TempFolder folder;
  const auto path = folder / "case.safetensors";
  CaseBuilder builder;
  builder.kind = "qlayer";
  builder.config = {
      {"activation", "silu"},      {"is_gated", false},         {"scheme", "fp8_tensor"},
      {"num_tokens", 2},           {"num_experts", 2},          {"top_k", 1},
      {"hidden_size", 1},          {"intermediate_size", 1},    {"bias", false},
      {"act_quant", "fp8_tensor"}, {"gate_up_layout", "halves"}};
  builder.F32("in.hidden", {2, 1}, {1, 1})
      .I32("in.topk_ids", {2, 1}, {0, 1})
      .F32("in.topk_weights", {2, 1}, {1, 1})
      .Tensor<uint8_t>("w.w13_q", DType::kF8E4M3, {2, 1, 1}, {0x38, 0x38})
      .F32("w.w13_scale", {2}, {1, 1})
      .Tensor<uint8_t>("w.w2_q", DType::kF8E4M3, {2, 1, 1}, {0x38, 0x38})
      .F32("w.w2_scale", {2}, {1, 1})
      .F32("out.y_sim", {2, 1}, {0.731f, 0.731f});
  builder.Check({{"tensor", "out.y_sim"}, {"mode", "close"}, {"atol", 0.05}, {"rtol", 0}});
  builder.Write(path);
  EXPECT_TRUE(ReplayOverRanks(path, {}, 1).passed());
  const ReplayResult result = ReplayOverRanks(path, {}, 2);
  EXPECT_NE(result.skipped.find("one activation scale for all rows"), std::string::npos)
      << Describe(result);
  // And what the dispatchers do not do.
  for (const auto& golden : Cases({"layer"})) {
    if (golden.filename() != "046-no-combine-bias-bf16.safetensors") continue;
    const ReplayResult sent = ReplayOverRanks(golden, Way{"deepep", "aiter"}.Options(), 2);
    EXPECT_NE(sent.skipped.find("no_combine"), std::string::npos) << Describe(sent);
    EXPECT_TRUE(sent.checks.empty());
  }
}

// --- Ranks that fail ----------------------------------------------------------------------------

// Every rank gets the error of one.
void ExpectOnAllRanks(ErrorCode code, std::initializer_list<std::string_view> words, size_t ranks,
                      const std::function<void(ProcessGroup&)>& body) {
  RunRanks(ranks, [&](ProcessGroup& world) { ExpectError(code, words, [&] { body(world); }); });
}

TEST(ReplayRanks, AnErrorOfOneRankIsThatOfAll) {
  const auto path = Cases({"layer"})[0];
  ExpectOnAllRanks(ErrorCode::kNotFound, {"no_such_case"}, 3, [&](ProcessGroup& world) {
    ReplayOnRank(world.rank() == 1 ? "no_such_case" : path, {}, world);
  });
  ExpectOnAllRanks(ErrorCode::kFailedPrecondition, {"rank 2 has another case", "act-step2"}, 3,
                   [&](ProcessGroup& world) {
                     ReplayOnRank(Cases({"layer"})[world.rank() == 2 ? 4 : 0], {}, world);
                   });
  ExpectOnAllRanks(ErrorCode::kFailedPrecondition, {"rank 1", "a2a mori", "a2a none"}, 2,
                   [&](ProcessGroup& world) {
                     ReplayOptions options;
                     if (world.rank() == 1) options.a2a = "mori";
                     ReplayOnRank(path, options, world);
                   });
}

// The ranks that only waited for the one that failed do not speak for it, and the world is good for
// the next case.
TEST(ReplayRanks, ABadIdIsRefusedAndTheNextCaseRuns) {
  testing::TempFolder folder;
  const auto path = folder / "case.safetensors";
  CaseBuilder builder;
  builder.kind = "layer";
  builder.config = {{"activation", "silu"},      {"is_gated", false}, {"num_tokens", 4},
                    {"num_experts", 2},          {"top_k", 1},        {"hidden_size", 1},
                    {"intermediate_size", 1},    {"moe_ep_size", 1},  {"routing", nullptr},
                    {"gate_up_layout", "halves"}};
  builder.F32("in.hidden", {4, 1}, {1, 1, 1, 1})
      .I32("in.topk_ids", {4, 1}, {0, 1, 1, 9})  // of the last rank
      .F32("in.topk_weights", {4, 1}, {1, 1, 1, 1})
      .F32("w.w13", {2, 1, 1}, {1, 1})
      .F32("w.w2", {2, 1, 1}, {1, 1})
      .F32("out.y", {4, 1}, {0, 0, 0, 0});
  builder.Write(path);
  for (const char* a2a : {"none", "deepep", "nixl"}) {
    SCOPED_TRACE(a2a);
    RunRanks(4, [&](ProcessGroup& world) {
      const ReplayOptions options = Way{a2a, "aiter", moe::DeepepMode::kAuto, true}.Options();
      ExpectError(ErrorCode::kInvalidArgument, {"token 3", "expert 9"},
                  [&] { ReplayOnRank(path, options, world); });
      const ReplayResult next = ReplayOnRank(Cases({"layer"})[0], options, world);
      EXPECT_TRUE(next.passed() || world.rank() != 0) << Describe(next);
    });
  }
}

// --- Without ranks ------------------------------------------------------------------------------

TEST(ReplayRanks, ABackendWithoutRanksHasOne) {
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  for (const auto& path : Cases({"layer", "qlayer"})) {
    for (const Way& way : AllWays()) {
      const ReplayResult result = ReplayCase(path, moe::BuiltinRegistry(), context, way.Options());
      EXPECT_TRUE(result.passed() || !result.skipped.empty()) << way.a2a << Describe(result);
    }
  }
}

}  // namespace
}  // namespace switchyard::replay
