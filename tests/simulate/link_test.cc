#include "switchyard/simulate/link.h"

#include <gtest/gtest.h>

#include <string>

#include "switchyard/simulate/exchange.h"
#include "testing/errors.h"

namespace switchyard::simulate {
namespace {

using testing::ExpectError;

TEST(Link, DefaultsAreThoseOfTheDesign) {
  const LinkProfile link = ReadLink("empty.json", "{}");
  EXPECT_EQ(link.name, "empty.json");
  EXPECT_EQ(link.o_us, 0.4);
  EXPECT_EQ(link.latency_us, 1.2);
  EXPECT_EQ(link.gap_us, 0.2);
  EXPECT_EQ(link.nic_gbytes_per_s, 25);
  EXPECT_EQ(link.nic_per, NicOwner::kNode);
  EXPECT_EQ(link.memory_gbytes_per_s, 13);
}

TEST(Link, EveryFieldIsRead) {
  double value = 2;
  std::string text = R"({"name": "mine", "nic_per": "rank")";
  for (const LinkField& field : LinkFields())
    text += ", \"" + std::string(field.name) + "\": " + std::to_string(value++);
  const LinkProfile link = ReadLink("cluster.json", text + "}");
  EXPECT_EQ(link.name, "mine");
  EXPECT_EQ(link.nic_per, NicOwner::kRank);
  value = 2;
  for (const LinkField& field : LinkFields()) EXPECT_EQ(link.*field.value, value++) << field.name;
}

TEST(Link, EveryFieldIsCheckedAgainstItsRange) {
  for (const LinkField& field : LinkFields()) {
    for (const char* bad : {"-1", "1e30", "\"fast\"", "[1]", "true"}) {
      const std::string text = "{\"" + std::string(field.name) + "\": " + bad + "}";
      ExpectError(ErrorCode::kCorruptData, {"bad.json", field.name, "a number from"},
                  [&] { ReadLink("bad.json", text); });
    }
  }
}

TEST(Link, WhatIsWrongIsNamed) {
  ExpectError(ErrorCode::kUnsupported, {"bad.json", "\"nic_gbit_per_s\"", "nic_gbytes_per_s"},
              [] { ReadLink("bad.json", R"({"o_us": 1, "nic_gbit_per_s": 200})"); });
  ExpectError(ErrorCode::kCorruptData, {"bad.json", "nic_per", "node", "socket"},
              [] { ReadLink("bad.json", R"({"nic_per": "socket"})"); });
  ExpectError(ErrorCode::kCorruptData, {"bad.json"}, [] { ReadLink("bad.json", "[1]"); });
  ExpectError(ErrorCode::kCorruptData, {"bad.json"}, [] { ReadLink("bad.json", R"({"o_us": )"); });
}

TEST(WireRows, AreThoseOfTheDesign) {
  EXPECT_EQ(DispatchRowBytes(7168, 8, WireType::kFp8), 7488u);
  EXPECT_EQ(DispatchRowBytes(2048, 8, WireType::kFp8), 2176u);
  EXPECT_EQ(DispatchRowBytes(7168, 8, WireType::kBf16), 14400u);
  EXPECT_EQ(DispatchRowBytes(2048, 8, WireType::kBf16), 4160u);
  EXPECT_EQ(DispatchRowBytes(2048, 8, WireType::kInt8), 64u + 2112u);
  EXPECT_EQ(DispatchRowBytes(2048, 11, WireType::kInt8), 128u + 2112u) << "a longer header";
  EXPECT_EQ(CombineRowBytes(7168), 14336u);
}

}  // namespace
}  // namespace switchyard::simulate
