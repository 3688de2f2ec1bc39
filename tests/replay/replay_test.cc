// Reading of case files, faulty ones above all.
#include "switchyard/replay/replay.h"

#include <gtest/gtest.h>

#include "replay/case.h"
#include "replay/case_builder.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/errors.h"
#include "testing/safetensors_builder.h"

namespace switchyard::replay {
namespace {

using nlohmann::json;
using testing::CaseBuilder;
using testing::ExpectError;

// Two tokens, one rank, two experts.
CaseBuilder LocalSort() {
  CaseBuilder builder;
  builder.config = {{"protocol", "local_sort"}, {"world_size", 1},
                    {"num_experts", 2},         {"top_k", 1},
                    {"hidden_size", 2},         {"tokens_per_rank", {2}},
                    {"payload", "bf16"},        {"expert_alignment", 1}};
  builder.F32("in.x", {2, 2}, {1, 2, 3, 4})
      .I32("in.topk_ids", {2, 1}, {1, 0})
      .F32("in.topk_weights", {2, 1}, {0.5f, 1.0f})
      .F32("in.expert_gain", {2}, {1, 3})
      .F32("out.combined", {2, 2}, {1.5f, 3, 3, 4})
      .I32("out.counts", {2}, {1, 1});
  builder.Check({{"tensor", "out.counts"}, {"mode", "exact"}})
      .Check({{"tensor", "out.combined"}, {"mode", "close"}, {"atol", 1e-6}, {"rtol", 0}});
  return builder;
}

class ReplayTest : public ::testing::Test {
 protected:
  ReplayResult Replay(const ReplayOptions& options = {}) {
    return ReplayCase(path_, moe::BuiltinRegistry(), context_, options);
  }
  // The message names the file and contains every one of `words`.
  void ExpectCorrupt(std::initializer_list<std::string_view> words) {
    const std::string message = ExpectError(ErrorCode::kCorruptData, words, [&] { Replay(); });
    EXPECT_NE(message.find("case.safetensors"), std::string::npos) << message;
  }
  // The case with other config fields than LocalSort().
  void ExpectBadConfig(const std::string& key, const json& value,
                       std::initializer_list<std::string_view> words) {
    CaseBuilder builder = LocalSort();
    builder.config[key] = value;
    builder.Write(path_);
    ExpectCorrupt(words);
  }

