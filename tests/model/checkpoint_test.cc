#include "switchyard/model/checkpoint.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "testing/goldens.h"
#include "testing/random.h"
#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using testing::Cat;
using testing::ExpectError;
using testing::SafetensorsBuilder;
using testing::TempFolder;
namespace fs = std::filesystem;

constexpr auto kCorrupt = ErrorCode::kCorruptData;
constexpr const char* kIndex = "model.safetensors.index.json";

// Collects log lines as "message key=value ..." while it lives.
class LogCapture {
 public:
  LogCapture() {
    SetLogSink(
        [this](LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
          std::string line(message);
          for (const LogField& field : fields) line += Cat({" ", field.key, "=", field.value});
          (level == LogLevel::kWarning ? warnings : others).push_back(line);
        },
        LogLevel::kDebug);
  }
  ~LogCapture() { SetLogSink({}, LogLevel::kInfo); }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::vector<std::string> warnings;
  std::vector<std::string> others;
};

Checkpoint Open(const TempFolder& folder) {
  return Checkpoint::Open(ModelFiles::OpenFolder(folder.path()));
}

std::string OneTensor(std::string_view name) {
  return SafetensorsBuilder().Add(name, "F32", "[1]", "abcd").Bytes();
}

// a and b in the first shard, c in the second.
void WriteShards(const TempFolder& folder) {
  folder.Write("model-00001-of-00002.safetensors", SafetensorsBuilder()
                                                       .Add("a", "F32", "[2]", "aaaaAAAA")
                                                       .Add("b", "BF16", "[1,2]", "bbBB")
                                                       .Bytes());
  folder.Write("model-00002-of-00002.safetensors",
               SafetensorsBuilder().Add("c", "F16", "[1]", "cc").Bytes());
  folder.Write(kIndex, R"({"metadata": {"total_size": 14}, "weight_map": {
    "a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors"}})");
}

TEST(Checkpoint, OpensASingleFile) {
  const TempFolder folder;
  folder.Write(
      "model.safetensors",
      SafetensorsBuilder().Add("a", "F32", "[2]", "aaaaAAAA").Add("b", "U8", "[3]", "xyz").Bytes());
  const LogCapture log;
  Checkpoint checkpoint = Open(folder);
  EXPECT_TRUE(checkpoint.Has("a"));
  EXPECT_FALSE(checkpoint.Has("c"));
  EXPECT_EQ(checkpoint.Info("c"), nullptr);
  EXPECT_EQ(checkpoint.Info("a")->shape, Shape({2}));
  EXPECT_EQ(checkpoint.FileOf("a"), "model.safetensors");
  EXPECT_EQ(checkpoint.Names(), (std::vector<std::string_view>{"a", "b"}));
  EXPECT_EQ(checkpoint.total_bytes(), 11u);
  EXPECT_TRUE(checkpoint.IgnoredFiles().empty());
  EXPECT_EQ(checkpoint.files().description(), folder.path().string());
  ExpectError(ErrorCode::kNotFound, {"\"c\"", folder.path().string()},
              [&] { checkpoint.FileOf("c"); });

  const TensorView a = checkpoint.Take("a", Shape({2}));
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(a.data), 8), "aaaaAAAA");
  constexpr std::array kBytes = {DType::kU8};
  EXPECT_NE(checkpoint.Take("b", Shape({3}), kBytes).data, nullptr);
  checkpoint.Finish();
  EXPECT_TRUE(log.warnings.empty());
}

