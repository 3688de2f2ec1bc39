#include "switchyard/core/profile.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string_view>

namespace switchyard {
namespace {

TEST(Profile, TimeBelongsToTheInnermostStage) {
  Profile profile;
  const auto start = std::chrono::steady_clock::now();
  profile.Begin();
  {
    const StageTimer outer(&profile, Stage::kMoePrepare);
    {
      const StageTimer inner(&profile, Stage::kGateUp, [] {
        return StageWork{100, 200, Arithmetic::kInt8};
      });
    }
    const StageTimer inner(&profile, Stage::kDown);
  }
  profile.End();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(profile.row(Stage::kMoePrepare).calls, 1u);
  EXPECT_EQ(profile.row(Stage::kGateUp).calls, 1u);
  EXPECT_EQ(profile.row(Stage::kDown).calls, 1u);
  EXPECT_EQ(profile.row(Stage::kOther).calls, 0u);
  EXPECT_EQ(profile.row(Stage::kGateUp).bytes, 100);
  EXPECT_EQ(profile.row(Stage::kGateUp).ops[static_cast<size_t>(Arithmetic::kInt8)], 200);
  EXPECT_GT(profile.row(Stage::kOther).seconds, 0);
  EXPECT_LE(profile.seconds(), seconds);
}

TEST(Profile, IsNotAskedWhenItIsOff) {
  bool asked = false;
  const StageTimer timer(nullptr, Stage::kHead, [&] {
    asked = true;
    return StageWork{};
  });
  EXPECT_FALSE(asked);
}

TEST(Profile, TimesOfSeveralRunsAddUp) {
  Profile profile;
  for (int run = 0; run < 3; ++run) {
    profile.Begin();
    { const StageTimer timer(&profile, Stage::kHead); }
    profile.End();
  }
  EXPECT_EQ(profile.row(Stage::kHead).calls, 3u);
}

TEST(Profile, StagesHaveNames) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < kNumStages; ++i) names.insert(StageName(static_cast<Stage>(i)));
  EXPECT_EQ(names.size(), kNumStages);
  EXPECT_FALSE(names.contains(""));
}

TEST(Profile, ArithmeticFollowsWeightsAndActivations) {
  EXPECT_EQ(ArithmeticOf(DType::kBF16, DType::kBF16), Arithmetic::kBF16);
  EXPECT_EQ(ArithmeticOf(DType::kF8E4M3, DType::kBF16), Arithmetic::kBF16);
  EXPECT_EQ(ArithmeticOf(DType::kF8E4M3, DType::kF32), Arithmetic::kF32);
  EXPECT_EQ(ArithmeticOf(DType::kF16, DType::kF32), Arithmetic::kF32);
  for (DType dtype : {DType::kI8, DType::kI4, DType::kU4, DType::kF4E2M1, DType::kGgmlQ4K})
    EXPECT_EQ(ArithmeticOf(dtype, DType::kF32), Arithmetic::kInt8);
}

}  // namespace
}  // namespace switchyard
