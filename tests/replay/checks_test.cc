// Every mode of comparison, on results that are right and on such that are wrong in one way.
#include "replay/checks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "replay/case_builder.h"
#include "testing/errors.h"
#include "testing/safetensors_builder.h"

namespace switchyard::replay {
namespace {

using nlohmann::json;
using testing::CaseBuilder;
using testing::ExpectError;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class ChecksTest : public ::testing::Test {
 protected:
  std::vector<CheckResult> RunAll(const Outputs& outputs, bool lowp = false) {
    builder_.Write(folder_ / "case.safetensors");
    return RunChecks(CaseFile::Read(folder_ / "case.safetensors"), outputs, lowp);
  }
  CheckResult Run(const Outputs& outputs, bool lowp = false) {
    const std::vector<CheckResult> results = RunAll(outputs, lowp);
    EXPECT_EQ(results.size(), 1u);
    return results.empty() ? CheckResult{} : results[0];
  }
  // out.a is computed as `values`.
  CheckResult RunA(const std::vector<double>& values, bool lowp = false) {
    return Run({{"out.a", {{values.size()}, values}}}, lowp);
  }

  testing::TempFolder folder_;
  CaseBuilder builder_;
};

TEST_F(ChecksTest, Exact) {
  builder_.I32("out.a", {3}, {1, -1, 7}).Check({{"tensor", "out.a"}, {"mode", "exact"}});
  EXPECT_TRUE(RunA({1, -1, 7}).passed);
  const CheckResult wrong = RunA({1, 2, 7});
  EXPECT_FALSE(wrong.passed);
  EXPECT_EQ(wrong.error, 3);
  EXPECT_NE(wrong.detail.find("element [1] is 2, expected -1"), std::string::npos) << wrong.detail;
  EXPECT_FALSE(RunA({1, kNan, 7}).passed);
}

TEST_F(ChecksTest, ShapesMustAgree) {
  builder_.I32("out.a", {2, 2}, {1, 2, 3, 4}).Check({{"tensor", "out.a"}, {"mode", "exact"}});
  const CheckResult flat = RunA({1, 2, 3, 4});
  EXPECT_FALSE(flat.passed);
  EXPECT_NE(flat.detail.find("[4], expected [2, 2]"), std::string::npos) << flat.detail;
  EXPECT_TRUE(Run({{"out.a", {{2, 2}, {1, 2, 3, 4}}}}).passed);
}

TEST_F(ChecksTest, WhatWasNotComputedFails) {
  builder_.I32("out.a", {1}, {1}).Check({{"tensor", "out.a"}, {"mode", "exact"}});
  const CheckResult missing = Run({});
  EXPECT_FALSE(missing.passed);
  EXPECT_NE(missing.detail.find("not computed"), std::string::npos);
}

TEST_F(ChecksTest, ExactRelaxedPerGpu) {
  builder_.Config("num_gpus", 2)
      .I32("out.a", {4}, {0, 1, 2, 2})
      .Check({{"tensor", "out.a"},
              {"mode", "exact"},
              {"relaxed", "same multiset of logical experts per GPU"}});
  EXPECT_TRUE(RunA({0, 1, 2, 2}).passed);
  EXPECT_TRUE(RunA({1, 0, 2, 2}).passed);
  EXPECT_FALSE(RunA({0, 2, 1, 2}).passed);
  EXPECT_FALSE(RunA({1, 1, 2, 2}).passed);
}

TEST_F(ChecksTest, ExactRelaxedPerExpert) {
  builder_.I32("out.a", {2, 3}, {0, 3, -1, 1, 2, 4})
      .Check(
          {{"tensor", "out.a"},
           {"mode", "exact"},
           {"relaxed", "same set per logical expert; columns of one logical expert in any order"}});
  const auto run = [&](const std::vector<double>& values) {
    return Run({{"out.a", {{2, 3}, values}}}).passed;
  };
  EXPECT_TRUE(run({3, 0, -1, 4, 2, 1}));
  EXPECT_FALSE(run({3, 1, -1, 4, 2, 0}));
}

TEST_F(ChecksTest, Close) {
  builder_.F32("out.a", {2}, {1, 100})
      .Check({{"tensor", "out.a"},
              {"mode", "close"},
              {"atol", 0.5},
              {"rtol", 0.01},
              {"atol_lowp", 5},
              {"rtol_lowp", 0.1}});
  EXPECT_TRUE(RunA({1.4, 101.4}).passed);
  const CheckResult wrong = RunA({1.4, 101.6});
  EXPECT_FALSE(wrong.passed);
  EXPECT_NEAR(wrong.error, 1.6, 1e-9);
  EXPECT_NEAR(wrong.tolerance, 1.5, 1e-9);
  EXPECT_TRUE(RunA({1.4, 101.6}, true).passed);
  EXPECT_FALSE(RunA({1.4, 120}, true).passed);
  EXPECT_FALSE(RunA({kNan, 100}).passed);
  EXPECT_FALSE(RunA({1, std::numeric_limits<double>::infinity()}).passed);
}

TEST_F(ChecksTest, CloseWithoutLowpTolerancesUsesTheOthers) {
  builder_.F32("out.a", {1}, {1})
      .Check({{"tensor", "out.a"}, {"mode", "close"}, {"atol", 0.5}, {"rtol", 0}});
  EXPECT_TRUE(RunA({1.4}, true).passed);
  EXPECT_FALSE(RunA({1.6}, true).passed);
}

TEST_F(ChecksTest, Rel) {
  builder_.F32("out.a", {2}, {3, 4})
      .Check({{"tensor", "out.a"},
              {"mode", "rel"},
              {"l2", 0.1},
              {"max", 0.2},
              {"l2_lowp", 1},
              {"max_lowp", 1}});
  EXPECT_TRUE(RunA({3, 4.4}).passed);
  const CheckResult wrong = RunA({3, 4.6});  // l2 0.12, max 0.15
  EXPECT_FALSE(wrong.passed);
  EXPECT_NEAR(wrong.error, 0.12, 1e-9);
  EXPECT_NEAR(wrong.tolerance, 0.1, 1e-9);
  EXPECT_TRUE(RunA({3, 4.6}, true).passed);
  EXPECT_FALSE(RunA({kNan, 4}).passed);
}

TEST_F(ChecksTest, RelOfZeros) {
  builder_.F32("out.a", {2}, {0, 0})
      .Check({{"tensor", "out.a"}, {"mode", "rel"}, {"l2", 1}, {"max", 1}});
  EXPECT_TRUE(RunA({0, 0}).passed);
  EXPECT_FALSE(RunA({0, 1e-30}).passed);
}

class RoutingChecksTest : public ChecksTest {
 protected:
  void Expect(const std::string& mode) {
    builder_.Config("num_experts", 4)
        .I32("out.topk_ids", {2, 2}, {2, 0, 1, -1})
        .F32("out.topk_weights", {2, 2}, {0.75f, 0.25f, 1.0f, 9.0f})
        .Check({{"tensor", "out.topk_ids"},
                {"mode", mode},
                {"weights", "out.topk_weights"},
                {"atol", 0},
                {"rtol", 0.01}});
  }
  CheckResult RunRouting(const std::vector<double>& ids, const std::vector<double>& weights) {
    return Run({{"out.topk_ids", {{2, 2}, ids}}, {"out.topk_weights", {{2, 2}, weights}}});
  }
};

TEST_F(RoutingChecksTest, AnyColumnOrderAndNoWeightOfEmptySlots) {
  Expect("routing");
  EXPECT_TRUE(RunRouting({2, 0, 1, -1}, {0.75, 0.25, 1, 9}).passed);
  EXPECT_TRUE(RunRouting({0, 2, -1, 1}, {0.251, 0.75, 0, 1}).passed);
  const CheckResult swapped = RunRouting({0, 2, 1, -1}, {0.75, 0.25, 1, 0});
  EXPECT_FALSE(swapped.passed);
  EXPECT_EQ(swapped.error, 0.5);
  EXPECT_NE(swapped.detail.find("row 0"), std::string::npos);
  const CheckResult other = RunRouting({2, 0, 3, -1}, {0.75, 0.25, 1, 0});
  EXPECT_FALSE(other.passed);
  EXPECT_NE(other.detail.find("row 1"), std::string::npos);
  EXPECT_FALSE(RunRouting({2, 0, 1, 3}, {0.75, 0.25, 1, 0}).passed);
  EXPECT_FALSE(Run({{"out.topk_ids", {{2, 2}, {2, 0, 1, -1}}}}).passed);
}

TEST_F(ChecksTest, RoutingTieLeavesTheExpertOpen) {
  builder_.Config("num_experts", 4)
      .I32("out.ids", {1, 2}, {0, 1})
      .F32("out.w", {1, 2}, {0.75f, 0.25f})
      .Check({{"tensor", "out.ids"},
              {"mode", "routing_tie"},
              {"weights", "out.w"},
              {"atol", 0.001},
              {"rtol", 0}});
  const auto run = [&](std::vector<double> ids, std::vector<double> weights) {
    return Run({{"out.ids", {{1, 2}, std::move(ids)}}, {"out.w", {{1, 2}, std::move(weights)}}})
        .passed;
  };
  EXPECT_TRUE(run({3, 2}, {0.25, 0.75}));
  EXPECT_FALSE(run({3, 3}, {0.25, 0.75}));
  EXPECT_FALSE(run({3, 4}, {0.25, 0.75}));
  EXPECT_FALSE(run({3, -1}, {0.25, 0.75}));
  EXPECT_FALSE(run({3, 2}, {0.3, 0.7}));
}

TEST_F(ChecksTest, CodesOfFp8AreBytes) {
  builder_.Tensor<uint8_t>("out.a", DType::kF8E4M3, {4}, {0x00, 0x81, 0x38, 0x7e})
      .Check({{"tensor", "out.a"}, {"mode", "codes"}, {"max_step", 1}, {"frac", 0.25}});
  EXPECT_TRUE(RunA({0x00, 0x81, 0x38, 0x7e}).passed);
  EXPECT_TRUE(RunA({0x00, 0x81, 0x39, 0x7e}).passed);
  EXPECT_TRUE(RunA({0x00, 0x82, 0x38, 0x7e}).passed);
  EXPECT_TRUE(RunA({0x01, 0x81, 0x38, 0x7e}).passed);
  const CheckResult sign = RunA({0x00, 0x01, 0x38, 0x7e});  // two steps through zero
  EXPECT_FALSE(sign.passed);
  EXPECT_EQ(sign.error, 2);
  const CheckResult two = RunA({0x00, 0x81, 0x39, 0x7d});
  EXPECT_FALSE(two.passed);
  EXPECT_EQ(two.error, 0.5);
}

TEST_F(ChecksTest, CodesOfIntegers) {
  builder_.Tensor<int8_t>("out.a", DType::kI8, {2}, {-128, 127})
      .Check({{"tensor", "out.a"}, {"mode", "codes"}, {"max_step", 1}, {"frac", 0}});
  EXPECT_TRUE(RunA({-128, 127}).passed);
  EXPECT_FALSE(RunA({-127, 127}).passed);
}

TEST_F(ChecksTest, CloserThanPlain) {
  builder_.F32("out.a", {1}, {1})
      .F32("out.plain", {1}, {2})
      .Check({{"tensor", "out.a"}, {"mode", "closer_than_plain"}, {"other", "out.plain"}});
  EXPECT_TRUE(RunA({1.4}).passed);
  EXPECT_FALSE(RunA({1.6}).passed);
  EXPECT_TRUE(RunAll({}).empty());
}

TEST_F(ChecksTest, WhenChecksOnlyWhatWasComputed) {
  for (const char* name : {"out.a", "out.b"}) builder_.F32(name, {1}, {1});
  builder_
      .Check({{"tensor", "out.a"},
              {"mode", "rel"},
              {"l2", 0},
              {"max", 0},
              {"when", "activations are not quantized"}})
      .Check({{"tensor", "out.b"},
              {"mode", "rel"},
              {"l2", 0},
              {"max", 0},
              {"when", "activations are quantized as config.act_quant"}});
  EXPECT_EQ(RunA({1}).tensor, "out.a");
  EXPECT_FALSE(Run({{"out.b", {{1}, {2}}}}).passed);
  EXPECT_TRUE(RunAll({}).empty());
}

TEST_F(ChecksTest, RankDispatch) {
  // Two GPUs with two physical experts each. Expert 0 lives on both, 1 on the first, 2 on the last.
  builder_.Config("num_gpus", 2)
      .Config("num_physical_experts", 4)
      .I32("out.logical_to_physical", {1, 3, 2}, {0, 2, 1, -1, 3, -1})
      .I32("out.a", {2, 1, 3}, {0, 1, 3, 2, 1, 3})
      .Check({{"tensor", "out.a"}, {"mode", "rank_dispatch"}, {"rule", ""}});
  const auto run = [&](const std::vector<double>& values) {
    return Run({{"out.a", {{2, 1, 3}, values}}});
  };
  EXPECT_TRUE(run({0, 1, 3, 2, 1, 3}).passed);
  const CheckResult remote = run({2, 1, 3, 2, 1, 3});
  EXPECT_FALSE(remote.passed);
  EXPECT_NE(remote.detail.find("expert 0: rank 0"), std::string::npos) << remote.detail;
  EXPECT_FALSE(run({0, 1, 1, 2, 1, 3}).passed);
}

TEST_F(ChecksTest, RankDispatchSpreadsEvenly) {
  // Four GPUs of one expert; the replicas of expert 0 are on the first two.
  builder_.Config("num_gpus", 4)
      .Config("num_physical_experts", 4)
      .I32("out.logical_to_physical", {1, 1, 2}, {0, 1})
      .I32("out.a", {4, 1, 1}, {0, 1, 0, 1})
      .Check({{"tensor", "out.a"}, {"mode", "rank_dispatch"}, {"rule", ""}});
  const auto run = [&](const std::vector<double>& values) {
    return Run({{"out.a", {{4, 1, 1}, values}}}).passed;
  };
  EXPECT_TRUE(run({0, 1, 0, 1}));
  EXPECT_TRUE(run({0, 1, 1, 0}));
  EXPECT_FALSE(run({0, 1, 0, 0}));
}

class OrderTest : public ChecksTest {
 protected:
  void Check(const std::string& tensor, const std::string& order) {
    builder_.Check({{"tensor", tensor}, {"mode", "exact"}, {"order", order}});
  }
  // Whether every check passed.
  bool Passes(const Outputs& outputs) {
    bool all = true;
    for (const CheckResult& result : RunAll(outputs)) all = all && result.passed;
    return all;
  }
};

TEST_F(OrderTest, ReceivedRowsOfARank) {
  const std::string order =
      "rows of one receiving rank in any order; key = (recv_src_rank, recv_src_token)";
  builder_.I32("out.recv_offsets", {3}, {0, 2, 3})
      .I32("out.recv_src_rank", {3}, {0, 1, 0})
      .I32("out.recv_src_token", {3}, {5, 0, 5})
      .I32("out.recv_topk_ids", {3, 2}, {1, 2, 3, 4, 5, 6});
  for (const char* name : {"out.recv_src_rank", "out.recv_src_token", "out.recv_topk_ids"}) {
    Check(name, order);
  }
  const auto run = [&](std::vector<double> offsets, std::vector<double> ranks,
                       std::vector<double> tokens, std::vector<double> ids) {
    return Passes({{"out.recv_offsets", {{3}, std::move(offsets)}},
                   {"out.recv_src_rank", {{3}, std::move(ranks)}},
                   {"out.recv_src_token", {{3}, std::move(tokens)}},
                   {"out.recv_topk_ids", {{3, 2}, std::move(ids)}}});
  };
  EXPECT_TRUE(run({0, 2, 3}, {0, 1, 0}, {5, 0, 5}, {1, 2, 3, 4, 5, 6}));
  EXPECT_TRUE(run({0, 2, 3}, {1, 0, 0}, {0, 5, 5}, {3, 4, 1, 2, 5, 6}));
  EXPECT_FALSE(run({0, 2, 3}, {1, 0, 0}, {0, 5, 5}, {1, 2, 3, 4, 5, 6}));  // ids did not move along
  EXPECT_FALSE(run({0, 2, 3}, {0, 0, 1}, {5, 5, 0}, {1, 2, 5, 6, 3, 4}));  // across ranks
  EXPECT_FALSE(run({0, 2, 4}, {0, 1, 0}, {5, 0, 5}, {1, 2, 3, 4, 5, 6}));
  EXPECT_FALSE(Passes({{"out.recv_src_rank", {{3}, {0, 1, 0}}}}));
}

TEST_F(OrderTest, PackedRowsOfASourceStayTogether) {
  const std::string order =
      "rows of one (rank, local expert) segment in any order, but rows of one source rank are "
      "contiguous; key = (packed_src_rank, packed_src_token)";
  builder_.I32("out.masked_m", {1, 1}, {3})
      .I32("out.packed_src_rank", {3}, {0, 0, 1})
      .I32("out.packed_src_token", {3}, {0, 1, 0});
  for (const char* name : {"out.packed_src_rank", "out.packed_src_token"}) Check(name, order);
  const auto run = [&](std::vector<double> ranks, std::vector<double> tokens) {
    return Passes({{"out.masked_m", {{1, 1}, {3}}},
                   {"out.packed_src_rank", {{3}, std::move(ranks)}},
                   {"out.packed_src_token", {{3}, std::move(tokens)}}});
  };
  EXPECT_TRUE(run({0, 0, 1}, {0, 1, 0}));
  EXPECT_TRUE(run({1, 0, 0}, {0, 1, 0}));
  EXPECT_FALSE(run({0, 1, 0}, {0, 0, 1}));
}

TEST_F(OrderTest, SortedRoutesAndTheirRows) {
  const std::string order = "rows of one expert in any order, consistently in all three tensors";
  builder_.I32("out.counts", {2}, {2, 1})
      .I32("out.sorted_route", {3}, {0, 3, 1})
      .I32("out.route_to_row", {2, 2}, {0, 2, -1, 1});
  for (const char* name : {"out.sorted_route", "out.route_to_row"}) Check(name, order);
  const auto run = [&](std::vector<double> routes, std::vector<double> rows) {
    return Passes({{"out.counts", {{2}, {2, 1}}},
                   {"out.sorted_route", {{3}, std::move(routes)}},
                   {"out.route_to_row", {{2, 2}, std::move(rows)}}});
  };
  EXPECT_TRUE(run({0, 3, 1}, {0, 2, -1, 1}));
  EXPECT_TRUE(run({3, 0, 1}, {1, 2, -1, 0}));
  EXPECT_FALSE(run({3, 0, 1}, {0, 2, -1, 1}));  // not the same permutation
  EXPECT_FALSE(run({0, 1, 3}, {0, 1, -1, 2}));  // across experts
  EXPECT_FALSE(run({0, 3, 1}, {0, 3, -1, 1}));  // no such row
}

TEST_F(ChecksTest, UnknownModesAndTextsAreErrors) {
  const auto run = [&](const json& check) {
    builder_.checks = json::array({check});
    RunA({1});
  };
  builder_.I32("out.a", {1}, {2});
  ExpectError(ErrorCode::kUnsupported, {"out.a", "mode", "psychic"}, [&] {
    run({{"tensor", "out.a"}, {"mode", "psychic"}});
  });
  ExpectError(ErrorCode::kUnsupported, {"order", "by mood"}, [&] {
    run({{"tensor", "out.a"}, {"mode", "exact"}, {"order", "by mood"}});
  });
  ExpectError(ErrorCode::kUnsupported, {"relaxed", "by mood"}, [&] {
    run({{"tensor", "out.a"}, {"mode", "exact"}, {"relaxed", "by mood"}});
  });
  ExpectError(ErrorCode::kCorruptData, {"case.safetensors", "out.a", "atol"}, [&] {
    run({{"tensor", "out.a"}, {"mode", "close"}});
  });
  ExpectError(ErrorCode::kCorruptData, {"case.safetensors", "tensor"}, [&] {
    run({{"mode", "exact"}});
  });
  ExpectError(ErrorCode::kCorruptData, {"case.safetensors"}, [&] { run(7); });
  ExpectError(ErrorCode::kCorruptData, {"case.safetensors", "out.b", "missing"}, [&] {
    builder_.checks = json::array({{{"tensor", "out.b"}, {"mode", "exact"}}});
    Run({{"out.b", {{1}, {1}}}});
  });
}

}  // namespace
}  // namespace switchyard::replay