TEST(Checkpoint, OpensShards) {
  const TempFolder folder;
  WriteShards(folder);
  const LogCapture log;
  Checkpoint checkpoint = Open(folder);
  EXPECT_EQ(checkpoint.Names(), (std::vector<std::string_view>{"a", "b", "c"}));
  EXPECT_EQ(checkpoint.FileOf("b"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(checkpoint.FileOf("c"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(checkpoint.total_bytes(), 14u);
  const TensorView a = checkpoint.Take("a", Shape({2}));
  const TensorView c = checkpoint.Take("c", Shape({1}));
  EXPECT_EQ(c.dtype, DType::kF16);
  // Views and names outlive a move of the checkpoint.
  Checkpoint moved = std::move(checkpoint);
  moved.Take("b", Shape({1, 2}));
  moved.Finish();
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(a.data), 8), "aaaaAAAA");
  EXPECT_TRUE(log.warnings.empty());
}

TEST(Checkpoint, OpensFilesInMemory) {
  const std::string bytes = OneTensor("a");
  Checkpoint checkpoint = Checkpoint::Open(ModelFiles::FromMemory(
      "embedded default model", {{"model.safetensors", testing::AsBytes(bytes)}}));
  EXPECT_NE(checkpoint.Take("a", Shape({1})).data, nullptr);
  checkpoint.Finish();
  ExpectError(ErrorCode::kNotFound, {"embedded default model", "model.safetensors"},
              [] { Checkpoint::Open(ModelFiles::FromMemory("embedded default model", {})); });
}

// --- Folders without weights that can be read ---

TEST(CheckpointLayouts, EmptyFolder) {
  const TempFolder folder;
  folder.Write("config.json", "{}");
  ExpectError(ErrorCode::kNotFound,
              {folder.path().string(), "model.safetensors", kIndex, "found no weights at all"},
              [&] { Open(folder); });
}

// Bug log 43, and the formats of other engines.
TEST(CheckpointLayouts, OtherFormatsAreNamed) {
  for (std::string_view name :
       {"consolidated.safetensors", "consolidated.00.pth", "pytorch_model.bin", "model-q4_0.gguf",
        "weights.pt", "tf_model.h5", "flax_model.msgpack"}) {
    const TempFolder folder;
    folder.Write(name, "x");
    folder.Write("params.json", "{}");
    ExpectError(ErrorCode::kNotFound,
                {folder.path().string(), name, "layout is not supported", "model.safetensors"},
                [&] { Open(folder); });
  }
}

TEST(CheckpointLayouts, ShardsWithoutIndex) {
  const TempFolder folder;
  folder.Write("model-00001-of-00002.safetensors", "x");
  ExpectError(ErrorCode::kNotFound, {"model-00001-of-00002.safetensors", "not the index", kIndex},
              [&] { Open(folder); });
}

TEST(CheckpointLayouts, OtherName) {
  const TempFolder folder;
  folder.Write("adapter_model.safetensors", "x");
  ExpectError(ErrorCode::kNotFound, {"adapter_model.safetensors", "is it the whole model"},
              [&] { Open(folder); });
}

// --- Files that are not read ---

// Bug log 42 (c): a quantised copy beside the shards.
TEST(CheckpointStrays, ModelFileBesideShardsIsNotRead) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write("model.safetensors", "not even a safetensors file");
  const LogCapture log;
  const Checkpoint checkpoint = Open(folder);
  EXPECT_EQ(checkpoint.IgnoredFiles(), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(checkpoint.total_bytes(), 14u);
  ASSERT_EQ(log.warnings.size(), 1u);
  EXPECT_NE(log.warnings[0].find("files=model.safetensors"), std::string::npos) << log.warnings[0];
}

// Bug log 43: both layouts in one folder.
TEST(CheckpointStrays, ConsolidatedCopyIsNotRead) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write("consolidated.safetensors", OneTensor("a"));
  folder.Write("params.json", "{}");
  const Checkpoint checkpoint = Open(folder);
  EXPECT_EQ(checkpoint.IgnoredFiles(), std::vector<std::string>{"consolidated.safetensors"});
  EXPECT_EQ(checkpoint.total_bytes(), 14u);
}

TEST(CheckpointStrays, OtherFilesBesideASingleModel) {
  const TempFolder folder;
  folder.Write("model.safetensors", OneTensor("a"));
  folder.Write("model-00001-of-00002.safetensors", OneTensor("b"));
  folder.Write("pytorch_model.bin", "x");
  const LogCapture log;
  const Checkpoint checkpoint = Open(folder);
  EXPECT_EQ(checkpoint.IgnoredFiles(),
            std::vector<std::string>{"model-00001-of-00002.safetensors"});
  EXPECT_FALSE(checkpoint.Has("b"));
  EXPECT_EQ(log.warnings.size(), 1u);
}

TEST(CheckpointStrays, ShardsOfAnotherSetAreNotRead) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write("model-00001-of-00003.safetensors", OneTensor("a"));
  folder.Write("old-00001-of-00002.safetensors", OneTensor("a"));
  EXPECT_EQ(Open(folder).IgnoredFiles(),
            (std::vector<std::string>{"model-00001-of-00003.safetensors",
                                      "old-00001-of-00002.safetensors"}));
}

// --- Damaged files ---