  testing::TempFolder folder_;
  const std::filesystem::path path_ = folder_ / "case.safetensors";
  ThreadPool pool_{1};
  Arena arena_;
  ExecContext context_{pool_, arena_};
};

TEST_F(ReplayTest, ComparesWhatItComputes) {
  LocalSort().Write(path_);
  const ReplayResult result = Replay();
  EXPECT_EQ(result.name, "built");
  EXPECT_EQ(result.kind, "dispatch");
  EXPECT_TRUE(result.passed());
  ASSERT_EQ(result.checks.size(), 4u);
  EXPECT_EQ(result.checks[1].tensor, "out.combined");
  EXPECT_EQ(result.checks[3].tensor, "out.combined (ascend_tp)");
}

// Two ranks with a token each, which goes to the other rank.
CaseBuilder LowLatency() {
  CaseBuilder builder;
  builder.config = {{"protocol", "deepep_ll"}, {"world_size", 2},
                    {"num_experts", 2},        {"top_k", 1},
                    {"hidden_size", 2},        {"tokens_per_rank", {1, 1}},
                    {"payload", "bf16"},       {"num_max_dispatch_tokens_per_rank", 4}};
  builder.F32("in.x", {2, 2}, {1, 2, 3, 4})
      .I32("in.topk_ids", {2, 1}, {1, 0})
      .F32("in.topk_weights", {2, 1}, {0.5f, 1.0f})
      .F32("in.expert_gain", {2}, {1, 3});
  return builder;
}

// The checks that failed, by tensor.
std::vector<std::string> Failed(const ReplayResult& result) {
  std::vector<std::string> tensors;
  for (const CheckResult& check : result.checks) {
    if (!check.passed) tensors.push_back(check.tensor);
  }
  return tensors;
}

TEST_F(ReplayTest, RealDispatchersAreHeldToTheRecordedLayout) {
  CaseBuilder right = LowLatency();
  right.I32("out.masked_m", {2, 1}, {1, 1})
      .I32("out.packed_src_rank", {2}, {1, 0})
      .F32("out.packed_x", {2, 2}, {3, 4, 1, 2})
      .F32("out.combined", {2, 2}, {1.5f, 3, 3, 4});
  for (const char* tensor : {"out.masked_m", "out.packed_src_rank", "out.packed_x", "out.combined"})
    right.Check({{"tensor", tensor}, {"mode", "exact"}});
  right.Write(path_);
  EXPECT_EQ(Failed(Replay()), std::vector<std::string>());
  // By the layout function, and three dispatchers on one node and on two.
  EXPECT_EQ(Replay().checks.size(), 4u * (1 + 3 * 2));

  CaseBuilder wrong = LowLatency();
  wrong.I32("out.packed_src_rank", {2}, {0, 1});
  wrong.Check({{"tensor", "out.packed_src_rank"}, {"mode", "exact"}});
  wrong.Write(path_);
  EXPECT_EQ(
      Failed(Replay()),
      (std::vector<std::string>{"out.packed_src_rank", "out.packed_src_rank (deepep_ll, 2 threads)",
                                "out.packed_src_rank (deepep_ll, 2 threads on 2 nodes)",
                                "out.packed_src_rank (mooncake, 2 threads)",
                                "out.packed_src_rank (mooncake, 2 threads on 2 nodes)",
                                "out.packed_src_rank (nixl, 2 threads)",
                                "out.packed_src_rank (nixl, 2 threads on 2 nodes)"}));
}

TEST_F(ReplayTest, CasesTooLargeForThreadsAreComputedOnly) {
  CaseBuilder builder = LowLatency();
  builder.config["world_size"] = 1;
  builder.config["tokens_per_rank"] = {2};
  builder.config["num_max_dispatch_tokens_per_rank"] = size_t{1} << 40;
  builder.I32("out.masked_m", {1, 2}, {1, 1});
  builder.Check({{"tensor", "out.masked_m"}, {"mode", "exact"}});
  builder.Write(path_);
  EXPECT_TRUE(Replay().passed());
  EXPECT_EQ(Replay().checks.size(), 1u);
  builder.config["num_max_dispatch_tokens_per_rank"] = 1025;
  builder.Write(path_);
  ExpectCorrupt({"num-max-dispatch-tokens-per-rank", "1025"});
}

TEST_F(ReplayTest, ReportsWhatDiffers) {
  CaseBuilder builder = LocalSort();
  builder.I32("out.cumulative", {2}, {1, 3});
  builder.Check({{"tensor", "out.cumulative"}, {"mode", "exact"}});
  builder.Write(path_);
  const ReplayResult result = Replay();
  EXPECT_FALSE(result.passed());
  EXPECT_EQ(result.checks[2].tensor, "out.cumulative");
  EXPECT_FALSE(result.checks[2].passed);
  EXPECT_EQ(result.checks[2].error, 1);
}

TEST_F(ReplayTest, WritesWhatItComputes) {
  LocalSort().Write(path_);
  EXPECT_TRUE(Replay({.output = folder_ / "out.safetensors"}).passed());
  const std::string bytes = folder_.Read("out.safetensors");
  const SafetensorsFile file = SafetensorsFile::Parse("out", testing::AsBytes(bytes));
  const TensorInfo* counts = file.Find("out.counts");
  ASSERT_NE(counts, nullptr);
  EXPECT_EQ(counts->dtype, DType::kI32);
  const TensorInfo* combined = file.Find("out.combined");
  ASSERT_NE(combined, nullptr);
  EXPECT_EQ(combined->dtype, DType::kF32);
  EXPECT_EQ(combined->shape, Shape({2, 2}));
  const auto* values = reinterpret_cast<const float*>(file.View(*combined).data);
  EXPECT_EQ(std::vector<float>(values, values + 4), (std::vector<float>{1.5f, 3, 3, 4}));
}

TEST_F(ReplayTest, ACaseWithoutChecksDoesNotPass) {
  CaseBuilder builder = LocalSort();
  builder.checks = json::array();
  builder.Write(path_);
  EXPECT_FALSE(Replay().passed());
}

TEST_F(ReplayTest, AnUnknownKindOrProtocolIsUnsupported) {
  CaseBuilder builder = LocalSort();
  builder.kind = "telepathy";
  builder.Write(path_);
  ExpectError(ErrorCode::kUnsupported, {"case.safetensors", "telepathy", "dispatch"},
              [&] { Replay(); });
  builder = LocalSort();
  builder.config["protocol"] = "pigeon";
  builder.Write(path_);
  ExpectError(ErrorCode::kUnsupported, {"case.safetensors", "pigeon"}, [&] { Replay(); });
}

TEST_F(ReplayTest, RefusesAnUnknownDtypeOfActivations) {
  LocalSort().Write(path_);
  ExpectError(ErrorCode::kInvalidArgument, {"act_dtype", "f16"},
              [&] { Replay({.act_dtype = "f16"}); });
}

TEST_F(ReplayTest, NoFile) {
  ExpectError(ErrorCode::kNotFound, {"case.safetensors"}, [&] { Replay(); });
  std::filesystem::create_directory(path_);
  ExpectError(ErrorCode::kNotFound, {"case.safetensors", "not a file"}, [&] { Replay(); });
}

TEST_F(ReplayTest, FilesCutShort) {
  LocalSort().Write(path_);
  const std::string whole = folder_.Read("case.safetensors");
  for (size_t length = 0; length < whole.size(); length += length < 16 ? 1 : 37) {
    folder_.Write("case.safetensors", std::string_view(whole).substr(0, length));
    ExpectCorrupt({});
  }
  folder_.Write("case.safetensors", "{\"not\": \"a case\"}");
  ExpectCorrupt({});
}

TEST_F(ReplayTest, MetadataThatIsNoCase) {
  const auto write = [&](std::map<std::string, std::string> metadata) {
    LocalSort().Write(path_, metadata);
  };
  write({});
  ExpectCorrupt({"format"});
  write({{"format", "moe-golden-9"}, {"kind", "dispatch"}, {"case", "{}"}});
  ExpectCorrupt({"moe-golden-9", "moe-golden-1"});
  write({{"format", "moe-golden-1"}, {"kind", "dispatch"}});
  ExpectCorrupt({"\"case\""});
  for (const char* text : {"", "not JSON", "[1", "7", "{\"name\":"}) {
    write({{"format", "moe-golden-1"}, {"kind", "dispatch"}, {"case", text}});
    ExpectCorrupt({"JSON object"});
  }
  write({{"format", "moe-golden-1"}, {"kind", "dispatch"}, {"case", R"({"name":"x"})"}});
  ExpectCorrupt({"\"kind\""});
  write({{"format", "moe-golden-1"},
         {"kind", "dispatch"},
         {"case", R"({"name":"x","kind":"layer","config":{},"checks":[]})"}});
  ExpectCorrupt({"dispatch", "layer"});
  write({{"format", "moe-golden-1"},
         {"kind", "dispatch"},
         {"case", R"({"name":"x","kind":"dispatch","config":[],"checks":[]})"}});
  ExpectCorrupt({"config", "array", "object"});
}

TEST_F(ReplayTest, ConfigsThatContradictTheTensors) {
  ExpectBadConfig("top_k", nullptr, {"top_k"});
  ExpectBadConfig("top_k", -1, {"top_k", "-1"});
  ExpectBadConfig("top_k", 1.5, {"top_k", "1.5"});
  ExpectBadConfig("top_k", 2, {"in.topk_ids", "[2, 1]", "[2, 2]"});
  ExpectBadConfig("hidden_size", 3, {"in.x", "[2, 2]", "[2, 3]"});
  ExpectBadConfig("num_experts", 3, {"in.expert_gain"});
  ExpectBadConfig("num_experts", 0, {"0 experts"});
  ExpectBadConfig("world_size", 0, {"0 ranks"});
  ExpectBadConfig("world_size", 2, {"tokens_per_rank"});
  ExpectBadConfig("tokens_per_rank", {-2}, {"tokens_per_rank"});
  ExpectBadConfig("tokens_per_rank", {3}, {"in.x", "[3, 2]"});
  ExpectBadConfig("tokens_per_rank", "2", {"tokens_per_rank"});
  ExpectBadConfig("protocol", 7, {"protocol"});
  ExpectBadConfig("payload", "fp8_group128", {"hidden_size", "128"});
}

TEST_F(ReplayTest, TensorsOfTheWrongKind) {
  CaseBuilder builder;
  builder.config = LocalSort().config;
  builder.Write(path_);
  ExpectCorrupt({"in.x", "missing"});

  builder.I32("in.x", {2, 2}, {1, 2, 3, 4})
      .I32("in.topk_ids", {2, 1}, {1, 7})
      .F32("in.topk_weights", {2, 1}, {1, 1})
      .F32("in.expert_gain", {2}, {1, 3});
  builder.Write(path_);
  ExpectCorrupt({"in.x", "I32", "floats"});
}

TEST_F(ReplayTest, IdsThatAreNoExpert) {
  for (int64_t bad : {int64_t{2}, int64_t{-2}, int64_t{1} << 40}) {
    CaseBuilder builder;
    builder.config = LocalSort().config;
    builder.F32("in.x", {2, 2}, {1, 2, 3, 4})
        .Tensor<int64_t>("in.topk_ids", DType::kI64, {2, 1}, {1, bad})
        .F32("in.topk_weights", {2, 1}, {1, 1})
        .F32("in.expert_gain", {2}, {1, 3});
    builder.Write(path_);
    ExpectCorrupt({std::to_string(bad)});
  }
}

TEST_F(ReplayTest, CaseFileWidensFloatsAndIntegers) {
  CaseBuilder builder;
  builder.Tensor<uint16_t>("bf16", DType::kBF16, {1}, {0x3fc0})
      .Tensor<uint16_t>("f16", DType::kF16, {1}, {0x3e00})
      .Tensor<uint8_t>("f8", DType::kF8E4M3, {1}, {0x3c})
      .Tensor<int8_t>("i8", DType::kI8, {1}, {-3})
      .Tensor<uint8_t>("u8", DType::kU8, {1}, {200})
      .Config("nothing", nullptr)
      .Config("flag", true);
  builder.Write(path_);
  const CaseFile file = CaseFile::Read(path_);
  for (const char* name : {"bf16", "f16", "f8"}) {
    EXPECT_EQ(file.F32(name), std::vector<float>{1.5f}) << name;
  }
  EXPECT_EQ(file.I32("i8"), std::vector<int32_t>{-3});
  EXPECT_EQ(file.Ints("u8"), std::vector<int64_t>{200});
  EXPECT_FALSE(file.HasConfig("nothing"));
  EXPECT_EQ(file.SizeOr("nothing", 4), 4u);
  EXPECT_TRUE(file.Flag("flag"));
  ExpectError(ErrorCode::kCorruptData, {"flag", "number"}, [&] { file.Number("flag"); });
  ExpectError(ErrorCode::kCorruptData, {"u8", "U8", "floats"}, [&] { file.F32("u8"); });
  ExpectError(ErrorCode::kCorruptData, {"f8", "integers"}, [&] { file.Ints("f8"); });
}

}  // namespace
}  // namespace switchyard::replay
