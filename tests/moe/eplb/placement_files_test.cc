// Contract 7.2: placements and loads as JSON.
#include "switchyard/moe/eplb/placement_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "testing/errors.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

constexpr ExpertLocationSizes kSizes{2, 4, 6, 2, 1};  // 2 layers, 4 experts in 6 slots, 2 ranks

TEST(PlacementFiles, TrivialIsTheDefault) {
  const ExpertLocation location = InitialLocation("trivial", kSizes);
  const auto map = location.PhysicalToLogical(1);
  EXPECT_EQ(std::vector<int32_t>(map.begin(), map.end()), (std::vector<int32_t>{0, 1, 2, 3, 0, 1}));
}

TEST(PlacementFiles, APlacementSurvivesItsFile) {
  const std::vector<int32_t> map = {3, 2, 1, 0, 0, 1, 0, 0, 1, 2, 3, 3};
  const std::string path =
      (std::filesystem::temp_directory_path() / "switchyard_placement_test.json").string();
  WriteTextFile(path, FormatPlacement(kSizes, map));
  const ExpertLocation location = InitialLocation(path, kSizes);
  for (size_t layer = 0; layer < 2; ++layer)
    for (size_t p = 0; p < 6; ++p)
      EXPECT_EQ(location.PhysicalToLogical(layer)[p], map[layer * 6 + p]);
  std::filesystem::remove(path);
  ExpectError(ErrorCode::kNotFound, {path}, [&] { InitialLocation(path, kSizes); });
  ExpectError(ErrorCode::kUnavailable, {"/nowhere/at/all"},
              [] { WriteTextFile("/nowhere/at/all", "x"); });
  ExpectError(ErrorCode::kInvalidArgument, {"2 layers", "11"},
              [&] { FormatPlacement(kSizes, std::span(map).first(11)); });
}

TEST(PlacementFiles, LoadsOfStepsOrTheirSum) {
  const LoadTable one = ParseLoads(R"({"logical_count": [[1, 2, 3], [4, 5, 6.5]], "x": 1})", "t");
  EXPECT_EQ(one.num_steps, 1u);
  EXPECT_EQ(one.num_layers, 2u);
  EXPECT_EQ(one.num_logical, 3u);
  EXPECT_EQ(one.tokens_per_expert, (std::vector<float>{1, 2, 3, 4, 5, 6.5f}));
  const LoadTable two{2, 1, 2, {1, 2, 3, 4}};
  const LoadTable again = ParseLoads(FormatLoads(two), "t");
  EXPECT_EQ(again.num_steps, 2u);
  EXPECT_EQ(again.num_layers, 1u);
  EXPECT_EQ(again.tokens_per_expert, two.tokens_per_expert);
  ExpectError(ErrorCode::kInvalidArgument, {"2 steps"}, [] { FormatLoads({2, 1, 2, {1, 2, 3}}); });
}

TEST(PlacementFiles, LoadsGiveTheHeavyExpertReplicas) {
  const ExpertLocation location =
      InitialLocation(R"({"logical_count": [[90, 1, 1, 1], [1, 1, 1, 90]]})", kSizes);
  EXPECT_EQ(location.NumValid(0)[0], 3);
  EXPECT_EQ(location.NumValid(1)[3], 3);
}

TEST(PlacementFiles, BadFilesAreRefusedWithTheirPlace) {
  const auto bad = [](std::string_view text, std::initializer_list<std::string_view> words) {
    ExpectError(ErrorCode::kCorruptData, words, [&] { InitialLocation(text, kSizes); });
  };
  bad("{", {"init-expert-location", "byte 2"});
  bad("{\"a\": 1}", {"no field logical_count"});
  bad(R"({"physical_to_logical": 3})", {"physical_to_logical", "a list of 2", "number"});
  bad(R"({"physical_to_logical": [[0,1,2,3,0,1]]})", {"a list of 2", "1 entries"});
  bad(R"({"physical_to_logical": [[0,1,2,3,0,1], [0,1]]})", {"layer 1", "a list of 6"});
  bad(R"({"physical_to_logical": [[0,1,2,3,0,1], [0,1,2,4,0,1]]})", {"layer 1", "0 to 3"});
  bad(R"({"physical_to_logical": [[0,1,2,3,0,1], [0,1,2,-1,0,1]]})", {"layer 1", "0 to 3"});
  bad(R"({"logical_count": []})", {"logical_count", "0 entries"});
  bad(R"({"logical_count": [[[]]]})", {"logical_count", "0 entries"});
  bad(R"({"logical_count": [[1,2,3,4], [1,2,3]]})", {"step 0, layer 1", "a list of 4"});
  bad(R"({"logical_count": [[1,2,3,4], [1,2,-3,4]]})", {"layer 1", "numbers of 0"});
  bad(R"({"logical_count": [[1,2,3,1e300], [1,2,3,4]]})", {"layer 0", "numbers of 0"});
  bad(R"({"logical_count": [[1,2,3,4], [1,2,3,1e999]]})", {"init-expert-location"});
  const auto misfit = [](std::string_view text, std::initializer_list<std::string_view> words) {
    ExpectError(ErrorCode::kInvalidArgument, words, [&] { InitialLocation(text, kSizes); });
  };
  misfit(R"({"logical_count": [[1,2,3,4]]})", {"1 layers", "2"});
  misfit(R"({"physical_to_logical": [[0,1,2,3,0,1], [0,1,2,2,0,1]]})", {"layer 1", "expert 3"});
}

}  // namespace
}  // namespace switchyard::moe