// Bug log 40: each shard cut by 1 byte and 4 KiB, and grown by 1 byte.
TEST(CheckpointFaults, CutOrGrownShard) {
  const std::string shard = "model-00002-of-00002.safetensors";
  const std::string good =
      SafetensorsBuilder().Add("c", "F16", "[4000]", std::string(8000, 'c')).Bytes();
  const TempFolder folder;
  WriteShards(folder);
  folder.Write(shard, good);
  Open(folder);
  folder.Write(shard, good.substr(0, good.size() - 1));
  ExpectError(kCorrupt, {shard, "1 missing", "\"c\""}, [&] { Open(folder); });
  folder.Write(shard, good.substr(0, good.size() - 4096));
  ExpectError(kCorrupt, {shard, "4096 missing", "\"c\""}, [&] { Open(folder); });
  folder.Write(shard, good + "x");
  ExpectError(kCorrupt, {shard, "1 extra"}, [&] { Open(folder); });
  folder.Write(shard, "");
  ExpectError(kCorrupt, {shard, "has 0 bytes"}, [&] { Open(folder); });
}

TEST(CheckpointFaults, LinkToAMissingBlob) {
  const TempFolder folder;
  WriteShards(folder);
  fs::remove(folder / "model-00002-of-00002.safetensors");
  fs::create_symlink("../blobs/1234", folder / "model-00002-of-00002.safetensors");
  ExpectError(ErrorCode::kNotFound, {"model-00002-of-00002.safetensors", "link", "download"},
              [&] { Open(folder); });
}

// --- Faults of the index ---

TEST(CheckpointIndex, BadJson) {
  const TempFolder folder;
  WriteShards(folder);
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"", "is empty"},
      {"{", "not valid JSON"},
      {"[]", "expected a JSON object"},
      {"{}", "field \"weight_map\" is missing, expected an object"},
      {R"({"weight_map": null})", "\"weight_map\" is null"},
      {R"({"weight_map": []})", "expected an object, found []"},
      {R"({"weight_map": {}})", "names no tensors"},
      {R"({"weight_map": {"a": 1}})", "\"weight_map.a\": expected a string, found 1"},
      {R"({"weight_map": {"a": null}})", "\"weight_map.a\" is null"},
      {R"({"weight_map": {"a": ["model-00001-of-00002.safetensors"]}})", "expected a string"},
      {R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})", "twice"}};
  for (const auto& [text, words] : cases) {
    folder.Write(kIndex, text);
    ExpectError(kCorrupt, {kIndex, words}, [&] { Open(folder); });
  }
}

TEST(CheckpointIndex, NamesThatLeaveTheFolder) {
  const TempFolder folder;
  fs::create_directory(folder / "model");
  folder.Write("secret.safetensors", OneTensor("a"));
  for (std::string_view name : {"../secret.safetensors", "/etc/passwd", "..", "",
                                "sub/x.safetensors", "config.json", "pytorch_model.bin"}) {
    folder.Write(Cat({"model/", kIndex}), Cat({R"({"weight_map": {"a": ")", name, "\"}}"}));
    ExpectError(kCorrupt, {kIndex, "\"a\"", "name of a safetensors file", Cat({"\"", name, "\""})},
                [&] { Checkpoint::Open(ModelFiles::OpenFolder(folder / "model")); });
  }
}

// Bug log 42 (b).
TEST(CheckpointIndex, MissingShardIsNamed) {
  const TempFolder folder;
  WriteShards(folder);
  fs::remove(folder / "model-00002-of-00002.safetensors");
  ExpectError(kCorrupt, {kIndex, "1 of the 2 files", "\"model-00002-of-00002.safetensors\""},
              [&] { Open(folder); });
}

// Bug log 42 (a): the index leaves out a real shard.
TEST(CheckpointIndex, ShardThatTheIndexLeavesOut) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write(kIndex,
               R"({"weight_map": {"a": "model-00001-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors"}})");
  ExpectError(kCorrupt, {kIndex, "leaves out model-00002-of-00002.safetensors"},
              [&] { Open(folder); });
}

TEST(CheckpointIndex, TensorThatTheIndexLeavesOut) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write(kIndex,
               R"({"weight_map": {"a": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors"}})");
  ExpectError(kCorrupt,
              {kIndex, "model-00001-of-00002.safetensors holds 2 tensors", "places 1 in it",
               "\"b\"", "not in the index"},
              [&] { Open(folder); });
}

TEST(CheckpointIndex, TensorThatNoFileHolds) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write("model-00001-of-00002.safetensors", OneTensor("a"));
  ExpectError(kCorrupt,
              {kIndex, "holds 1 tensors", "places 2",
               "tensor \"b\" is not in model-00001-of-00002.safetensors"},
              [&] { Open(folder); });
}

