#include "bench_profile.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::cli {
namespace {

constexpr kernels::MachineLimits kLimits{10, 100, 200, 0};

Profile OneProfile() {
  Profile profile;
  profile.Begin();
  {
    const StageTimer timer(&profile, Stage::kHead, [] {
      return StageWork{1e9, 4e9, Arithmetic::kBF16};
    });
  }
  {
    const StageTimer timer(&profile, Stage::kGateUp, [] {
      return StageWork{1e6, 5e9, Arithmetic::kInt8};
    });
  }
  profile.End();
  return profile;
}

PhaseReport OnePhase() { return MakeReport("decode", "decode of <b>", OneProfile(), kLimits); }

const StageReport& Find(const PhaseReport& phase, Stage stage) {
  size_t i = 0;
  while (phase.stages.at(i).stage != stage) ++i;
  return phase.stages[i];
}

TEST(BenchProfile, TheLongerOfMemoryAndArithmeticIsTheLimit) {
  const PhaseReport phase = OnePhase();
  EXPECT_DOUBLE_EQ(Find(phase, Stage::kHead).limit_seconds, 0.1);
  EXPECT_TRUE(Find(phase, Stage::kHead).is_memory_bound);
  // This CPU has no int8 dots: f32 it is.
  EXPECT_DOUBLE_EQ(Find(phase, Stage::kGateUp).limit_seconds, 0.05);
  EXPECT_FALSE(Find(phase, Stage::kGateUp).is_memory_bound);
  EXPECT_EQ(PeakOf(kLimits, Arithmetic::kInt8), std::pair(Arithmetic::kF32, 100.0));
  EXPECT_EQ(PeakOf(kLimits, Arithmetic::kBF16), std::pair(Arithmetic::kBF16, 200.0));
}

TEST(BenchProfile, StagesAddUp) {
  const PhaseReport phase = OnePhase();
  double seconds = 0;
  for (const StageReport& stage : phase.stages) seconds += stage.measured.seconds;
  EXPECT_DOUBLE_EQ(seconds, phase.seconds);
  const nlohmann::json json = nlohmann::json::parse(ProfileJson(phase).dump());
  EXPECT_EQ(json["stages"].size(), phase.stages.size());
  EXPECT_EQ(json["stages"][1]["stage"], "head");
  EXPECT_EQ(json["stages"][1]["bound_by"], "memory");
}

TEST(BenchProfile, TableHasALinePerStage) {
  const std::string table = ProfileTable(OnePhase());
  for (const char* word : {"decode of <b>", "gate and up", "head", "memory", "compute", "GB/s"})
    EXPECT_NE(table.find(word), std::string::npos) << word;
  EXPECT_EQ(table.find(" \n"), std::string::npos) << table;
}

TEST(BenchProfile, PageIsOneFileAndEscapesNames) {
  const PhaseReport phases[] = {OnePhase(), MakeReport("prefill", "nothing", Profile(), kLimits)};
  const std::string facts[] = {"2 threads & more"};
  const std::string page = ProfilePage("Profile of <i>", facts, phases);
  EXPECT_EQ(page.find("<b>"), std::string::npos);
  EXPECT_EQ(page.find("<i>"), std::string::npos);
  EXPECT_NE(page.find("2 threads &amp; more"), std::string::npos);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("nan"), std::string::npos);
  EXPECT_EQ(page.find("inf\""), std::string::npos);
  const auto count = [&](const std::string& word) {
    size_t found = 0;
    for (size_t at = page.find(word); at != std::string::npos; at = page.find(word, at + 1))
      ++found;
    return found;
  };
  EXPECT_EQ(count("<svg"), 1u);
  EXPECT_EQ(count("<table>"), 2u);
  EXPECT_EQ(count("http"), 1u) << "only the name of the SVG namespace";
  // Background, legend, three measured stages, two with a limit.
  EXPECT_EQ(count("<rect"), 1 + kNumStages + 3 + 2);
}

}  // namespace
}  // namespace switchyard::cli
