#include "switchyard/text/stop_matcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace switchyard {
namespace {

struct Result {
  std::string text;
  bool stopped;
  bool operator==(const Result&) const = default;
};

void PrintTo(const Result& result, std::ostream* out) {
  *out << '"' << result.text << "\" " << result.stopped;
}

Result Match(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  std::string text;
  for (const std::string& piece : pieces) text += matcher.Add(piece);
  text += matcher.Finish();
  return {text, matcher.stopped()};
}

// By definition: the text before the earliest match in the whole.
Result Reference(const std::vector<std::string>& stops, const std::string& whole) {
  size_t first = std::string::npos;
  for (const std::string& stop : stops) {
    if (!stop.empty()) first = std::min(first, whole.find(stop));
  }
  return first == std::string::npos ? Result{whole, false} : Result{whole.substr(0, first), true};
}

std::vector<std::string> Cut(const std::string& whole, size_t size) {
  std::vector<std::string> pieces;
  for (size_t i = 0; i < whole.size(); i += size) pieces.push_back(whole.substr(i, size));
  return pieces;
}

TEST(StopMatcherTest, StopOverSeveralPieces) {
  for (size_t size = 1; size <= 12; ++size) {
    EXPECT_EQ(Match({"DEFGHIJ"}, Cut("ABCDEFGHIJK", size)), (Result{"ABC", true}));
    EXPECT_EQ(Match({"x", "HIJ", "FG", "K"}, Cut("ABCDEFGHIJK", size)), (Result{"ABCDE", true}));
    EXPECT_EQ(Match({"ABCDEFGHIJK"}, Cut("ABCDEFGHIJK", size)), (Result{"", true}));
    EXPECT_EQ(Match({"ABCDEFGHIJKL"}, Cut("ABCDEFGHIJK", size)), (Result{"ABCDEFGHIJK", false}));
    EXPECT_EQ(Match({}, Cut("ABC", size)), (Result{"ABC", false}));
    EXPECT_EQ(Match({""}, Cut("ABC", size)), (Result{"ABC", false}));
  }
  EXPECT_EQ(Match({"終わり"}, {"これで", "終わ", "り", "です"}), (Result{"これで", true}));
}

TEST(StopMatcherTest, GivesOutWhatIsCertain) {
  StopMatcher matcher({"STOP"});
  EXPECT_EQ(matcher.Add("abc"), "abc");
  EXPECT_EQ(matcher.Add("dST"), "d");
  EXPECT_EQ(matcher.Add("S"), "ST");
  EXPECT_EQ(matcher.Add("TOPmore"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.Add("x"), "");
  EXPECT_EQ(matcher.Finish(), "");
}

// "bc" is complete while "abcd" could still come; it counts when the text ends.
TEST(StopMatcherTest, EarliestBeginningWins) {
  EXPECT_EQ(Match({"abcd", "bc"}, {"xabc"}), (Result{"xa", true}));
  EXPECT_EQ(Match({"abcd", "bc"}, {"xabc", "d"}), (Result{"x", true}));
  EXPECT_EQ(Match({"abcd", "bc"}, {"xabc", "e"}), (Result{"xa", true}));
}

TEST(StopMatcherTest, EqualsTheDefinition) {
  std::mt19937 random(11);
  auto word = [&](size_t most) {
    std::string text(1 + random() % most, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops(1 + random() % 3);
    for (std::string& stop : stops) stop = word(5);
    const std::string whole = word(20);
    EXPECT_EQ(Match(stops, Cut(whole, 1 + random() % 4)), Reference(stops, whole)) << whole;
  }
}

}  // namespace
}  // namespace switchyard