TEST(CheckpointIndex, TensorInAnotherShard) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write(kIndex,
               R"({"weight_map": {"a": "model-00001-of-00002.safetensors",
    "b": "model-00002-of-00002.safetensors",
    "c": "model-00001-of-00002.safetensors"}})");
  ExpectError(kCorrupt,
              {kIndex,
               "tensor \"b\" is in model-00001-of-00002.safetensors, and the index places it in "
               "model-00002-of-00002",
               "tensor \"c\" is in model-00002-of-00002.safetensors"},
              [&] { Open(folder); });
}

TEST(CheckpointIndex, TensorInTwoShards) {
  const TempFolder folder;
  WriteShards(folder);
  folder.Write(
      "model-00002-of-00002.safetensors",
      SafetensorsBuilder().Add("c", "F16", "[1]", "cc").Add("a", "F16", "[1]", "AA").Bytes());
  ExpectError(kCorrupt,
              {"\"a\"", "two files", "model-00001-of-00002.safetensors",
               "model-00002-of-00002.safetensors"},
              [&] { Open(folder); });
}

TEST(CheckpointIndex, ManyProblemsAreCounted) {
  std::string map;
  for (int i = 0; i < 30; ++i)
    map += Cat({", \"t", std::to_string(i), "\": \"model.safetensors\""});
  const TempFolder folder;
  folder.Write("model.safetensors", OneTensor("a"));
  folder.Write(kIndex, Cat({R"({"weight_map": {"a": "model.safetensors")", map, "}}"}));
  ExpectError(kCorrupt, {"holds 1 tensors", "places 31", "and 23 more"}, [&] { Open(folder); });
}

// Tools disagree on what total_size counts, so a wrong one is no fault.
TEST(CheckpointIndex, WrongTotalSizeIsAWarning) {
  const TempFolder folder;
  folder.Write("model.safetensors", OneTensor("a"));
  for (std::string_view metadata : {R"({"total_size": 5})", R"({"total_size": 4e300})",
                                    R"({"total_size": "4"})", R"({"total_size": -4})", "[]", "3"}) {
    folder.Write(
        kIndex, Cat({R"({"weight_map": {"a": "model.safetensors"}, "metadata": )", metadata, "}"}));
    const LogCapture log;
    EXPECT_TRUE(Open(folder).Has("a"));
    EXPECT_EQ(log.warnings.size(), 1u) << metadata;
  }
  for (std::string_view metadata :
       {R"({"total_size": 4})", R"({"total_size": 4.0, "other": []})", "{}", "null"}) {
    folder.Write(
        kIndex, Cat({R"({"weight_map": {"a": "model.safetensors"}, "metadata": )", metadata, "}"}));
    const LogCapture log;
    EXPECT_TRUE(Open(folder).Has("a"));
    EXPECT_TRUE(log.warnings.empty()) << metadata;
  }
}

// --- Take, Ignore, Finish ---

TEST(CheckpointFinish, ListsEverythingAtOnce) {
  const TempFolder folder;
  folder.Write("model.safetensors", SafetensorsBuilder()
                                        .Add("good", "F32", "[1]", "abcd")
                                        .Add("shape", "F32", "[1,2]", "abcdefgh")
                                        .Add("dtype", "I8", "[2]", "ab")
                                        .Add("both", "I8", "[2]", "ab")
                                        .Add("experts.w4", "F16", "[1]", "ab")
                                        .Bytes());
  Checkpoint checkpoint = Open(folder);
  EXPECT_NE(checkpoint.Take("good", Shape({1})).data, nullptr);
  EXPECT_EQ(checkpoint.Take("shape", Shape({2, 1})).data, nullptr);
  EXPECT_EQ(checkpoint.Take("dtype", Shape({2})).data, nullptr);
  constexpr std::array kTwo = {DType::kF32, DType::kI64};
  EXPECT_EQ(checkpoint.Take("both", Shape({3}), kTwo).data, nullptr);
  const TensorView missing = checkpoint.Take("experts.w1", Shape({8, 4}));
  EXPECT_EQ(missing.data, nullptr);
  EXPECT_EQ(missing.shape, Shape({8, 4}));
  ExpectError(kCorrupt,
              {folder.path().string(), "1 tensor missing",
               "\"experts.w1\": expected shape [8, 4] of F32, F16 or BF16",
               "3 tensors with the wrong shape or dtype",
               "model.safetensors: tensor \"shape\": expected shape [2, 1], found [1, 2]",
               "model.safetensors: tensor \"dtype\": expected dtype F32, F16 or BF16, found I8",
               "model.safetensors: tensor \"both\": expected shape [3], found [2]; expected dtype "
               "F32 or I64, found I8",
               "1 tensor not known to the model",
               "model.safetensors: tensor \"experts.w4\": shape [1] of F16"},
              [&] { checkpoint.Finish(); });
}

