// Replays every recorded case (the few of tests/golden where the large set is absent) of the kinds
// that this build knows; those whose results depend on kernels on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/replay/replay.h"
#include "testing/goldens.h"
#include "testing/targets.h"

namespace switchyard::replay {
namespace {

std::vector<std::filesystem::path> CasesOf(std::string_view kind) {
  std::vector<std::filesystem::path> cases;
  const auto root = testing::GoldenDir() ? *testing::GoldenDir() : testing::LocalGoldenDir();
  const auto folder = root / "moe-layer" / "cases" / kind;
  if (!std::filesystem::is_directory(folder)) return cases;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") cases.push_back(entry.path());
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

// Every way to compute a case: a layer with each registered runner, in f32 and bf16, with and
// without its activation quantisation.
std::vector<ReplayOptions> AllOptions(std::string_view kind) {
  std::vector<ReplayOptions> all;
  if (kind != "layer" && kind != "qlayer") return {{}};
  for (const moe::RunnerEntry& runner : moe::BuiltinRegistry().runners()) {
    for (const char* act_dtype : {"f32", "bf16"}) {
      for (bool activation_quant : {true, false})
        all.push_back({.runner = std::string(runner.name),
                       .act_dtype = act_dtype,
                       .activation_quant = activation_quant});
    }
  }
  return all;
}

bool UsesKernels(std::string_view kind) {
  return kind == "activation" || kind == "layer" || kind == "qlayer" || kind == "quant";
}

class GoldenMoeTest : public ::testing::TestWithParam<std::string_view> {
 protected:
  // Replays one case and reports what failed.
  void Replay(const std::filesystem::path& path, const ReplayOptions& options) {
    const ReplayResult result = ReplayCase(path, moe::BuiltinRegistry(), context_, options);
    if (!result.skipped.empty()) {
      ++num_skipped_;
      return;
    }
    ++num_run_;
    EXPECT_TRUE(result.passed()) << path << " with runner " << options.runner << ", activations "
                                 << options.act_dtype;
    for (const CheckResult& check : result.checks) {
      EXPECT_TRUE(check.passed) << path.filename() << ": " << check.tensor << ": error "
                                << check.error << ", tolerance " << check.tolerance << ": "
                                << check.detail;
    }
  }

  ThreadPool pool_{2};
  Arena arena_;
  ExecContext context_{pool_, arena_};
  size_t num_run_ = 0, num_skipped_ = 0;
};

TEST_P(GoldenMoeTest, EveryCaseAgrees) {
  const std::vector<std::filesystem::path> cases = CasesOf(GetParam());
  ASSERT_FALSE(cases.empty());
  const auto replay_all = [&] {
    for (const ReplayOptions& options : AllOptions(GetParam())) {
      for (const auto& path : cases) Replay(path, options);
    }
  };
  if (UsesKernels(GetParam())) {
    testing::ForEachTarget(replay_all);
  } else {
    replay_all();
  }
  std::printf("%s: %zu cases, %zu replays, %zu skipped\n", std::string(GetParam()).c_str(),
              cases.size(), num_run_, num_skipped_);
  EXPECT_GT(num_run_, 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, GoldenMoeTest, ::testing::ValuesIn(KnownKinds()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace switchyard::replay