// Bug log 46: a renamed tensor shows up as missing and as unused.
TEST(CheckpointFinish, LongListsEndWithACount) {
  SafetensorsBuilder builder;
  for (int i = 0; i < 20; ++i) builder.Add(Cat({"t", std::to_string(i)}), "U8", "[1]", "x");
  const TempFolder folder;
  folder.Write("model.safetensors", builder.Bytes());
  Checkpoint checkpoint = Open(folder);
  for (int i = 0; i < 9; ++i) checkpoint.Take(Cat({"missing", std::to_string(i)}), Shape({1}));
  ExpectError(kCorrupt,
              {"9 tensors missing", "and 1 more", "20 tensors not known", "and 12 more",
               "\"missing7\"", "\"t0\""},
              [&] { checkpoint.Finish(); });
}

TEST(CheckpointFinish, IgnoredTensorsPassAndAreLogged) {
  const TempFolder folder;
  folder.Write("model.safetensors", OneTensor("rotary_emb.inv_freq"));
  Checkpoint checkpoint = Open(folder);
  const LogCapture log;
  checkpoint.Ignore("rotary_emb.inv_freq", "computed from the config");
  checkpoint.Ignore("absent", "may be there");
  checkpoint.Finish();
  ASSERT_EQ(log.others.size(), 1u);
  EXPECT_NE(log.others[0].find("tensor=rotary_emb.inv_freq reason=computed from the config"),
            std::string::npos);
}

TEST(CheckpointFinish, TakingTwiceIsABug) {
  const TempFolder folder;
  folder.Write(
      "model.safetensors",
      SafetensorsBuilder().Add("a", "F32", "[1]", "abcd").Add("b", "F32", "[1]", "abcd").Bytes());
  Checkpoint checkpoint = Open(folder);
  checkpoint.Take("a", Shape({1}));
  checkpoint.Ignore("b", "tied");
  constexpr auto kCode = ErrorCode::kInternal;
  ExpectError(kCode, {"\"a\"", "taken"}, [&] { checkpoint.Take("a", Shape({1})); });
  ExpectError(kCode, {"\"a\"", "ignored after it was taken"}, [&] { checkpoint.Ignore("a", "x"); });
  ExpectError(kCode, {"\"b\"", "after it was ignored"}, [&] { checkpoint.Take("b", Shape({1})); });
}

TEST(CheckpointFinish, LookingDoesNotUse) {
  const TempFolder folder;
  folder.Write("model.safetensors", OneTensor("a"));
  const Checkpoint checkpoint = Open(folder);
  checkpoint.Info("a");
  checkpoint.Has("a");
  ExpectError(kCorrupt, {"\"a\""}, [&] { checkpoint.Finish(); });
}

TEST(Checkpoint, UnalignedFileGivesAlignedViews) {
  const TempFolder folder;
  folder.Write(
      "model.safetensors",
      SafetensorsBuilder().Add("u", "U8", "[1]", "x").Add("f", "F32", "[1]", "abcd").Bytes(1));
  Checkpoint checkpoint = Open(folder);
  const TensorView view = checkpoint.Take("f", Shape({1}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % 4, 0u);
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(view.data), 4), "abcd");
}

// --- NaN and infinity ---

template <typename T>
TensorView ViewOf(const std::vector<T>& values, DType dtype) {
  return {reinterpret_cast<const std::byte*>(values.data()), dtype, Shape({values.size()})};
}

TEST(ScanForBadValues, FindsEveryPatternF16AndBF16) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    const auto to_float = [&](uint16_t bits) {
      return dtype == DType::kF16 ? ToFloat(F16{bits}) : ToFloat(BF16{bits});
    };
    BadValues expected;
    bool is_first = true;
    for (size_t i = 0; i < all.size(); ++i) {
      const float value = to_float(all[i]);
      expected.nan += std::isnan(value);
      expected.inf += std::isinf(value);
      if (!std::isfinite(value) && std::exchange(is_first, false)) expected.first_index = i;
      // Alone, too: a sum could hide two errors.
      const BadValues one = ScanForBadValues(ViewOf<uint16_t>({all[i]}, dtype));
      ASSERT_EQ(one.nan, std::isnan(value)) << i;
      ASSERT_EQ(one.inf, std::isinf(value)) << i;
    }
    const BadValues found = ScanForBadValues(ViewOf(all, dtype));
    EXPECT_EQ(found.nan, expected.nan);
    EXPECT_EQ(found.inf, 2u);
    EXPECT_EQ(found.first_index, expected.first_index);
    EXPECT_TRUE(found.any());
  }
}

TEST(ScanForBadValues, F32Extremes) {
  using Limits = std::numeric_limits<float>;
  const std::vector<float> good = {
      0.0f, -0.0f, 1.0f, Limits::max(), Limits::lowest(), Limits::min(), Limits::denorm_min()};
  EXPECT_FALSE(ScanForBadValues(ViewOf(good, DType::kF32)).any());
  const std::vector<float> bad = {1.0f,
                                  Limits::infinity(),
                                  -Limits::infinity(),
                                  Limits::quiet_NaN(),
                                  -Limits::quiet_NaN(),
                                  std::bit_cast<float>(0x7f800001u),
                                  std::bit_cast<float>(0xffffffffu)};
  const BadValues found = ScanForBadValues(ViewOf(bad, DType::kF32));
  EXPECT_EQ(found.inf, 2u);
  EXPECT_EQ(found.nan, 4u);
  EXPECT_EQ(found.first_index, 1u);
}

TEST(ScanForBadValues, AnyLengthAndPosition) {
  for (size_t count : {1u, 2u, 7u, 8u, 9u, 4095u, 4096u, 4097u, 20000u}) {
    for (size_t at : {size_t{0}, count / 2, count - 1}) {
      std::vector<uint16_t> values(count, 0x3f80);
      values[at] = 0x7fc0;
      const BadValues found = ScanForBadValues(ViewOf(values, DType::kBF16));
      EXPECT_EQ(found.nan, 1u);
      EXPECT_EQ(found.inf, 0u);
      EXPECT_EQ(found.first_index, at);
    }
  }
}

TEST(ScanForBadValues, NothingButNanIsCounted) {
  const std::vector<uint16_t> nan(100'003, 0xffff);
  EXPECT_EQ(ScanForBadValues(ViewOf(nan, DType::kBF16)).nan, nan.size());
  const std::vector<uint16_t> inf(100'003, 0xfc00);
  EXPECT_EQ(ScanForBadValues(ViewOf(inf, DType::kF16)).inf, inf.size());
  EXPECT_FALSE(ScanForBadValues(ViewOf(std::vector<uint16_t>{}, DType::kF16)).any());
}

TEST(ScanForBadValues, UnalignedDataAndOtherDTypes) {
  std::vector<std::byte> bytes(9);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + 5, &nan, 4);
  EXPECT_EQ(ScanForBadValues({bytes.data() + 1, DType::kF32, Shape({2})}).first_index, 1u);
  ExpectError(ErrorCode::kInvalidArgument, {"I8", "F32, F16 or BF16"}, [&] {
    ScanForBadValues({bytes.data(), DType::kI8, Shape({2})});
  });
}

// --- The golden set ---

TEST(Checkpoint, ReadsEveryTensorOfAllGoldenModels) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t num_models = 0;
  for (const auto& golden : fs::directory_iterator(*testing::GoldenDir() / "models")) {
    SCOPED_TRACE(golden.path());
    Checkpoint checkpoint = Checkpoint::Open(ModelFiles::OpenFolder(golden.path() / "checkpoint"));
    EXPECT_TRUE(checkpoint.IgnoredFiles().empty());
    size_t num_bytes = 0;
    for (std::string_view name : checkpoint.Names()) {
      const TensorInfo info = *checkpoint.Info(name);
      const TensorView view = checkpoint.Take(name, info.shape, {&info.dtype, 1});
      ASSERT_NE(view.data, nullptr) << name;
      if (info.dtype == DType::kF32 || info.dtype == DType::kF16 || info.dtype == DType::kBF16) {
        EXPECT_FALSE(ScanForBadValues(view).any()) << name;
      }
      num_bytes += view.NumBytes();
    }
    checkpoint.Finish();
    EXPECT_EQ(num_bytes, checkpoint.total_bytes());
    ++num_models;
  }
  EXPECT_GE(num_models, 56u);
}

}  // namespace
}  // namespace switchyard
